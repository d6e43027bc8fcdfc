"""Programs of tests, in forks of one process that has imported the large libraries: importing them takes five seconds.

What a test proves about starting Python, or about what an import loads, needs a process of its own.
"""

import atexit
import functools
import json
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PRELOADED = ("tests.preloaded", "tests.contracts.test_two_processes")


def is_alive(pid: int) -> bool:
    """Whether a process runs; one whose parents are dead may stay a zombie where nobody adopts it."""
    try:
        os.kill(pid, 0)
        status = Path(f"/proc/{pid}/stat")
        return not Path("/proc/self").exists() or status.read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def wait_until(condition: Callable[[], Any], seconds: float = 300.0) -> None:
    """Wait for an event; the limit, which a busy machine does not reach, only ends a test that hangs."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def fork_context() -> Any:
    """The multiprocessing context whose processes are forked from one with the large libraries and without threads."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


class Program:
    """`python WORDS...` that runs in a folder; its output goes to files."""

    def __init__(self, words: Sequence[str], folder: Path = ROOT, **environment: str) -> None:
        self.output, self.errors = (Path(tempfile.mkstemp(prefix="mmrl-program-")[1]) for _ in range(2))
        variables = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": str(ROOT), **environment}
        options = (list(words), str(folder), variables, str(self.output), str(self.errors))
        self.process = fork_context().Process(target=_run, args=options)
        self.process.start()

    @property
    def pid(self) -> int:
        return int(self.process.pid)

    def running(self) -> bool:
        return bool(self.process.is_alive())

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, limit_s: float = 240.0) -> tuple[int, str, str]:
        """Exit code, standard output and errors."""
        self.process.join(limit_s)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in (self.output, self.errors)]
        for path in (self.output, self.errors):
            path.unlink()
        return int(self.process.exitcode), texts[0], texts[1]


def run_program(words: Sequence[str], folder: Path = ROOT, **environment: str) -> str:
    """Standard output of a program that must succeed."""
    code, output, errors = Program(words, folder, **environment).wait()
    assert code == 0, f"exit code {code}\n{output[-1000:]}{errors[-3000:]}"
    return output


def run_processes(words: Sequence[str], count: int, **environment: str) -> None:
    """A program in several processes of torch.distributed, or in one, which must succeed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment |= {"ACCELERATE_USE_CPU": "true"}
    several = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} if count > 1 else {}
    ranks = [
        Program(words, **environment, **several, **({"RANK": str(rank), "LOCAL_RANK": str(rank)} if several else {}))
        for rank in range(count)
    ]
    ends = [rank.wait() for rank in ranks]
    assert [code for code, _, _ in ends] == [0] * count, "\n".join(errors[-3000:] for _, _, errors in ends)


def _run(words: list[str], folder: str, environment: Mapping[str, str], output: str, errors: str) -> None:
    for path, number in ((output, 1), (errors, 2)):
        file = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    for one in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(one, signal.default_int_handler if one == signal.SIGINT else signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    tempfile.tempdir = None
    first = "" if words[0] in ("-c", "-m") else str(Path(words[0]).parent)
    sys.path[:] = [first, *environment["PYTHONPATH"].split(os.pathsep), *sys.path[1:]]
    try:
        _call(words)()
    finally:
        atexit._run_exitfuncs()


def _call(words: list[str]) -> Callable[[], Any]:
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        return lambda: exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    name, rest = (words[1], words[2:]) if words[0] == "-m" else (words[0], words[1:])
    sys.argv = [name, *rest]
    if words[0] == "-m":
        return lambda: runpy.run_module(name, run_name="__main__", alter_sys=True)
    return lambda: runpy.run_path(name, run_name="__main__")


FORK_AFTER_TORCH = """
import json, os, sys, tempfile, torch
for line in sys.stdin:
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if child == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            try:
                exec(json.loads(line), {"__name__": "__main__"})
                sys.stdout.flush()
            except BaseException:
                sys.excepthook(*sys.exc_info())
                sys.stderr.flush()
                os._exit(1)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        output.seek(0)
        print(json.dumps([code, output.read().decode()]), flush=True)
"""


@functools.cache
def _after_torch() -> subprocess.Popen[str]:
    command = [sys.executable, "-c", FORK_AFTER_TORCH]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def run_after_torch(program: str) -> str:
    """What a program prints in a process that has imported torch and nothing else, for tests of further imports."""
    server = _after_torch()
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps(program) + "\n")
    server.stdin.flush()
    code, output = json.loads(server.stdout.readline())
    assert code == 0, output
    return str(output)
