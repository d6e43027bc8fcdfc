"""`mmrl train --processes N`, and programs that know nothing of the suite in the environment that the set-up leaves."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mmrl.cli.program import COMMANDS, _parse
from mmrl.errors import UserError
from mmrl.runs import launch

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


def test_a_process_that_fails_ends_the_others(monkeypatch):
    monkeypatch.setattr(launch, "GRACE_S", 0.2)
    programs = ("import time; time.sleep(60)", "raise SystemExit(2)")
    ranks = [subprocess.Popen([sys.executable, "-c", program]) for program in programs]
    assert launch._wait(ranks) == 2
    assert ranks[0].returncode == -signal.SIGKILL


def test_several_launchers_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match="RANK is set"):
        COMMANDS["train"].run(_parse(["train", "x.yaml", "--processes", "2"]))


@pytest.mark.slow
def test_a_mistake_is_the_exit_code_of_all(tmp_path):
    done = mmrl(tmp_path, "trainer.tasks_per_step=3", "--processes", "2")
    assert done.returncode == 2
    assert "with 2 processes it must be a multiple of that" in done.stderr
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
