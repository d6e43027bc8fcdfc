"""A run in two processes equals the run in one: the same episodes, and the same update up to rounding."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mmrl.config import save
from mmrl.vlm.engine.policy import load_policy
from mmrl.vlm.model.config import CriticSettings, ModelConfig
from tests.contracts.domains import domain_of

ROOT = Path(__file__).parents[2]
LAUNCHER = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


def train(
    folder: Path, processes: int, name: str = "agent", change: Callable[[Any], None] | None = None
) -> tuple[list[dict], torch.Tensor]:
    config = domain_of(name).make_config(name, folder)
    config.trainer.tasks_per_step = 4
    config.trainer.steps = 1
    if change is not None:
        change(config)
    config.output_dir = str(folder / "run")
    folder.mkdir(parents=True, exist_ok=True)
    save(config, folder / "run.yaml")
    words = [sys.executable, *(LAUNCHER if processes > 1 else []), "-m", "mmrl.cli", "train", str(folder / "run.yaml")]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").open()]
    policy = load_policy(ModelConfig(path=str(folder / f"run/checkpoints/step-{config.trainer.steps:06d}/model")))
    return rows, torch.cat([parameter.detach().flatten() for parameter in policy.parameters()])


@pytest.mark.slow
def test_two_processes_run_the_episodes_of_one_and_make_its_update(tmp_path):
    rows, weights = train(tmp_path / "one", 1)
    shared_rows, shared = train(tmp_path / "two", 2)
    for name in ("reward/mean", "episode/return", "episode/turns", "response/length_mean"):
        assert abs(rows[0][name] - shared_rows[0][name]) < 1e-6, name
    # AdamW's first step moves every weight by the learning rate: a sign that rounding turns shows as twice that
    assert float(((weights - shared).abs() > 1e-4).float().mean()) < 0.01


@pytest.mark.slow
def test_a_task_that_a_step_has_twice_is_played_as_by_one_process(tmp_path):
    def repeats(config: Any) -> None:
        config.data.seeds = 3  # of 4 tasks in the step

    (one,), _ = train(tmp_path / "one", 1, change=repeats)
    (two,), _ = train(tmp_path / "two", 2, change=repeats)
    for name in ("reward/mean", "episode/return", "episode/turns", "response/length_mean"):
        assert abs(one[name] - two[name]) < 1e-6, name


@pytest.mark.slow
def test_two_processes_train_the_critic_and_then_the_policy_of_one(tmp_path):
    """Advantages are whitened over the turns of both processes, and the warm-up moves the critic of both alike."""

    def warms_up(config: Any) -> None:
        config.model.critic = CriticSettings(hidden=[16], stop_gradient=True)
        config.data.seeds, config.trainer.steps, config.warmup_updates = 4, 2, 1

    rows, weights = train(tmp_path / "one", 1, "vl_dac", warms_up)
    shared_rows, shared = train(tmp_path / "two", 2, "vl_dac", warms_up)
    for one, two in zip(rows, shared_rows, strict=True):
        losses = [name for name in one if name.startswith(("loss/", "advantage/", "value/"))]
        for name in ("episode/return", "response/length_mean", *losses):
            assert abs(one[name] - two[name]) < 1e-5, name
    assert "loss/policy" not in rows[0]
    assert "loss/policy" in rows[1]
    # The policy's first step of AdamW is that after the warm-up, see above
    assert float(((weights - shared).abs() > 1e-4).float().mean()) < 0.01


@pytest.mark.slow
def test_two_processes_replay_the_same_as_one(tmp_path):
    """The second group of a task is sampled by the other process, which also has the trajectories of the first."""

    def replays(config: Any) -> None:
        config.data.seeds, config.trainer.steps, config.trainer.learning_rate = 4, 3, 1e-9
        config.replay.threshold, config.replay.max_std, config.replay.max_mean = 0.0, 10.0, 10.0

    rows, _ = train(tmp_path / "one", 1, "arpo", replays)
    shared_rows, _ = train(tmp_path / "two", 2, "arpo", replays)
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
