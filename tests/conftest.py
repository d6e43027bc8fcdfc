import contextlib
import gc
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest

from mmrl.workers.worker import Worker
from tests.charts import draw_no_charts
from tests.chat_server import running_chat_server

# Some virtual machines announce AMX instructions and then refuse them, which ends the process at the first bfloat16
# product; oneDNN reads this before its first use.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# Runs note there what they wrote (mmrl.trust); programs of tests inherit it.
STATE = os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="mmrl-state-")


def pytest_unconfigure():
    """Leave no folder behind."""
    shutil.rmtree(STATE, ignore_errors=True)


def pytest_collection_finish():
    """Leave what the imports have made out of later collections of garbage, each of which would go through it."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def chat_server():
    """A chat endpoint with `url`, `requests` and `answers`."""
    with running_chat_server() as server:
        yield server


@pytest.fixture
def hanging(monkeypatch, tmp_path_factory):
    """Let only requests of worker processes run out of time that hang, however slow a busy machine makes the others.

    A function that hangs adds its process's id to the file that MMRL_TEST_HANGING names, as the result does.
    """
    file = tmp_path_factory.mktemp("hanging") / "pids"
    file.touch()
    monkeypatch.setenv("MMRL_TEST_HANGING", str(file))

    def only_of_hanging(limit):
        def put_off(worker):
            hangs = str(worker.handle.pid) in file.read_text().split()
            return limit(worker) if hangs else max(limit(worker), time.monotonic() + 0.2)

        return put_off

    monkeypatch.setattr(Worker, "_deadline", only_of_hanging(Worker._deadline))
    monkeypatch.setattr(Worker, "_last_beat_due", only_of_hanging(Worker._last_beat_due))

    def hangs(pid):
        with file.open("a") as pids:
            pids.write(f"{pid}\n")

    return hangs


@pytest.fixture
def closing():
    """Hand on what is given, and close it after the test."""
    with contextlib.ExitStack() as stack:
        yield lambda opened: stack.enter_context(contextlib.closing(opened))


@pytest.fixture(autouse=True)
def no_charts(monkeypatch):
    """Leave the charts out of reports: they take longer than a tiny run; tests/report draws them."""
    draw_no_charts(monkeypatch.setattr)


@pytest.fixture(autouse=True)
def import_path():
    """Forget the folders that a test imports from and its modules there: later tests have files of equal names."""
    before = list(sys.path)
    yield
    if sys.path == before:
        return
    added = {str(Path(folder).absolute()) for folder in sys.path} - {str(Path(folder).absolute()) for folder in before}
    if added:
        sys.path[:] = before
        for name, module in list(sys.modules.items()):
            file = Path(getattr(module, "__file__", None) or "/")
            folder = file.parent.parent if file.name == "__init__.py" else file.parent
            if "." not in name and str(folder) in added:
                del sys.modules[name]


@pytest.fixture(autouse=True)
def signal_handlers():
    """Fail a test that leaves a signal handler behind, which would receive the signals of later tests."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    after = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        signal.signal(number, before[number])
    assert after == before
