"""A run shared by two processes is the run of one: the same episodes, and the same update up to rounding."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from mmrl.config import save
from mmrl.vlm.model_config import ModelConfig
from mmrl.vlm.models import load_policy
from tests.contracts.domains import domain_of

ROOT = Path(__file__).parents[2]
LAUNCHER = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


def train(folder: Path, processes: int) -> tuple[list[dict], torch.Tensor]:
    config = domain_of("agent").make_config("agent", folder)
    config.trainer.tasks_per_step = 4
    config.trainer.steps = 1
    config.output_dir = str(folder / "run")
    folder.mkdir(parents=True, exist_ok=True)
    save(config, folder / "run.yaml")
    words = [sys.executable, *(LAUNCHER if processes > 1 else []), "-m", "mmrl.cli", "train", str(folder / "run.yaml")]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").open()]
    policy = load_policy(ModelConfig(path=str(folder / "run/checkpoints/step-000001/model")))
    return rows, torch.cat([parameter.detach().flatten() for parameter in policy.parameters()])


def test_two_processes_run_the_episodes_of_one_and_make_its_update(tmp_path):
    rows, weights = train(tmp_path / "one", 1)
    shared_rows, shared = train(tmp_path / "two", 2)
    for name in ("reward/mean", "episode/return", "episode/turns", "response/length_mean"):
        assert abs(rows[0][name] - shared_rows[0][name]) < 1e-6, name
    # AdamW's first step moves every weight by the learning rate: a sign that rounding turns shows as twice that
    assert float(((weights - shared).abs() > 1e-4).float().mean()) < 0.01
