"""GRPO with every policy of the package on the line: two steps of the loop, and restoring its checkpoints."""

import json
import math

import numpy as np
import pytest
import torch

from mmrl.errors import UserError
from mmrl.recipes import find_recipe
from mmrl.training.run import evaluate, train
from mmrl.training.settings import CheckpointConfig
from robotics.episodes.collect import ActingSettings, run_episodes
from robotics.episodes.payload import EpisodeSetConfig
from robotics.methods.grpo import RobotGrpoRecipe
from robotics.policies.policy_loading import ActionPolicyConfig
from robotics.sim.episodes import EpisodeSpec
from tests.robotics.line_demos import ENCODER
from tests.robotics.line_sim import LineSim
from tests.robotics.test_robot_recipes import collected, grpo, trainer
from tests.robotics.tiny_models import save_tiny_vlm
from tests.rounding import assert_equal_up_to_rounding

KINDS = ("small", "gaussian", "flow", "vlm")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Configuration of a small policy of each kind."""
    made = {}

    def configure(kind):
        if kind == "vlm" and not made:
            made["path"] = str(save_tiny_vlm(tmp_path_factory.mktemp("policy") / "tiny"))
        options = {
            "small": {"bins": 8, "encoder": ENCODER},
            "gaussian": {"encoder": ENCODER},
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
        reward="potential",
        eval_data={"held_out": EpisodeSetConfig(split="held_out", layouts=2)},
        **{"trainer": trainer(**few), "checkpoint": CheckpointConfig(every=1, keep=5), **changes},
    )


@pytest.mark.parametrize("level", ["token", "chunk"])
@pytest.mark.parametrize("kind", KINDS)
def test_ratio_is_one_before_the_first_update(tmp_path, model, kind, level):
    acting = ActingSettings(temperature=1.4, n_action_steps=3)
    recipe = RobotGrpoRecipe(configured(tmp_path, model(kind), logp_level=level, acting=acting))
    rollouts = collected(recipe, tasks=2)
    scores = recipe.scores(recipe.policy, rollouts, frozenset({"logp", "entropy"}))
    kept = rollouts.mask > 0
    assert_equal_up_to_rounding(scores.logp[kept].detach(), rollouts.logp_old[kept])
    assert bool(torch.isfinite(scores.entropy[kept]).all())
    chunks = (rollouts.payload.steps > 0).sum(1)
    each = 3 * chunks if kind == "flow" else rollouts.payload.lengths  # an action has one number here
    torch.testing.assert_close(rollouts.lengths, chunks if level == "chunk" else each)
    if level == "chunk":
        tokens = RobotGrpoRecipe(configured(tmp_path, model(kind), acting=acting))
        assert_equal_up_to_rounding(rollouts.logp_old.sum(1), collected(tokens, tasks=2).logp_old.sum(1))


@pytest.mark.parametrize("kind", KINDS)
def test_two_steps_and_restoring_their_checkpoint(tmp_path, model, kind):
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


@pytest.mark.parametrize("record", [False, True])
@pytest.mark.parametrize("kind", ["small", "gaussian", "flow"])
def test_a_wave_that_cannot_start_does_not_cost_the_others(tmp_path, model, kind, record):
    recipe = RobotGrpoRecipe(configured(tmp_path, model(kind)))
    episodes = [EpisodeSpec("right", "go right", layout) for layout in range(6)]
    sim = LineSim(capacity=2, never_starts=[0, 1, 4, 5])
    generator = torch.Generator().manual_seed(0)
    found = run_episodes(recipe.policy, sim, episodes, ActingSettings(), generator, record=record)
    payload = found.payload
    assert payload.failed.tolist() == [True, True, False, False, True, True]
    assert payload.reasons[0] == payload.reasons[5] == "would not start"
    alone = LineSim(capacity=2)
    again = run_episodes(
        recipe.policy, alone, episodes, ActingSettings(), torch.Generator().manual_seed(0), record=record
    )
    assert torch.equal(payload.decisions[2:4], again.payload.decisions[2:4])
    for row in (2, 3):
        np.testing.assert_array_equal(payload.frames_of(row), again.payload.frames_of(row))
    assert len(payload.frames_of(2)) == int(payload.lengths[2]) + 1 or not record


def test_an_evaluation_of_other_states_is_not_mixed_in(tmp_path):
    """Each set of initial states has its own file, which later evaluations do not change."""
    written: dict[str, str] = {}

    def layouts(first, count):
        states = EpisodeSetConfig(tasks=["right"], split="held_out", first=first, layouts=count)
        config = grpo(tmp_path, eval_data={"held_out": states})
        metrics = evaluate(find_recipe("robot_grpo"), config)
        files = {file.name: file.read_text() for file in (tmp_path / "run" / "episodes").glob("*.jsonl")}
        assert files.items() >= written.items()
        (name,) = files.keys() - written.keys()
        written[name] = files[name]
        return metrics["held_out/n"], [json.loads(line)["layout"] for line in files[name].splitlines()]

    assert layouts(0, 3) == (3, [0, 1, 2])
    assert layouts(5, 3) == (3, [5, 6, 7])
    assert layouts(5, 2) == (2, [5, 6])


def test_lines_of_an_evaluation_hold_the_very_actions(tmp_path, model):
    config = configured(tmp_path, model("flow"))
    evaluate(find_recipe("robot_grpo"), config)
    (file,) = (tmp_path / "run" / "episodes").glob("*.jsonl")
    for line in map(json.loads, file.open()):
        actions = np.asarray(line["actions"], np.float32)
        assert np.abs(actions - np.round(actions, 6)).max() > 0
        sim, place = LineSim(), EpisodeSpec(line["task"], line["instruction"], line["layout"], line["split"])
        sim.reset([place])
        assert sim.step_chunk(actions[None]).steps.tolist() == [line["steps"]]


def test_more_steps_than_a_chunk_has_cannot_be_carried_out(tmp_path, model):
    with pytest.raises(UserError, match=r"acting\.n_action_steps is 5, but the policy's chunk has 4 steps"):
        RobotGrpoRecipe(configured(tmp_path, model("small"), acting=ActingSettings(n_action_steps=5)))
