"""`mmrl train --processes N`, and programs that know nothing of the suite in the environment that the set-up leaves."""

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from mmrl.cli.program import COMMANDS, _parse
from mmrl.errors import UserError
from mmrl.runs import launch
from tests.programs import wait_until

ROOT = Path(__file__).parents[2]
CONFIG = """
recipe: tests.training.toy:ToyRecipe:ToyConfig
trainer: {steps: 2, tasks_per_step: 4, samples_per_task: 4}
tracking: {quiet: true, tensorboard: false}
"""


def mmrl(folder, *words, launcher=("-m", "mmrl.cli"), **variables):
    (folder / "toy.yaml").write_text(CONFIG)
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, *launcher, "train", "toy.yaml", "output_dir=run", *words]
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)


def test_processes_are_started_and_named_in_the_result(tmp_path):
    done = mmrl(tmp_path, "--processes", "2")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert (result["status"], result["processes"], result["device"]) == ("done", 2, "cpu")
    assert f"processes 2, device cpu, host {result['host']}" in done.stdout


def test_a_process_that_fails_ends_the_others(monkeypatch, tmp_path):
    monkeypatch.setattr(launch, "GRACE_S", 0.2)
    programs = ("import time; time.sleep(600)", "raise SystemExit(2)")
    ranks = [subprocess.Popen([sys.executable, "-c", program]) for program in programs]
    assert launch._wait(ranks, [tmp_path / "0", tmp_path / "1"]) == 1
    assert [rank.returncode for rank in ranks] == [-signal.SIGKILL, 2]


def test_the_process_that_failed_is_told_from_those_that_failed_with_it(tmp_path):
    words = [tmp_path / str(rank) for rank in range(4)]
    for rank, said_s in ((2, 1), (1, 2)):
        words[rank].write_text("why")
        os.utime(words[rank], (said_s, said_s))
    ranks = [SimpleNamespace(returncode=code) for code in (1, 1, 1, 0)]
    assert launch._first_failed(ranks, words) == 2, "it was the first to say why"
    ranks[0].returncode = -signal.SIGSEGV
    assert launch._first_failed(ranks, words) == 0, "a killed process says nothing"
    assert launch._first_failed(ranks[3:], words) is None
    assert launch._end_of(-signal.SIGSEGV) == "was killed by SIGSEGV"
    assert "lack of memory" in launch._end_of(-signal.SIGKILL)


STEPS = "trainer.steps=1000000"


@contextlib.contextmanager
def begun(folder, *words, launcher=("-m", "mmrl.cli"), **variables):
    """A run in several processes that has written steps, its processes by rank, and all of them."""
    (folder / "toy.yaml").write_text(CONFIG)
    command = [sys.executable, *launcher, "train", "toy.yaml", "output_dir=run", "checkpoint.every=1", *words]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    with subprocess.Popen(command, cwd=folder, env=variables, stderr=subprocess.PIPE, text=True) as program:
        try:
            rows = folder / "run/metrics.jsonl"
            wait_until(lambda: program.poll() is not None or (rows.is_file() and rows.read_text().count("\n") > 3))
            assert program.poll() is None, program.stderr.read()
            everything = psutil.Process(program.pid).children(recursive=True)
            ranks = {each.environ()["RANK"]: each for each in everything if "RANK" in each.environ()}
            yield program, [ranks[rank] for rank in sorted(ranks)], everything
        finally:
            program.kill()


def resumed(folder, command):
    """Run the command of a message, for two steps more than there are."""
    steps = max(int(path.name[5:]) for path in (folder / "run/checkpoints").glob("step-*")) + 2
    words = [word for word in shlex.split(command) if not word.startswith("trainer.steps=")]
    assert words[:2] == ["mmrl", "train"]
    command = [sys.executable, "-m", "mmrl.cli", *words[1:], f"trainer.steps={steps}"]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads((folder / "run/result.json").read_text())["steps"] == steps


@pytest.mark.slow
@pytest.mark.parametrize(("lost", "count"), [(0, 2), (1, 2), (2, 3)])
def test_a_killed_process_is_named_with_the_command_that_resumes(lost, count, tmp_path):
    tasks = f"trainer.tasks_per_step={2 * count}"
    with begun(tmp_path, STEPS, tasks, "--processes", str(count)) as (program, ranks, everything):
        ranks[lost].kill()
        (line,) = program.communicate()[1].splitlines()
    assert program.returncode == 137
    start, _, command = line.partition("; continue with: ")
    name = f"mmrl: process {lost} of {count} on {socket.gethostname()} was killed by SIGKILL"
    assert start == f"{name}, perhaps by the system because of a lack of memory (see dmesg); the others were stopped"
    assert psutil.wait_procs(everything, timeout=60)[1] == []
    assert f"--processes {count} --resume" in command
    resumed(tmp_path, command)


OWN = """
import os
from tests.training.toy import ToyConfig, ToyRecipe

class Recipe(ToyRecipe):
    def loss(self, *arguments, **options):
        if os.environ["RANK"] == "1":
            raise ValueError("no cup")
        return super().loss(*arguments, **options)
"""


def test_an_error_of_one_process_is_said_once(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    done = mmrl(tmp_path, "recipe=own:Recipe:ToyConfig", "--processes", "2", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert done.returncode == 1
    error, summary = done.stderr.splitlines()
    assert error.startswith("mmrl: run failed: ValueError: no cup; traceback in ")
    assert summary.startswith(
        f"mmrl: process 1 of 2 on {socket.gethostname()} failed with exit code 1; the others were "
    )
    assert summary.endswith("--processes 2 --resume")


@pytest.mark.slow
def test_a_signal_to_all_is_one_line_with_the_command_that_resumes(tmp_path):
    with begun(tmp_path, STEPS, "--processes", "2") as (program, _, everything):
        program.terminate()
        asked, line = program.communicate()[1].splitlines()
    assert "stopping after this step" in asked
    assert program.returncode == 143
    assert psutil.wait_procs(everything, timeout=60)[1] == []
    resumed(tmp_path, line.partition("; continue with: ")[2])


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_under_torchrun_the_process_that_is_left_says_which_one_is_lost(lost, tmp_path):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "mmrl.cli")
    with begun(tmp_path, STEPS, launcher=launcher, ACCELERATE_USE_CPU="true") as (program, ranks, _):
        ranks[lost].kill()
        (line,) = [each for each in program.communicate()[1].splitlines() if each.startswith("mmrl: ")]
    assert line.startswith(f"mmrl: run failed: process {lost} of 2 on {socket.gethostname()}, at ")
    assert "has not sent a heartbeat for" in line
    assert line.endswith("--resume, using the launcher that started it")


def test_several_launchers_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match="RANK is set"):
        COMMANDS["train"].run(_parse(["train", "x.yaml", "--processes", "2"]))


@pytest.mark.slow
def test_a_mistake_is_the_exit_code_of_all(tmp_path):
    done = mmrl(tmp_path, "trainer.tasks_per_step=3", "--processes", "2")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "with 2 processes it must be a multiple of 2" in line
    assert mmrl(tmp_path, "--processes", "0").returncode == 2


@pytest.fixture
def as_set_up(tmp_path):
    """Variables of an environment with the file that the set-up leaves where torchvision does not import."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(f"import site; site.addsitedir({str(ROOT / 'scripts')!r})\n")
    return {"PYTHONPATH": f"{tmp_path / 'site'}{os.pathsep}{ROOT}"}


ACCELERATE = ("-m", "accelerate.commands.accelerate_cli", "launch", "--multi_gpu", "--num_processes", "2")
LAUNCHERS = {
    "mmrl": (("-m", "mmrl.cli"), ("--processes", "2")),
    "accelerate": ((*ACCELERATE, "--main_process_port", "0", "-m", "mmrl.cli"), ()),
    "torchrun": (("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "mmrl.cli"), ()),
}


def trained_and_resumed(folder, launcher, words, processes, variables):
    """Weights of a run after its two steps, and after two more."""
    found = []
    for more in ((), ("trainer.steps=4", "--resume")):
        done = mmrl(folder, *words, *more, launcher=launcher, **variables)
        assert done.returncode == 0, done.stderr
        result = json.loads((folder / "run/result.json").read_text())
        steps = 2 * len(found) + 2
        assert (result["status"], result["processes"], result["steps"]) == ("done", processes, steps)
        found.append(torch.load(folder / f"run/checkpoints/step-{steps:06}/model/weights.pt"))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", LAUNCHERS)
def test_launchers_train_and_resume_as_one_process_does(name, tmp_path, as_set_up):
    (tmp_path / "alone").mkdir()
    alone = trained_and_resumed(tmp_path / "alone", ("-m", "mmrl.cli"), (), 1, as_set_up)
    for one, two in zip(alone, trained_and_resumed(tmp_path, *LAUNCHERS[name], 2, as_set_up), strict=True):
        for key, value in one.items():
            assert value.abs().max() > 0
            torch.testing.assert_close(two[key], value, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_plain_import_of_diffusers_works(as_set_up):
    pytest.importorskip("diffusers")
    command = [sys.executable, "-c", "from diffusers import StableDiffusion3Pipeline"]
    done = subprocess.run(command, env={**os.environ, **as_set_up}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
