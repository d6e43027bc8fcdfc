from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from mmrl.vlm.engine.policy import load_policy
from mmrl.vlm.model.config import ModelConfig
from tests.vlm.runs import write_questions

ROOT = Path(__file__).parents[2]
STEPS = 12


@pytest.mark.slow
def test_killed_papo_run_resumes_with_equal_bits(tmp_path, tiny_folders):
    data = write_questions(tmp_path / "data")
    command = [
        *(sys.executable, "-m", "mmrl.cli", "train", "configs/vlm/digits_papo.yaml"),
        *(f"data.path={data}", f"model.path={tiny_folders['qwen2_5_vl']}"),
        *(f"eval_data.{split}.path={data}" for split in ("heldout", "no_hint")),
        *(f"trainer.steps={STEPS}", "trainer.tasks_per_step=4", "trainer.samples_per_task=3", "trainer.epochs=2"),
        *("checkpoint.every=2", "checkpoint.keep=0", "sampler.max_new_tokens=6", "evaluation.at_start=false"),
        *("model.min_pixels=null", "model.max_pixels=null", "tracking.quiet=true", "objective.kl.coef=0.05"),
    ]

    def start(folder: str, *words: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([*command, f"output_dir={tmp_path / folder}", *words], cwd=ROOT)

    whole, victim = start("whole"), start("killed")
    checkpoints = tmp_path / "killed" / "checkpoints"
    target = random.randrange(1, STEPS // 2)  # a different place each time; any place must do
    while len(list(checkpoints.glob("step-*"))) < target and victim.poll() is None:
        time.sleep(0.02)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    assert start("killed", "--resume").wait(timeout=180) == 0
    assert whole.wait(timeout=180) == 0
    first, second = (
        dict(
            load_policy(
                ModelConfig(path=str(tmp_path / name / f"checkpoints/step-{STEPS:06d}/model"))
            ).named_parameters()
        )
        for name in ("whole", "killed")
    )
    assert all(torch.equal(first[key], second[key]) for key in first)
    start_weights = dict(load_policy(ModelConfig(path=str(tiny_folders["qwen2_5_vl"]))).named_parameters())
    assert any(not torch.equal(first[key], start_weights[key]) for key in first)
