"""Episodes in closed loop as part of a training run of a world model."""

import json

import pytest

pytest.importorskip("mujoco", reason="needs pip install 'mmrl-suite[sim]'")
pytest.importorskip("mink")

from mmrl.training.run import train
from robotics.flow3d.closed_loop.flow_episodes import FlowEpisodesConfig, LoopConfig, VerifierConfig
from robotics.flow3d.plan.planner_config import PlannerConfig
from tests.robotics.flow3d.model.test_recipe import run_config


def with_episodes(folder):
    config = run_config(folder)
    config.episodes = {"unseen": FlowEpisodesConfig(tasks=["open_red"], arms=["ur5e"], episodes=1, image_size=64)}
    config.loop = LoopConfig(VerifierConfig("none"), planner=PlannerConfig(samples=1), language_swap=False)
    config.evaluation.at_start, config.evaluation.every = False, 0
    return config


def test_a_run_measures_its_model_on_clips_and_in_closed_loop(tmp_path, backend):
    from mmrl.recipes import RECIPES

    run_dir = train(RECIPES["flow3d"], with_episodes(tmp_path))
    rows = [json.loads(line) for line in (run_dir / "evaluations.jsonl").open()]
    assert [(row["step"], row["split"]) for row in rows] == [(2, "held_out"), (2, "unseen")]
    assert "flow/ade_cm" in rows[0]
    # Two steps teach nothing; that an episode was planned for and judged is what counts here.
    assert rows[1]["success/closed_loop"] in (0.0, 1.0)
    assert rows[1]["episode/failed/closed_loop"] == 0
    assert rows[1]["plan/tries"] == 1


def test_names_of_episodes_and_clips_must_differ(tmp_path):
    config = with_episodes(tmp_path)
    config.episodes = {"held_out": config.episodes["unseen"]}
    with pytest.raises(ValueError, match="share the names held_out"):
        config.validate()
