"""REFUEL: dialogues that are repeated up to a random turn and finished twice, and the simulated user."""

import pytest
import torch

from mmrl.agents.environments.env_pool import EnvironmentConfig
from mmrl.agents.environments.environment import Action, ActionConfig
from mmrl.agents.rollout.episodes import AgentPayload, EpisodeConfig
from mmrl.contrib.agents.refuel import RefuelConfig, RefuelRecipe, draw_turn
from mmrl.contrib.agents.user_simulator import UserSimulator
from mmrl.core.blocks.preference import CHOSEN, SCORE
from mmrl.errors import UserError
from mmrl.rewards import RewardConfig
from mmrl.training.objectives import PreferenceConfig
from mmrl.training.processes import Streams
from mmrl.training.recipe import Step
from tests.agents.test_recipe import make_config

SELLER = {"user": "mmrl.agents.toy.haggle:seller_turn", "reward": "mmrl.agents.toy.haggle:saved_share", "turns": 4}


def user(*, messages, task, seed):
    """A user who answers with the number of letters said so far."""
    return f"{sum(len(message['content']) for message in messages)}?"


def vowels(*, messages, task, seed):
    """Score of a dialogue: vowels of all answers."""
    return float(sum(message["content"].count(vowel) for message in messages[1::2] for vowel in "aeiou"))


def refuel_config(folder, model, **changes) -> RefuelConfig:
    plain = make_config(folder, model)
    plain.environment = EnvironmentConfig(
        factory="mmrl.contrib.agents.user_simulator:UserSimulator",
        kwargs={"user": f"{__file__}:user", "reward": f"{__file__}:vowels", "turns": 4},
        workers=2,
    )
    plain.actions, plain.episode = ActionConfig(format="text", on_parse_error="noop"), EpisodeConfig(max_turns=4)
    plain.trainer.samples_per_task = 2
    return RefuelConfig(**vars(plain) | {"objective": PreferenceConfig(preset="refuel")} | changes)


@pytest.mark.parametrize("length", ["whole", "sampled"])
def test_turns_are_drawn_uniformly(length):
    generator = torch.Generator().manual_seed(0)
    drawn = [draw_turn(4, length, generator) for _ in range(4000)]
    assert all(0 <= turn <= last < 4 for turn, last in drawn)
    assert length == "sampled" or {last for _, last in drawn} == {3}
    among = [turn for turn, last in drawn if last == 3]
    assert [among.count(turn) / len(among) for turn in range(4)] == pytest.approx([0.25] * 4, abs=0.05)


def test_a_pair_shares_its_beginning_and_only_the_answers_of_its_turn_are_trained(tmp_path, folder, closing):
    config = refuel_config(tmp_path, folder)
    config.validate()
    recipe = closing(RefuelRecipe(config))
    rollouts = recipe.score(recipe.rollout(recipe.policy, recipe.train_tasks, Streams(3), Step()), Step())
    pairs = recipe.estimate(rollouts, None, Step())
    episodes = AgentPayload.of(rollouts).episodes
    assert len({one.shared_turns for one in episodes[0::2]}) > 1
    for row in range(0, len(episodes), 2):
        one, other = episodes[row : row + 2]
        turn = one.shared_turns
        assert one.answers[:turn] == other.answers[:turn]
        assert one.rewards[:turn] == other.rewards[:turn]
        learnt = one.answers[turn] != other.answers[turn]
        for side in (row, row + 1):
            wanted = (rollouts.turn[side] == turn) & (rollouts.mask[side] > 0) & learnt
            assert torch.equal(pairs.mask[side] > 0, wanted)
        better = one.total > other.total
        assert pairs.extras[CHOSEN][row : row + 2].tolist() == [float(better), float(not better)]
    assert pairs.extras[SCORE].tolist() == [episode.total for episode in episodes]
    assert 0 < recipe.noted["refuel/learnt"].value <= 1


def test_rewards_after_the_sampled_length_do_not_count(tmp_path, folder, closing):
    config = refuel_config(tmp_path, folder)
    config.refuel.length = "sampled"
    recipe = closing(RefuelRecipe(config))
    groups = recipe.draw_groups(recipe.policy, recipe.train_tasks, Streams(0))
    for index, pair in enumerate(groups):
        turn, last = draw_turn(4, "sampled", Streams(0).of(index, "turn"))
        assert pair[0].shared_turns == turn
        assert [episode.rewards[last + 1 :] for episode in pair] == [[0.0] * (3 - last)] * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": 4}, r"trainer\.samples_per_task is 4; use 2: a dialogue and its resampled version"),
        ({"length": "sampled", "rewards": [RewardConfig(name="exact")]}, r"score whole dialogues; remove `rewards`"),
        ({"objective": PreferenceConfig(preset="xpo")}, "objective.loss is 'xpo', which needs"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, folder, changes, message):
    config = refuel_config(tmp_path, folder, **{k: v for k, v in changes.items() if k in ("objective", "rewards")})
    config.trainer.samples_per_task = changes.get("samples", 2)
    config.refuel.length = changes.get("length", "whole")
    with pytest.raises(ValueError, match=message):
        config.validate()


def said(environment, *answers):
    return [environment.step(Action("say", {"text": answer})) for answer in answers]


def test_the_simulated_user_answers_and_turns_earn_what_they_add_to_the_score():
    environment = UserSimulator(**SELLER)
    assert environment.reset({}, 0) == "My work is the best. 80?"
    found = said(environment, "<action>warm</action>", "<action>warm</action>", "quick")
    assert found == [
        ("My work is the best. 60?", 0.0, False),
        ("My work is the best. 40?", 0.0, False),
        ("", 0.5, True),
    ]
    assert environment.reset({"question": "How much?"}, 1) == "How much?"
    assert [over for _, _, over in said(environment, "firm", "firm", "well", "firm")] == [False, False, False, True]


def test_a_dialogue_needs_a_turn_and_a_first_message():
    with pytest.raises(UserError, match="turns is 0; a dialogue needs at least 1"):
        UserSimulator(**SELLER | {"turns": 0})
    silent = UserSimulator(**SELLER | {"user": f"{__file__}:silent"})
    with pytest.raises(UserError, match="the first message is None"):
        silent.reset({}, 0)


def silent(**about):
    return None
