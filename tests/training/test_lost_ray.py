"""A run whose Ray dies says so, and can be continued; a Ray that it has started is closed to other machines."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from omegaconf import OmegaConf

from mmrl.runs.folder import resume_command
from mmrl.training import ray_sentinel
from tests.compare.test_shared_ray import BASE
from tests.programs import Program, is_alive, wait_until

SCRIPT = str(ray_sentinel.__file__)


class Services:
    """Two sockets in the place of Ray's services, and a sentinel that is connected to them."""

    def __init__(self, folder: Path) -> None:
        self.raylet, self.gcs = socket.socket(socket.AF_UNIX), socket.socket()
        self.raylet.bind(str(folder / "raylet"))
        self.gcs.bind(("127.0.0.1", 0))
        self.raylet.listen()
        self.gcs.listen()
        job = {"raylet": str(folder / "raylet"), "gcs": f"127.0.0.1:{self.gcs.getsockname()[1]}", "host": "here"}
        command = [sys.executable, "-I", "-S", SCRIPT, json.dumps(job | {"resume": resume_command(folder / "my run")})]
        self.sentinel = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
        self.link, _ = self.raylet.accept()

    def die(self) -> None:
        """End the raylet."""
        self.raylet.close()
        self.link.close()

    def last_words(self, said: bytes = b"") -> str:
        """End the training process; returns the sentinel's standard error."""
        return self.sentinel.communicate(said)[1].decode()


def test_the_sentinel_names_what_has_died_and_the_command_that_continues(tmp_path):
    """The raylet's end is seen before that of the training process."""
    run = f"{tmp_path}/my run"
    end = f"on here; continue with: mmrl train '{run}/config.yaml' 'output_dir={run}' --resume\n"
    died = "has died (killed, or out of memory), and Ray has ended the training process"
    services = Services(tmp_path)
    services.die()
    # it asks the other one as soon as it has seen it
    services.gcs.accept()
    assert services.last_words() == f"mmrl: Ray's raylet {died} {end}"


def test_the_sentinel_is_silent_about_a_run_that_has_ended_by_itself(tmp_path):
    assert Services(tmp_path).last_words(b"1") == ""


def test_the_sentinel_speaks_for_a_training_process_that_was_killed(tmp_path):
    assert "the training process was killed on here" in Services(tmp_path).last_words()


class Run:
    """A run in a process of its own, whose workers have answered."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "a run"
        settings = {"steps": 100_000, "learning_rate": 1e-6}
        config = BASE | {"trainer": BASE["trainer"] | settings, "checkpoint": {"every": 1, "keep": 2}}
        OmegaConf.save(OmegaConf.create(config), folder / "run.yaml")
        words = ["-m", "mmrl.cli", "train", str(folder / "run.yaml"), f"output_dir={self.folder}"]
        self.program = Program(words)
        metrics = self.folder / "metrics.jsonl"
        wait_until(lambda: (metrics.is_file() and metrics.stat().st_size) or not self.program.running(), 180)
        assert self.program.running(), self.program.wait()[2][-2000:]
        self.children = psutil.Process(self.program.pid).children(recursive=True)

    def kill(self, name: str) -> None:
        next(child for child in self.children if child.name() == name).kill()

    def ports(self) -> set[str]:
        """Addresses at which the run's processes listen."""
        processes = [psutil.Process(self.program.pid), *self.children]
        links = [link for process in processes for link in process.net_connections("inet")]
        return {link.laddr.ip.removeprefix("::ffff:") for link in links if link.status == psutil.CONN_LISTEN}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("raylet", "Ray's raylet has died"),
        ("gcs_server", "Ray's gcs_server has died"),
        ("training", "the training process was killed"),
    ],
)
def test_a_run_whose_ray_is_killed_says_so_and_goes_on(name, reason, tmp_path):
    pytest.importorskip("ray")
    run = Run(tmp_path)
    sentinel = next(child for child in run.children if SCRIPT in child.cmdline())
    # nothing is open to other machines
    assert run.ports() == {"127.0.0.1"}
    if name == "training":
        os.kill(run.program.pid, signal.SIGKILL)
    else:
        run.kill(name)
    # it speaks after the end of the training process
    sentinel.wait(240)
    code, _, errors = run.program.wait()
    assert code != 0
    lines = [line for line in errors.splitlines() if "--resume" in line]
    assert len(lines) == 1, errors[-3000:]
    assert reason in lines[0]
    assert "Traceback" not in errors
    _, left = psutil.wait_procs(run.children, timeout=60)
    # Ray's own agents look for their raylet now and then, and take minutes on a busy machine
    assert [process for process in left if is_alive(process.pid) and "Agent" not in process.name()] == []
    done = json.loads((run.folder / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    words = ["train", str(run.folder / "config.yaml"), f"output_dir={run.folder}", "--resume"]
    code, _, errors = Program(["-m", "mmrl.cli", *words, f"trainer.steps={done + 2}"]).wait()
    assert code == 0, errors[-2000:]
    assert json.loads((run.folder / "result.json").read_text())["status"] == "done"
