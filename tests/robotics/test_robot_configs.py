"""Every file under configs/robotics loads, and those of the tabletop take two steps; clone and SRPO do in test_demo."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mmrl.config import load_run
from mmrl.training.runs import train
from tests.robotics.tiny_runs import TWO_STEPS, save_tiny_policy

CONFIGS = sorted((Path(__file__).parents[2] / "configs" / "robotics").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_loads(path):
    entry, config = load_run(path)
    assert entry.module.startswith("robotics.")
    assert config.eval_data


def test_sparse_and_dense_grpo_take_two_steps(tmp_path, backend):
    texts = ["touch the red cube", "push the red cube into the blue zone"]
    policy = save_tiny_policy(tmp_path / "policy", texts)
    for reward in ("sparse", "dense"):
        overrides = [*TWO_STEPS, f"output_dir={tmp_path / reward}", f"model.path={policy}", f"reward={reward}"]
        entry, config = load_run(CONFIGS[0].with_name("tabletop_grpo.yaml"), overrides)
        run_dir = train(entry, config)
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
        assert [row["step"] for row in rows] == [1, 2]
        assert all(0 <= row["reward/dense"] < 1 for row in rows)
