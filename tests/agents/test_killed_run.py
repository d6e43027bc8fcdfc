"""A trainer that is killed in the middle of an episode resumes to the weights of an uninterrupted one."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mmrl.config import save
from tests.contracts.domains import domain_of

ROOT = Path(__file__).parents[2]
STEPS = 3


def write_run(folder: Path, name: str) -> Path:
    """A run of three steps, each of three episodes for each of two environments; it is killed in the third."""
    folder.mkdir()
    config = domain_of(name).make_config(name, folder)
    config.trainer.steps, config.checkpoint.keep = STEPS, 0
    config.environment.factory = f"{Path(__file__).with_name('last_words.py')}:LastWords"
    config.environment.kwargs = {"folder": str(folder), "after": 4}
    save(config, folder / "run.yaml")
    return folder


def start(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "mmrl.cli", "train", str(folder / "run.yaml"), *words]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in ("arpo", "digirl")])
def test_a_run_killed_in_an_episode_resumes_to_the_same_weights(name, tmp_path):
    whole, killed = write_run(tmp_path / "whole", name), write_run(tmp_path / "killed", name)
    victim = start(killed)
    (killed / "victim").write_text(str(victim.pid))
    other = start(whole)
    assert victim.wait(timeout=180) == -signal.SIGKILL
    done = [json.loads(line)["step"] for line in (killed / "run/metrics.jsonl").open()]
    assert 1 <= done[-1] < STEPS, "it was killed between the first step and the last"
    assert start(killed, "--resume").wait(timeout=180) == 0
    assert other.wait(timeout=180) == 0
    weights = [(each / f"run/checkpoints/step-{STEPS:06d}/model/model.safetensors") for each in (whole, killed)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert weights[0].read_bytes() != (whole / "run/checkpoints/step-000001/model/model.safetensors").read_bytes()
