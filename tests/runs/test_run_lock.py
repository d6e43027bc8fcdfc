"""The lock of a run folder: one owner, free again when its process has ended in any way."""

import multiprocessing
import os
import signal
import subprocess
import sys

import pytest

from mmrl.errors import UserError
from mmrl.runs.folder import LOCK_FILE, RunLock, owner_of


def test_second_run_is_refused_while_the_first_one_lives(tmp_path):
    with RunLock(tmp_path / "run"):
        for _ in range(2):  # the refused one leaves the lock as it was
            with pytest.raises(UserError, match=f"in use by process {os.getpid()} on"):
                RunLock(tmp_path / "run").acquire()
        (tmp_path / "run" / "metrics.jsonl").write_text("")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]
    with RunLock(tmp_path / "run"):
        pass


def test_folder_that_nothing_was_written_to_goes_with_the_lock(tmp_path):
    with RunLock(tmp_path / "a" / "run"):
        assert f"process {os.getpid()} on" in owner_of(tmp_path / "a" / "run")
    assert not (tmp_path / "a" / "run").exists()


HOLDER = """
import sys, time
from pathlib import Path
from mmrl.runs.folder import RunLock
RunLock(Path(sys.argv[1])).acquire()
print("taken", flush=True)
time.sleep(600)
"""


def test_lock_of_a_killed_process_is_free(tmp_path):
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "taken\n"
        assert f"process {holder.pid} on" in owner_of(tmp_path)
        holder.send_signal(signal.SIGKILL)
    assert (tmp_path / LOCK_FILE).exists()
    assert owner_of(tmp_path) is None
    with RunLock(tmp_path):
        assert f"process {os.getpid()} on" in owner_of(tmp_path)


@pytest.mark.parametrize("text", ["", "{", '{"host": "a", "pid": 3}'])
def test_file_without_a_lock_is_free_whatever_it_says(tmp_path, text):
    (tmp_path / LOCK_FILE).write_text(text)
    assert owner_of(tmp_path) is None
    with RunLock(tmp_path):
        pass


def test_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file is not a folder; choose another path"):
        RunLock(tmp_path / "file" / "run").acquire()


def _take(folder, start, results):
    start.wait()
    try:
        RunLock(folder).acquire()
        results.put("taken")
    except UserError:
        results.put("refused")
    start.wait()  # the owner lives until all have tried


def test_of_several_processes_one_gets_it(tmp_path):
    (tmp_path / LOCK_FILE).write_text("process 1 on elsewhere")
    context = multiprocessing.get_context("fork")
    start, results = context.Barrier(4), context.Queue()
    processes = [context.Process(target=_take, args=(tmp_path, start, results)) for _ in range(4)]
    for process in processes:
        process.start()
    found = sorted(results.get(timeout=60) for _ in processes)
    for process in processes:
        process.join()
    assert found == ["refused", "refused", "refused", "taken"]
