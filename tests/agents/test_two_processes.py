"""A run in two processes plays and replays what the run in one does."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mmrl.config import save
from tests.contracts.domains import domain_of

ROOT = Path(__file__).parents[2]
LAUNCHER = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


def train(folder: Path, processes: int, name: str, change: Callable[[Any], None]) -> list[dict]:
    config = domain_of(name).make_config(name, folder)
    config.trainer.tasks_per_step = 4
    config.trainer.steps = 1
    change(config)
    config.output_dir = str(folder / "run")
    folder.mkdir(parents=True, exist_ok=True)
    save(config, folder / "run.yaml")
    words = [sys.executable, *(LAUNCHER if processes > 1 else []), "-m", "mmrl.cli", "train", str(folder / "run.yaml")]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (folder / "run/metrics.jsonl").open()]


@pytest.mark.slow
def test_a_task_that_a_step_has_twice_is_played_as_by_one_process(tmp_path):
    def repeats(config: Any) -> None:
        config.data.seeds = 3  # of 4 tasks in the step

    (one,), (two,) = (train(tmp_path / str(count), count, "agent", repeats) for count in (1, 2))
    for name in ("reward/mean", "episode/return", "episode/turns", "response/length_mean"):
        assert abs(one[name] - two[name]) < 1e-6, name


@pytest.mark.slow
def test_two_processes_replay_the_same_as_one(tmp_path):
    """The second group of a task is sampled by the other process, which also has the trajectories of the first."""

    def replays(config: Any) -> None:
        config.data.seeds, config.trainer.steps, config.trainer.learning_rate = 4, 3, 1e-9
        config.replay.threshold, config.replay.max_std, config.replay.max_mean = 0.0, 10.0, 10.0

    rows, shared_rows = (train(tmp_path / str(count), count, "arpo", replays) for count in (1, 2))
    assert sum(row["replay/injected"] for row in rows) > 2
    for one, two in zip(rows, shared_rows, strict=True):
        for name in (
            "replay/injected",
            "replay/stored",
            "replay/groups_without_success",
            "reward/mean",
            "episode/return",
        ):
            assert abs(one[name] - two[name]) < 1e-6, name
