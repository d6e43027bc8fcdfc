import signal
import subprocess
import sys

import pytest

from mmrl.comparison.run import Job, run_jobs
from tests.programs import is_alive, wait_until


def test_at_most_the_limit_runs_at_once(tmp_path):
    script = "import time; print(time.time()); time.sleep(0.3); print(time.time())"
    jobs = [Job(f"j{i}", (sys.executable, "-c", script), tmp_path / f"{i}.log") for i in range(4)]
    ended = []
    run_jobs(jobs, 2, 600.0, ended.append)
    spans = [tuple(map(float, job.log.read_text().split())) for job in jobs]
    for start, _ in spans:
        assert sum(begin <= start < end for begin, end in spans) <= 2
    assert sorted(result.job.label for result in ended) == ["j0", "j1", "j2", "j3"]
    assert all(result.reason is None for result in ended)


def test_nothing_is_left_behind_when_the_caller_is_stopped(tmp_path):
    script = "import os, subprocess, sys, time; child = subprocess.Popen([sys.executable, '-c', 'import time; "
    script += "time.sleep(600)']); print(os.getpid(), child.pid, flush=True); time.sleep(600)"
    sleeper = Job("sleeper", (sys.executable, "-c", script), tmp_path / "sleeper.log")
    waits = (
        f"import pathlib, time\nwhile len(pathlib.Path({str(sleeper.log)!r}).read_text().split()) < 2: time.sleep(0.05)"
    )
    quick = Job("quick", (sys.executable, "-c", waits), tmp_path / "quick.log")

    def stop(result):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_jobs([sleeper, quick], 2, 600.0, stop)
    pids = [int(word) for word in sleeper.log.read_text().split()]
    assert len(pids) == 2
    wait_until(lambda: not any(map(is_alive, pids)))


def test_a_terminated_comparison_leaves_no_run_behind(tmp_path):
    code = (
        "import pathlib, sys\n"
        "from mmrl.comparison.run import Job, run_jobs\n"
        "child = 'import os, pathlib, time; pathlib.Path(\"pid\").write_text(str(os.getpid())); time.sleep(600)'\n"
        "run_jobs([Job('a', (sys.executable, '-c', child), pathlib.Path('a.log'))], 1, 60.0, print)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path)
    pid = tmp_path / "pid"
    wait_until(lambda: pid.is_file() and pid.read_text())
    process.send_signal(signal.SIGTERM)
    assert process.wait(300) == 128 + signal.SIGTERM
    assert not is_alive(int(pid.read_text()))
