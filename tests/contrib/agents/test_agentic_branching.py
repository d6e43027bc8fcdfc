"""Episodes that branch from others: where, and that a branch is the continuation of what it repeats."""

import pytest
import torch

from mmrl.agents.environments.environment import ActionConfig
from mmrl.agents.rollout.conversation import ConversationConfig
from mmrl.agents.rollout.episodes import AgentPayload
from mmrl.contrib.agents.agentic_branching import (
    BranchingConfig,
    BranchingRecipe,
    BranchingSettings,
    choose_forks,
    initial_episodes,
)
from mmrl.errors import UserError
from mmrl.training.objectives import ObjectiveConfig
from mmrl.training.processes import Streams
from mmrl.training.recipe import Step
from tests.agents.runs import by_length
from tests.agents.test_recipe import make_config
from tests.rounding import assert_equal_up_to_rounding

ALWAYS = {"probability": 1.0, "weight": 0.0}


def test_forks_are_taken_turn_by_turn_until_the_slots_are_full():
    entropies = [[1.0, 1.0, 1.0], [1.0, 1.0], [1.0]]
    draw = torch.Generator()
    assert choose_forks(entropies, 9, BranchingSettings(**ALWAYS), draw) == [(0, 1), (1, 1), (0, 2)]
    assert choose_forks(entropies, 2, BranchingSettings(**ALWAYS), draw) == [(0, 1), (1, 1)]
    assert choose_forks(entropies, 9, BranchingSettings(probability=0.0, weight=0.0), draw) == []
    assert choose_forks([], 9, BranchingSettings(**ALWAYS), draw) == []


@pytest.mark.parametrize(("rise", "share"), [(0.0, 0.5), (1.0, 0.7), (-1.0, 0.3), (4.0, 1.0)])
@pytest.mark.parametrize("allocation", ["fixed", "entropy"])
def test_a_rising_entropy_makes_branches_likelier(rise, share, allocation):
    settings = BranchingSettings(allocation=allocation)
    forks = choose_forks([[1.0, 1.0 + rise]] * 4000, 4000, settings, torch.Generator().manual_seed(0))
    assert len(forks) / 4000 == pytest.approx(share, abs=0.03)


def test_branches_in_a_row_become_less_likely():
    """Sure to branch until (1 + rise) (1 - 0.05 n) falls below the probability."""
    settings = BranchingSettings(allocation="entropy", probability=1.0, weight=1.0)
    forks = choose_forks([[0.0, *[1.2] * 30]], 30, settings, torch.Generator().manual_seed(0))
    turns = [turn for _, turn in forks]
    assert turns[:4] == [1, 2, 3, 4], "1.2 (1 - 0.15) is still above 1"
    assert len(turns) < 30


@pytest.mark.parametrize(
    ("entropies", "expected"), [([1.0, 1.0], 9), ([5.0, 1.0], 12), ([1.0, 5.0], 5), ([90.0, 0.0], 16)]
)
def test_the_first_episode_decides_how_many_begin_at_the_start(entropies, expected):
    assert initial_episodes(entropies, 16) == expected


def branching(folder, model, monkeypatch, settings, **changes) -> BranchingRecipe:
    monkeypatch.setattr(ActionConfig, "parse", by_length)
    plain = make_config(folder, model, **changes)
    plain.trainer.samples_per_task = 4
    plain.objective = ObjectiveConfig(preset="agentic_branching", advantage={"kind": "group_branches"})
    config = BranchingConfig(**vars(plain), branching=settings)
    config.validate()
    return BranchingRecipe(config)


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        (BranchingSettings(initial=1, **ALWAYS), 0),
        pytest.param(BranchingSettings(initial=1, **ALWAYS), 1, marks=pytest.mark.slow),
        pytest.param(BranchingSettings(allocation="entropy", probability=0.0), 0, marks=pytest.mark.slow),
    ],
)
def test_a_branch_continues_what_it_repeats(tmp_path, folder, monkeypatch, settings, kept, closing):
    conversation = ConversationConfig(system="Walk. {actions}", history_images=kept)
    recipe = closing(branching(tmp_path, folder, monkeypatch, settings, conversation=conversation))
    rollouts = recipe.rollout(recipe.policy, recipe.train_tasks[:2], Streams(0), Step())
    with torch.no_grad():
        logp = recipe.scores(recipe.policy, rollouts, frozenset({"logp"})).logp
    scored = recipe.score(rollouts, Step())
    assert rollouts.num_rows == 8
    assert_equal_up_to_rounding(logp, rollouts.logp_old)
    payload = AgentPayload.of(rollouts)
    branched = [row for row, episode in enumerate(payload.episodes) if episode.parent >= 0]
    assert branched
    for row in branched:
        episode, shared = payload.episodes[row], int(scored.extras["shared"][row])
        source = row - int(scored.extras["parent"][row])
        assert payload.episodes[source] is payload.episodes[row // 4 * 4 + episode.parent]
        assert torch.equal(payload.response_ids[row, :shared], payload.response_ids[source, :shared])
        assert torch.equal(rollouts.logp_old[row, :shared], rollouts.logp_old[source, :shared])
        assert set(rollouts.turn[row, :shared].tolist()) == set(range(episode.shared_turns))
        assert episode.rewards[: episode.shared_turns] == payload.episodes[source].rewards[: episode.shared_turns]
    advantage = recipe.objective.compute_advantages(scored).advantage
    assert torch.equal(advantage[branched[0], 0], advantage[branched[0] - int(scored.extras["parent"][branched[0]]), 0])
    assert recipe.step_metrics(scored)["episode/branched"].value == len(branched) / 8


def test_an_environment_that_does_not_repeat_is_refused(tmp_path, folder, monkeypatch, closing):
    settings = BranchingSettings(initial=1, **ALWAYS)
    recipe = closing(branching(tmp_path, folder, monkeypatch, settings, kwargs={"twins": False}, workers=1))
    with pytest.raises(UserError, match=r"corridor\.py:Corridor is not reproducible: .* by turn 0"):
        recipe.rollout(recipe.policy, recipe.train_tasks[:1], Streams(0), Step())


def test_branches_need_room(tmp_path, folder, monkeypatch):
    with pytest.raises(
        ValueError, match=r"branching\.initial is 8 and trainer\.samples_per_task 4: no episodes are left"
    ):
        branching(tmp_path, folder, monkeypatch, BranchingSettings())
