"""Turns that are invalid or do not fit in the context: what they cost, and which tokens learn it."""

import math
import re

import pytest
import torch

from mmrl.agents.agent_recipe import AgentRecipe, AgentRewardConfig
from mmrl.agents.rollout.episodes import AgentPayload, EpisodeConfig, OverflowConfig
from mmrl.core.blocks.credit import TurnGae
from mmrl.core.blocks.turns import GroupInGroup
from mmrl.errors import ConfigError
from mmrl.fields import check_config
from mmrl.training.objectives import ObjectiveConfig, make_objective
from mmrl.training.processes import Streams
from mmrl.training.recipe import NoUsableTasksError, Step
from mmrl.vlm.engine.vlm_sampler import SamplerConfig
from tests.agents.runs import TALK
from tests.agents.test_text import make_config
from tests.agents.test_tool_runs import scripted

GO = ("go<|im_end|>", "eos")
EMPTY = ("<|im_end|>", "eos")
CUT = ("go on", "length")


def configured(folder, model, kind, kwargs=None, **parts):
    config = make_config(folder, model, sampler=SamplerConfig(max_new_tokens=8), **parts)
    config.environment.factory = TALK.replace(":Talk", f":{kind}")
    config.environment.kwargs, config.environment.isolate = kwargs or {}, False
    config.trainer.samples_per_task = 2
    check_config(config)
    return config


def rolled(recipe):
    rollouts = recipe.rollout(recipe.policy, recipe.train_tasks[:1], Streams(0), Step())
    return rollouts, recipe.score(rollouts, Step())


def overflowing(closing, monkeypatch, folder, model, words=400, result="truncated", reward=0.0, **parts):
    """A recipe whose episodes have three turns that fit, and a result that does not."""
    scripted(monkeypatch, *[GO] * 9)
    limits = EpisodeConfig(overflow=OverflowConfig(result, reward))
    return closing(AgentRecipe(configured(folder, model, "Flood", {"words": words}, episode=limits, **parts)))


@pytest.mark.parametrize(
    ("words", "reason"), [(400, "the prompt has 12.. tokens"), (310, "turn 4 does not fit in the model's context")]
)
def test_an_episode_ends_before_a_turn_that_does_not_fit_and_keeps_its_rewards(
    tmp_path, language_model, monkeypatch, closing, caplog, words, reason
):
    recipe = overflowing(closing, monkeypatch, tmp_path, language_model, words)
    rollouts, scored = rolled(recipe)
    for episode in AgentPayload.of(rollouts).episodes:
        assert (episode.ending, episode.success, episode.overflows) == ("truncated", True, True)
        assert (episode.trajectory.turns, episode.rewards) == (3, [0.25] * 3)
        assert re.search(reason, episode.reason)
    assert scored.reward.tolist() == [0.75] * 2
    assert rollouts.extras["truncated"].tolist() == [1.0] * 2
    assert bool((rollouts.mask.sum(1) > 0).all())
    metrics = recipe.step_metrics(rollouts)
    assert (metrics["env/overflow"], metrics["env/failed"], metrics["episode/turns"]) == (2, 0, 3)
    assert "an episode ended before a turn (overflow): task/0" in caplog.text
    rolled(recipe)
    assert recipe.step_metrics(rollouts)["env/overflow"] == 4, "of the whole run"


def test_room_for_a_whole_answer_is_part_of_a_turn(tmp_path, language_model, monkeypatch, closing):
    """One token of room used to be enough, and the answer was then cut."""
    recipe = overflowing(closing, monkeypatch, tmp_path, language_model, words=10)
    (full,) = recipe.draw(recipe.policy, recipe.train_tasks[:1], [0])
    assert (full.ending, full.overflows, full.trajectory.turns) == ("terminated", False, 9)
    answer = len(full.trajectory.sampled_ids) // 9
    before = len(full.prompt) + full.trajectory.last_tokens()[-1] + 1 - answer
    for room, turns in ((8, 9), (7, 8)):
        monkeypatch.setattr(type(recipe.policy), "positions", before + room)
        (episode,) = recipe.draw(recipe.policy, recipe.train_tasks[:1], [0])
        assert (episode.trajectory.turns, episode.overflows) == (turns, turns < 9)


def test_an_episode_that_has_ended_is_never_an_overflow(tmp_path, language_model, monkeypatch, closing):
    scripted(monkeypatch, *[GO] * 9)
    for turns, most, ending in ((3, 15, "terminated"), (9, 3, "truncated")):
        config = configured(
            tmp_path / ending, language_model, "Flood", {"turns": turns}, episode=EpisodeConfig(max_turns=most)
        )
        recipe = closing(AgentRecipe(config))
        rollouts, _ = rolled(recipe)
        assert {episode.ending for episode in AgentPayload.of(rollouts).episodes} == {ending}
        assert recipe.step_metrics(rollouts)["env/overflow"] == 0


def test_an_overflow_may_leave_no_result(tmp_path, language_model, monkeypatch, closing):
    recipe = overflowing(closing, monkeypatch, tmp_path, language_model, result="failed")
    with pytest.raises(NoUsableTasksError, match="the prompt has"):
        rolled(recipe)
    (episode,) = recipe.draw(recipe.policy, recipe.train_tasks[:1], [0])
    assert (episode.ending, episode.has_result, episode.overflows) == ("overflow", False, True)
    assert math.isnan(episode.total)
    with pytest.raises(
        ConfigError, match=r"overflow\.reward is -1\.0, but it has no effect while .*result is 'failed'"
    ):
        check_config(OverflowConfig("failed", -1.0), "episode.overflow")
    for config in (OverflowConfig(reward=0.1), AgentRewardConfig(invalid_turn=0.1)):
        with pytest.raises(ConfigError, match="must be at most 0"):
            check_config(config)


@pytest.mark.parametrize(("words", "known"), [(400, False), (0, True)])
def test_an_overflow_is_bootstrapped_if_the_critic_can_read_its_end(
    tmp_path, language_model, monkeypatch, closing, words, known
):
    objective = ObjectiveConfig(preset="ppo", advantage={"kind": "gae_turn"}, kl={"kind": "none"})
    for reward in (0.0, -0.5):
        folder = tmp_path / str(reward)
        recipe = overflowing(
            closing, monkeypatch, folder, language_model, words=words or 10, reward=reward, objective=objective
        )
        if known:
            (whole,) = recipe.draw(recipe.policy, recipe.train_tasks[:1], [0])
            fourth = len(whole.prompt) + whole.trajectory.last_tokens()[3] - 1
            monkeypatch.setattr(type(recipe.policy), "positions", fourth + 3)
        rollouts, scored = rolled(recipe)
        assert {own.trajectory.turns for own in AgentPayload.of(rollouts).episodes} == {3}
        assert scored.reward.tolist() == [0.75 + reward] * 2
        assert (rollouts.extras["bootstrap_mask"].sum(1) > 0).tolist() == [known] * 2
        # an end that cannot be valued masks the last turn, so a penalty there has to be the end
        assert scored.extras["truncated"].tolist() == [float(known or not reward)] * 2
        paid = torch.nonzero(scored.extras["decision_reward"] - rollouts.extras["decision_reward"]).tolist()
        last = AgentPayload.of(rollouts).episodes[0].trajectory.last_tokens()[-1]
        assert paid == ([[0, last], [1, last]] if reward else [])
        monkeypatch.undo()


@pytest.mark.parametrize("on_error", ["terminate", "noop"])
def test_invalid_turns_are_paid_whatever_follows_and_truncated_ones_by_format_alone(
    tmp_path, language_model, monkeypatch, closing, on_error
):
    for script, invalid, failed in (([GO, EMPTY, GO, GO], [1], [1]), ([GO, CUT, GO, GO], [], [1])):
        scripted(monkeypatch, *script)
        config = configured(tmp_path / str(len(invalid)), language_model, "Flood", {"words": 1, "turns": 3})
        config.actions.on_parse_error = on_error
        config.reward = AgentRewardConfig(format=0.3, invalid_turn=-0.1)
        recipe = closing(AgentRecipe(config))
        rollouts, scored = rolled(recipe)
        episode = AgentPayload.of(rollouts).episodes[0]
        ends = episode.trajectory.last_tokens()
        assert len(ends) == (2 if on_error == "terminate" else 4)
        expected = torch.zeros_like(scored.extras["decision_reward"][0])
        expected[ends] = torch.tensor(episode.rewards)
        expected[[ends[turn] for turn in invalid]] -= 0.1
        expected[[ends[turn] for turn in failed]] -= 0.3
        torch.testing.assert_close(scored.extras["decision_reward"], torch.stack([expected] * 2))
        torch.testing.assert_close(scored.reward, expected.sum().expand(2))
        assert scored.reward_terms["invalid_turn"].tolist() == pytest.approx([-0.1 * len(invalid)] * 2)
        assert scored.reward_terms["format"].tolist() == [-len(failed)] * 2


def two_episodes(recipe, invalid):
    """Two episodes of one task with two turns each and no other reward; one turn of the first is invalid."""
    rollouts, _ = rolled(recipe)
    for row, episode in enumerate(AgentPayload.of(rollouts).episodes):
        assert episode.trajectory.turns == 2
        episode.rewards = [0.0, 0.0]
        episode.errors = ["no_action" if (row, turn) == (0, invalid) else "" for turn in range(2)]
        # the first turns began in the same state, the second ones did not
        episode.anchors = [7, 8 + row]
    rollouts.extras["decision_reward"].zero_()
    return recipe.score(rollouts, Step())


def by_turn(scored, values):
    """(B, 2), the value of each turn, which all of its tokens share."""
    found = []
    for row in range(2):
        turns = [values[row][(scored.turn[row] == turn) & (scored.loss_mask[row] > 0)] for turn in range(2)]
        assert all(len(own) > 1 and bool((own == own[0]).all()) for own in turns)
        found.append([float(own[0]) for own in turns])
    return found


@pytest.fixture
def words(tmp_path, language_model, monkeypatch, closing):
    scripted(monkeypatch, *[("go on<|im_end|>", "eos")] * 2)
    config = configured(
        tmp_path, language_model, "Talk", {"pictures": False}, objective=ObjectiveConfig(preset="gigpo")
    )
    config.reward.invalid_turn = -0.1
    return closing(AgentRecipe(config))


@pytest.mark.parametrize(
    ("invalid", "first", "second"),
    [
        # episodes: -0.1 and 0 differ by 0.05 from their mean. Turns from state 7: returns -0.1 and 0
        (0, [-0.05 - 0.05, -0.05], [0.05 + 0.05, 0.05]),
        # returns from state 7: -0.1 * 0.95 and 0; the second turn has nothing to be compared with
        (1, [-0.05 - 0.0475, -0.05], [0.05 + 0.0475, 0.05]),
    ],
)
def test_gigpo_by_hand(words, invalid, first, second):
    scored = two_episodes(words, invalid)
    advantage = GroupInGroup()(scored)
    for found, expected in zip(by_turn(scored, advantage), (first, second), strict=True):
        assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("invalid", [0, 1])
def test_turn_level_gae_by_hand(words, invalid):
    scored = two_episodes(words, invalid)
    # V is 0.2 before the first turn and 0.4 before the second; both episodes terminated
    values = torch.where(scored.turn == 0, 0.2, 0.4)
    advantage = TurnGae(gamma=0.9, lam=0.5)(scored.replace(values=values))
    for row, found in enumerate(by_turn(scored, advantage)):
        rewards = [-0.1 if (row, turn) == (0, invalid) else 0.0 for turn in range(2)]
        last = rewards[1] - 0.4
        assert found == pytest.approx([rewards[0] + 0.9 * 0.4 - 0.2 + 0.9 * 0.5 * last, last], abs=1e-6)


@pytest.mark.parametrize("invalid", [0, 1])
def test_episode_level_grpo_by_hand(words, invalid):
    """Where the invalid turn lies makes no difference: (R - mean) / std of -0.1 and 0, ddof 1."""
    scored = two_episodes(words, invalid)
    assert scored.reward.tolist() == pytest.approx([-0.1, 0.0])
    found = make_objective(ObjectiveConfig(preset="grpo")).compute_advantages(scored).advantage
    assert by_turn(scored, found)[0] == pytest.approx([-(0.5**0.5)] * 2, rel=5e-3)
    assert by_turn(scored, found)[1] == pytest.approx([0.5**0.5] * 2, rel=5e-3)
