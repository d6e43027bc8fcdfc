"""One attempt to break each promise of a strict process."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import pytest

from mmrl.errors import UserError
from mmrl.workers import run_code as running
from mmrl.workers import sandbox
from mmrl.workers.run_code import run_code
from mmrl.workers.sandbox import Limits
from tests.programs import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="strict processes need Linux")
REASON = sandbox.why_not() if sys.platform == "linux" else "not Linux"
SMALL = Limits(memory_mb=256, cpu_s=2, file_mb=2, processes=4)


@pytest.fixture
def run():
    if REASON is not None:
        pytest.skip(f"no strict processes here: {REASON}")

    def run(source, *, timeout_s=60.0, **options):
        return run_code(textwrap.dedent(source), timeout_s=timeout_s, **options)

    return run


def test_a_program_runs_with_input_files_and_folder(run):
    source = """
        import os, sys, tempfile, json, math
        text = open("data.txt").read() + sys.stdin.read()
        open("new.txt", "w").write(text)
        with tempfile.NamedTemporaryFile() as file:
            assert os.path.dirname(file.name) == os.getcwd() == os.environ["HOME"]
        print(open("new.txt").read().upper())
        print("note", file=sys.stderr)
        sys.exit(3)
    """
    result = run(source, stdin="input", files={"data.txt": b"file and "})
    assert (result.exit_code, result.stdout, result.stderr) == (3, "FILE AND INPUT\n", "note\n")
    assert (result.stopped, result.cut, result.succeeded) == ("", False, False)


def test_numpy_runs(run):
    assert run("import numpy; print(numpy.linalg.det(numpy.eye(3)))").stdout == "1.0\n"


def test_it_reaches_no_network_not_even_this_machine(run, tmp_path):
    source = """
        import socket
        for family, kind, address in {targets}:
            try:
                connection = socket.socket(family, kind)
                connection.settimeout(5)
                connection.connect(address)
            except OSError as error:
                print(type(error).__name__)
            else:
                print("connected")
    """
    with socket.socket() as listening, socket.socket(socket.AF_UNIX) as local:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        local.bind(str(tmp_path / "socket"))
        local.listen()
        targets = [
            (int(socket.AF_INET), int(socket.SOCK_STREAM), listening.getsockname()),
            (int(socket.AF_INET), int(socket.SOCK_DGRAM), listening.getsockname()),
            (int(socket.AF_INET6), int(socket.SOCK_STREAM), ("::1", listening.getsockname()[1])),
            (int(socket.AF_UNIX), int(socket.SOCK_STREAM), str(tmp_path / "socket")),
        ]
        for target in targets[:1] + targets[3:]:
            socket.socket(*target[:2]).connect(target[2])  # it can be reached from here
        result = run(source.format(targets=targets))
    assert result.stdout.split() == ["PermissionError"] * 4


def test_it_writes_nothing_outside_its_folder(run, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("as it was")
    before = victim.stat()
    source = f"""
        import os, shutil
        victim, folder = {str(victim)!r}, {str(tmp_path)!r}
        attempts = [
            lambda: open(victim, "w"), lambda: open(victim, "a"), lambda: os.truncate(victim, 0),
            lambda: os.open(victim, os.O_RDONLY | os.O_TRUNC), lambda: os.remove(victim),
            lambda: os.rename(victim, "stolen"), lambda: os.chmod(victim, 0), lambda: os.utime(victim, (0, 0)),
            lambda: os.link(victim, "linked"), lambda: os.mkdir(folder + "/new"),
            lambda: open(folder + "/new.txt", "w"), lambda: os.symlink("/", folder + "/link"),
            lambda: os.mknod(folder + "/pipe", 0o010600), lambda: open("/tmp/mmrl_strict_escape", "w"),
            lambda: open("/dev/shm/mmrl_strict_escape", "w"), lambda: os.setxattr(victim, "user.x", b"1"),
            lambda: open("/proc/sys/kernel/core_pattern", "w"),
        ]
        os.symlink(victim, "shortcut")
        attempts.append(lambda: open("shortcut", "w"))
        for attempt in attempts:
            try:
                attempt()
            except OSError:
                print("refused")
            else:
                print("done")
    """
    assert run(source).stdout.split() == ["refused"] * 18
    after = victim.stat()
    assert victim.read_text() == "as it was"
    assert (after.st_mode, after.st_mtime_ns, after.st_nlink) == (before.st_mode, before.st_mtime_ns, before.st_nlink)
    assert os.listdir(tmp_path) == ["victim"]
    assert not Path("/tmp/mmrl_strict_escape").exists()


def test_its_folder_goes_with_it(run):
    """However deep and full it is: nothing of it was ever on a disk, and nobody has to remove it."""
    before = set(os.listdir(tempfile.gettempdir()))
    source = """
        import os
        print(os.getcwd())
        for _ in range(5_000):
            os.mkdir("deep")
            os.chdir("deep")
    """
    result = run(source)
    assert result.succeeded, result
    assert not Path(result.stdout.strip()).exists()
    assert not [name for name in set(os.listdir(tempfile.gettempdir())) - before if "strict" in name]


def test_it_reads_no_secret_of_this_process_or_of_another(run, monkeypatch):
    monkeypatch.setenv("MMRL_TEST_SECRET", "sesame")
    with subprocess.Popen(["sleep", "60"]) as other:
        source = f"""
            import os
            places = ["/proc/self/environ", "/proc/{other.pid}/environ", "/proc/{os.getpid()}/mem"]
            try:
                places += ["/proc/" + name + "/environ" for name in os.listdir("/proc") if name.isdigit()]
            except OSError:
                pass
            found = [repr(dict(os.environ))]
            for place in places:
                try:
                    found.append(open(place, "rb").read().decode(errors="replace"))
                except OSError:
                    pass
            print("sesame" in "".join(found))
        """
        try:
            # from here it can be read, as soon as the program has started
            wait_until(lambda: b"sesame" in Path(f"/proc/{other.pid}/environ").read_bytes())
            assert run(source).stdout == "False\n"
        finally:
            other.kill()


def test_it_sees_no_other_process_and_signals_none(run):
    received = []
    before = signal.signal(signal.SIGUSR1, lambda *_: received.append(1))
    source = f"""
        import os, signal
        try:
            seen = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        except OSError:
            seen = []
        for target in ({os.getpid()}, os.getppid(), -1):
            try:
                os.kill(target, signal.SIGUSR1) if target > 0 else None
            except OSError:
                pass
        print(len(seen) <= 3, {os.getpid()} in seen and os.getpid() > 10)
    """
    try:
        result = run(source)
        time.sleep(0.05)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not received
    assert result.stdout == "True False\n"


def test_memory_is_bounded(run):
    result = run("held = []\nwhile True: held.append(bytearray(1 << 24))", limits=SMALL)
    assert not result.succeeded
    assert "MemoryError" in result.stderr or result.stopped == "memory"


def test_cpu_time_is_bounded(run):
    result = run("while True: pass", limits=SMALL)
    assert result.stopped == "cpu"


def test_time_is_bounded(run):
    assert run("import time; time.sleep(1000)", timeout_s=1.0).stopped == "timeout"


def test_files_are_bounded(run):
    source = """
        try:
            with open("large", "wb") as file:
                for _ in range(100):
                    file.write(bytes(1 << 20))
                    file.flush()
        except OSError as error:
            print(error.errno)
        import os
        print(os.path.getsize("large") <= 2 << 20)
    """
    lines = run(source, limits=SMALL).stdout.split()
    assert lines[0] in ("27", "28")  # EFBIG, or ENOSPC of a folder in memory
    assert lines[1] == "True"


def test_the_number_of_files_is_bounded_and_so_is_the_time_to_be_rid_of_them(run):
    source = """
        import itertools, os
        for number in itertools.count():
            os.mkdir(str(number))
    """
    result = run(source, limits=Limits(files=500))
    assert result.stopped == "files"
    assert result.seconds < 30


def test_output_is_bounded(run):
    result = run("while True: print('x' * 1000)", timeout_s=1.0, output_bytes=5000)
    assert len(result.stdout) == 5000
    assert result.cut


def test_a_fork_bomb_stays_small(run):
    source = """
        import os, time
        count = 0
        while count < 1000:
            try:
                pid = os.fork()
            except OSError:
                break
            if pid == 0:
                time.sleep(60)
                os._exit(0)
            count += 1
        print(count)
    """
    result = run(source, limits=SMALL)
    assert int(result.stdout) <= 8


def test_a_thread_bomb_is_ended(run):
    source = """
        import threading, time
        count = 0
        try:
            while count < 1000:
                threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
                count += 1
        except RuntimeError:
            count = -1
        time.sleep(30 if count > 0 else 0)
        print(count)
    """
    result = run(source, limits=Limits(memory_mb=100_000, processes=8))
    assert result.stopped == "processes" or result.stdout == "-1\n"


def test_it_sees_no_files_of_the_project(run):
    result = run(f"print(open({__file__!r}).read())")
    assert "FileNotFoundError" in result.stderr


def test_nothing_outlives_it(run):
    mark = f"left_{os.getpid()}"
    source = f"""
        import os, time, ctypes
        ctypes.CDLL(None).prctl(15, b"{mark[:15]}", 0, 0, 0)
        try:
            if os.fork() == 0:
                try:
                    os.setsid()
                except OSError:
                    pass
                os.environ.clear()
                if os.fork() == 0:
                    time.sleep(600)
                os._exit(0)
        except OSError:
            pass
        time.sleep(0.3)
    """
    run(source)
    wait_until(lambda: not any(mark[:15] in _name(pid) for pid in os.listdir("/proc") if pid.isdigit()))


ABANDONED = """
import sys
from mmrl.workers.run_code import run_code
run_code(sys.argv[1], timeout_s=600)
"""


def test_nothing_outlives_a_caller_that_is_killed(run, tmp_path):
    mark = f"lone_{os.getpid()}"
    source = f"""
import os, time, ctypes
ctypes.CDLL(None).prctl(15, b"{mark[:15]}", 0, 0, 0)
try:
    os.fork()
except OSError:
    pass
time.sleep(600)
"""

    def running_ones():
        return [pid for pid in os.listdir("/proc") if pid.isdigit() and mark[:15] in _name(pid)]

    variables = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", ABANDONED, source], env=variables) as caller:
        wait_until(running_ones)
        caller.kill()
    wait_until(lambda: not running_ones())
    assert not list(tmp_path.iterdir())


def _name(pid):
    """Name of a process that runs; one that has ended and waits to be read by its parent has none."""
    try:
        name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
    except OSError:
        return ""
    return "" if rest.split()[0] == "Z" else name


def test_it_makes_no_new_view_of_the_system(run):
    source = """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        unshared = libc.unshare(0x10000000)
        mounted = libc.mount(b"tmpfs", os.getcwd().encode(), b"tmpfs", 0, None)
        traced = libc.ptrace(16, 1, 0, 0)
        ring = libc.syscall(425, 8, ctypes.create_string_buffer(200))
        typed = libc.ioctl(0, 0x5412, b"x")
        hidden = libc.memfd_create(b"x", 0)
        print(unshared, mounted, traced, ring, typed, hidden)
    """
    assert run(source).stdout == "-1 -1 -1 -1 -1 -1\n"


def test_without_bubblewrap_it_is_refused_with_the_command_to_install_it(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match=r"bubblewrap is not installed.*apt install bubblewrap libseccomp2"):
        sandbox.require_strict.__wrapped__()


def test_a_step_that_fails_ends_it_before_the_program_begins(run, monkeypatch):
    """Its files cannot be read."""
    strict = sandbox.strict_command
    monkeypatch.setattr(
        running, "strict_command", lambda limits, readable, files, *rest: strict(limits, readable, {"x": 999}, *rest)
    )
    with pytest.raises(UserError, match="sandbox: strict no longer works"):
        run("print('begun')")


def test_from_several_threads(run):
    found = {}

    def work(number):
        found[number] = run(f"print({number})").stdout

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: f"{number}\n" for number in range(3)}


def test_a_program_cannot_pretend_that_it_never_began(run):
    result = run("import os, sys; sys.stderr.write('sandbox: bwrap: no'); sys.stderr.flush(); os._exit(71)")
    assert (result.exit_code, result.stopped) == (71, "")


def test_files_have_plain_names(run):
    with pytest.raises(UserError, match="plain name"):
        run("", files={"../x": b""})
