"""Environments that die, hang and raise while a policy is trained: the run continues, and the log counts them."""

import json
from pathlib import Path

import pytest

from mmrl.recipes import find_recipe
from mmrl.training.run import train
from mmrl.training.settings import TrackingConfig, TrainerConfig
from robotics.episodes.payload import EpisodeSetConfig
from robotics.methods.grpo import RobotGrpoConfig
from robotics.policies.policy_loading import ActionPolicyConfig
from robotics.sim import subprocess_sim
from robotics.sim.opening import SimConfig

FAKES = Path(__file__).with_name("fake_envs.py")
POLICIES = "tests.robotics.fake_policies:make_blind"


@pytest.mark.slow
def test_killed_hanging_and_raising_environments_cost_their_groups_only(tmp_path, monkeypatch, hanging):
    monkeypatch.setattr(subprocess_sim, "find_backend", lambda preferred: None)
    limits = {"call_timeout_s": 3.0, "heartbeat_timeout_s": 20.0, "start_timeout_s": 30.0}
    config = RobotGrpoConfig(
        recipe="robot_grpo",
        output_dir=str(tmp_path / "run"),
        sim=SimConfig(
            kind="gymnasium",
            env=f"{FAKES}:make",
            workers=8,
            image_size=0,
            options={"success_at": 5, "draws": False, "settings": limits},
        ),
        model=ActionPolicyConfig(kind=POLICIES, chunk=4),
        data=EpisodeSetConfig(tasks=["walk", "die", "hang", "raise"], layouts=2),
        eval_data={},
        trainer=TrainerConfig(steps=2, tasks_per_step=8, samples_per_task=2, learning_rate=1e-3, threads=1),
        tracking=TrackingConfig(quiet=True, tensorboard=False),
    )
    config.validate()
    run_dir = train(find_recipe("robot_grpo"), config)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    assert [row["step"] for row in rows] == [1, 2]
    # every step draws both layouts of each task, two episodes of each
    for name in ("sim/crashed", "sim/hung", "sim/raised"):
        assert [row[name] for row in rows] == [4, 8], name
    assert rows[-1]["sim/episodes_failed"] == 24
    assert [row["reward/errors"] for row in rows] == [12, 12]
    assert rows[-1]["reward/success"] == pytest.approx(1.0)  # only those that walked are in the mean
    assert rows[-1]["sim/restarted"] >= 3
