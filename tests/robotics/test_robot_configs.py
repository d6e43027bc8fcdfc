"""Every file under configs/robotics loads, and those of the tabletop take two steps; clone and SRPO do in test_demo."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mmrl.config import load_run
from mmrl.training.runs import train
from robotics.vla.encoder import EncoderConfig
from robotics.vla.small import SmallVlaConfig, SmallVlaPolicy

CONFIGS = sorted((Path(__file__).parents[2] / "configs" / "robotics").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_loads(path):
    entry, config = load_run(path)
    assert entry.module.startswith("robotics.")
    assert config.eval_data


def test_sparse_and_dense_grpo_take_two_steps(tmp_path, backend):
    encoder = EncoderConfig(image_size=(32, 32), state_size=10, width=32, heads=2, layers=1, channels=8, keypoints=4)
    texts = ["touch the red cube", "push the red cube into the blue zone"]
    SmallVlaPolicy.build(SmallVlaConfig(5, 4, encoder=encoder), texts).save_pretrained(tmp_path / "policy")
    for reward in ("sparse", "dense"):
        overrides = [
            f"output_dir={tmp_path / reward}",
            f"model.path={tmp_path / 'policy'}",
            f"reward={reward}",
            "sim.image_size=32",
            "sim.horizon=8",
            "eval_data.held_out.layouts=1",
            "trainer.steps=2",
            "trainer.tasks_per_step=2",
            "trainer.samples_per_task=2",
            "trainer.minibatches_per_step=2",
            "tracking.quiet=true",
            "tracking.tensorboard=false",
            "tracking.strict=true",
        ]
        entry, config = load_run(CONFIGS[0].with_name("tabletop_grpo.yaml"), overrides)
        run_dir = train(entry, config)
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
        assert [row["step"] for row in rows] == [1, 2]
        assert all(0 <= row["reward/dense"] < 1 for row in rows)
