"""The lock of a run folder: one owner, taken over from the dead, refused from afar."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from dataclasses import asdict, replace

import pytest

from mmrl.errors import UserError
from mmrl.training.record.run_lock import LOCK_FILE, Owner, RunLock, read_owner


def put(folder, owner):
    folder.mkdir(exist_ok=True)
    (folder / LOCK_FILE).write_text(json.dumps(asdict(owner)))


def test_second_run_is_refused_while_the_first_one_lives(tmp_path):
    with RunLock(tmp_path / "run"):
        with pytest.raises(UserError, match=f"in use by process {os.getpid()} on"):
            RunLock(tmp_path / "run").acquire()
        (tmp_path / "run" / "metrics.jsonl").write_text("")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]
    with RunLock(tmp_path / "run"):
        pass


def test_folder_that_nothing_was_written_to_goes_with_the_lock(tmp_path):
    with RunLock(tmp_path / "a" / "run"):
        assert read_owner(tmp_path / "a" / "run").pid == os.getpid()
    assert not (tmp_path / "a" / "run").exists()


def test_lock_of_a_dead_process_is_taken_over_with_one_line(tmp_path, caplog):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    put(tmp_path / "run", replace(Owner.current(), pid=ended.pid))
    with RunLock(tmp_path / "run"):
        assert read_owner(tmp_path / "run").pid == os.getpid()
    assert len(caplog.records) == 1
    assert f"took over the lock of process {ended.pid}" in caplog.text


def test_number_of_a_dead_process_that_another_one_has_now(tmp_path):
    put(tmp_path / "run", replace(Owner.current(), started="1"))
    with RunLock(tmp_path / "run"):
        assert read_owner(tmp_path / "run") == replace(Owner.current(), since=read_owner(tmp_path / "run").since)


def test_lock_from_before_a_restart_of_the_machine_is_taken_over(tmp_path):
    own = Owner.current()
    put(tmp_path / "run", replace(own, boot=f"another {own.boot.partition(' ')[2]}"))
    with RunLock(tmp_path / "run"):
        pass


@pytest.mark.parametrize("change", [{"host": "elsewhere"}, {"boot": f"{Owner.current().boot}x"}])
def test_lock_of_another_machine_or_container_is_refused_with_the_way_out(tmp_path, change):
    put(tmp_path / "run", replace(Owner.current(), **change))
    with pytest.raises(UserError, match=f"remove the lock: rm {tmp_path}/run/{LOCK_FILE}"):
        RunLock(tmp_path / "run").acquire()
    assert (tmp_path / "run" / LOCK_FILE).exists()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 3}', '{"host": "a", "pid": [], "started": 1, "boot": 1}'])
def test_lock_that_cannot_be_read_is_never_taken_over(tmp_path, text):
    (tmp_path / LOCK_FILE).write_text(text)
    with pytest.raises(UserError, match=f"cannot be read .*rm {tmp_path}/{LOCK_FILE}"):
        RunLock(tmp_path).acquire()
    assert (tmp_path / LOCK_FILE).read_text() == text


def _take(folder, start, results):
    start.wait()
    try:
        RunLock(folder).acquire()
        results.put("taken")
    except UserError:
        results.put("refused")
    start.wait()  # the owner lives until all have tried


def test_of_several_processes_that_find_a_dead_lock_one_gets_it(tmp_path):
    put(tmp_path / "run", replace(Owner.current(), started="1"))
    context = multiprocessing.get_context("fork")
    start, results = context.Barrier(4), context.Queue()
    processes = [context.Process(target=_take, args=(tmp_path / "run", start, results)) for _ in range(4)]
    for process in processes:
        process.start()
    found = sorted(results.get(timeout=60) for _ in processes)
    for process in processes:
        process.join()
    assert found == ["refused", "refused", "refused", "taken"]
