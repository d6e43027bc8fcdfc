"""A service that misbehaves on request; loaded by path in a worker of any Python from 3.8 on."""

import ctypes
import os
import pickle
import signal
import subprocess
import sys
import time


def _note_hanging():
    """Say to the fixture `hanging` that this process answers no more."""
    with open(os.environ.get("MMRL_TEST_HANGING", os.devnull), "a") as file:
        file.write(f"{os.getpid()}\n")


class TiredError(Exception):
    for_user = True


class Service:
    def __init__(self, name="", marks="", flaky=False):
        self.name, self.marks, self.kept = name, marks, None
        if flaky and self._first_time():
            os._exit(5)

    def hello(self):
        return {"name": self.name, "python": list(sys.version_info[:2])}

    def answer(self, fields, arrays):
        return getattr(self, fields["do"])(fields, arrays)

    def close(self):
        self._mark("closed")

    def echo(self, fields, arrays):
        return {"echo": fields.get("value")}, arrays

    def pid(self, fields, arrays):
        time.sleep(fields.get("seconds", 0.0))
        return {"pid": os.getpid()}, {}

    def keep(self, fields, arrays):
        self.kept = fields["value"]
        return {"pid": os.getpid()}, {}

    def show(self, fields, arrays):
        return {"kept": self.kept}, {}

    def modules(self, fields, arrays):
        return {"loaded": sorted(set(fields["names"]) & set(sys.modules)), "path": sys.path}, {}

    def sleep(self, fields, arrays):
        if fields["seconds"] >= 60:
            _note_hanging()
        time.sleep(fields["seconds"])
        return {}, {}

    def lock(self, fields, arrays):
        _note_hanging()
        ctypes.PyDLL(None).sleep(1000)

    def complain(self, fields, arrays):
        raise ValueError("the hinge\nbroke")

    def refuse(self, fields, arrays):
        raise TiredError("buy a larger arm")

    def die(self, fields, arrays):
        sys.stderr.write("the last words\n")
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    def leave(self, fields, arrays):
        os._exit(7)

    def once(self, fields, arrays):
        if self._first_time():
            os._exit(6)
        return {"pid": os.getpid()}, {}

    def child(self, fields, arrays):
        self._mark("child", subprocess.Popen(["sleep", "1000"]).pid)
        os._exit(0)

    def not_json(self, fields, arrays):
        return {"value": object()}, {}

    def write(self, fields, arrays):
        """Bypass the protocol: write bytes into the pool's pipe, whatever its descriptor."""
        data = {"pickle": pickle.dumps(Bomb(fields["path"])), "garbage": b"hello"}.get(fields["what"])
        if data is None:
            wire = sys.modules["mmrl_wire"]
            data = wire.pack(fields["message"])
        for descriptor in range(3, 64):
            try:
                if os.readlink("/proc/self/fd/" + str(descriptor)).startswith("pipe:"):
                    os.write(descriptor, data)
            except OSError:
                continue
        time.sleep(1000)

    def _first_time(self):
        try:
            os.close(os.open(os.path.join(self.marks, "first"), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def _mark(self, name, number=None):
        if self.marks:
            with open(os.path.join(self.marks, name), "a") as file:
                file.write(str(number or os.getpid()) + "\n")


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def make(**options):
    return Service(**options)


def broken():
    raise OSError("no licence found")


def unusable():
    raise TiredError("set ARM_FOLDER to where the arms lie")
