"""GRPO with every policy of the package on the line: two steps of the loop, and what its checkpoints give back."""

from __future__ import annotations

import json
import math

import pytest
import torch

from mmrl.recipes import find_recipe
from mmrl.training.runs import evaluate, train
from mmrl.training.settings import CheckpointConfig
from robotics.vla.collect import ActingSettings
from robotics.vla.grpo import RobotGrpoRecipe
from robotics.vla.loading import ActionPolicyConfig
from robotics.vla.tasks import EpisodeSetConfig
from tests.robotics.line_demos import ENCODER
from tests.robotics.test_robot_recipes import collected, grpo, trainer
from tests.robotics.tiny_models import save_tiny_vlm

KINDS = ("small", "flow", "vlm")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Configuration of a small policy of each kind."""
    made = {}

    def configure(kind):
        if kind == "vlm" and not made:
            made["path"] = str(save_tiny_vlm(tmp_path_factory.mktemp("policy") / "tiny"))
        options = {
            "small": {"bins": 8, "encoder": ENCODER},
            "flow": {"steps": 3, "hidden": 32, "blocks": 1, "encoder": ENCODER},
            "vlm": {"vlm": made.copy(), "bins": 16, "state_size": 2},
        }
        return ActionPolicyConfig(kind=kind, chunk=4, options=options[kind])

    return configure


def configured(tmp_path, model, **changes):
    few = {"steps": 2, "tasks_per_step": 2, "samples_per_task": 3, "learning_rate": 1e-3}
    return grpo(
        tmp_path,
        model=model,
        reward="dense",
        eval_data={"held_out": EpisodeSetConfig(split="held_out", layouts=2)},
        **{"trainer": trainer(**few), "checkpoint": CheckpointConfig(every=1, keep=5), **changes},
    )


@pytest.mark.parametrize("level", ["token", "chunk"])
@pytest.mark.parametrize("kind", KINDS)
def test_ratio_is_one_before_the_first_update(tmp_path, model, kind, level):
    acting = ActingSettings(temperature=1.4, execute=3)
    recipe = RobotGrpoRecipe(configured(tmp_path, model(kind), logp_level=level, acting=acting))
    rollouts = collected(recipe, tasks=2)
    scores = recipe.scores(recipe.policy, rollouts, frozenset({"logp", "entropy"}))
    kept = rollouts.mask > 0
    torch.testing.assert_close(scores.logp[kept].detach(), rollouts.logp_old[kept], rtol=1e-5, atol=1e-5)
    assert bool(torch.isfinite(scores.entropy[kept]).all())
    chunks = (rollouts.payload.steps > 0).sum(1)
    each = {"small": rollouts.payload.lengths, "vlm": rollouts.payload.lengths, "flow": 3 * chunks}[kind]
    torch.testing.assert_close(rollouts.lengths, chunks if level == "chunk" else each)
    if level == "chunk":
        tokens = RobotGrpoRecipe(configured(tmp_path, model(kind), acting=acting))
        torch.testing.assert_close(rollouts.logp_old.sum(1), collected(tokens, tasks=2).logp_old.sum(1))


@pytest.mark.parametrize("kind", KINDS)
def test_two_steps_and_what_their_checkpoint_gives_back(tmp_path, model, kind):
    config = configured(tmp_path, model(kind))
    run_dir = train(find_recipe("robot_grpo"), config)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    updates = [row for row in rows if "policy/ratio_mean" in row]
    assert len(updates) == 2
    for row in updates:
        assert row["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-4)
        assert all(math.isfinite(row[name]) for name in ("loss/total", "policy/entropy"))
        assert 0 < row["optim/grad_norm"] < 1e4
    folders = [run_dir / "checkpoints" / f"step-{step:06d}" / "model" for step in (1, 2)]
    assert folders[0].joinpath("policy.json").read_bytes() == folders[1].joinpath("policy.json").read_bytes()
    again = configured(tmp_path / "again", ActionPolicyConfig(path=str(folders[1])))
    evaluate(find_recipe("robot_grpo"), again)
    # a file's name holds the weights, its lines what was carried out
    (reloaded,) = (tmp_path / "again" / "run" / "episodes").glob("*.jsonl")
    assert reloaded.read_text() == (run_dir / "episodes" / reloaded.name).read_text()
    assert len(list((run_dir / "episodes").glob("*.jsonl"))) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_all_broke_down_can_be_scored(tmp_path, model, kind):
    recipe = RobotGrpoRecipe(configured(tmp_path, model(kind), sim={"never_starts": [1]}))
    rollouts = collected(recipe, tasks=2)
    broken = torch.isnan(rollouts.reward)
    assert 0 < int(broken.sum()) < len(broken)
    part = next(part for part in rollouts.micro_batches(1) if bool(torch.isnan(part.reward).all()))
    assert not part.mask.any()
    scores = recipe.scores(recipe.policy, part, frozenset({"logp"}))
    assert scores.logp.shape == part.mask.shape
    (scores.logp * part.mask).sum().backward()
    assert all(not bool(w.grad.any()) for w in recipe.policy.parameters() if w.grad is not None)
