"""Pairs of REFUEL's dialogues against the public code of its setting one."""

from types import SimpleNamespace

import numpy as np
import torch

from mmrl.agents.environments.agent_tasks import AgentTask
from mmrl.agents.rollout.episodes import Episode, Trajectory, tabulate_tokens
from mmrl.contrib.agents.refuel import RESAMPLED, RefuelRecipe, cut_rewards, draw_turn, resampled_turns
from mmrl.core.blocks.preference import CHOSEN, SCORE
from mmrl.core.rollouts import Rollouts
from mmrl.training.recipe import Step
from mmrl.vlm.engine.rows import text_prompt
from tests.golden.numbers import load

FILE = load("refuel_dialogues")
(PEER,) = FILE.peers


def dialogue(answers, rewards, turn):
    """An episode of letters as tokens; the score of the dialogue up to each turn becomes what the turn earned."""
    trajectory = Trajectory()
    for number, answer in enumerate(answers):
        if number:
            trajectory.add_given(text_prompt(torch.tensor([1, 99, 2])))
        ids = [*(10 + ord(letter) - ord("a") for letter in answer), 0]
        trajectory.add_turn(ids, [-1.0] * len(ids))
    earned = np.diff(rewards, prepend=0.0).tolist()
    return Episode(AgentTask("x"), trajectory=trajectory, rewards=earned, answers=list(answers), shared_turns=turn)


def test_the_trained_answers_and_their_scores_are_those_of_the_public_code():
    inputs, episodes = FILE.inputs, []
    columns = (inputs[name] for name in ("answers", "rewards", "h", "last"))
    for answers, rewards, turn, last in zip(*columns, strict=True):
        pair = [dialogue(said, earned, turn) for said, earned in zip(answers, rewards, strict=True)]
        cut_rewards(pair, last)
        episodes += pair
    table = tabulate_tokens([episode.trajectory for episode in episodes], 0)
    rollouts = Rollouts(
        torch.arange(len(episodes) // 2).repeat_interleave(2),
        table.mask,
        table.logp,
        torch.tensor([sum(episode.rewards) for episode in episodes], dtype=torch.float64),
        turn=table.turn,
        extras={RESAMPLED: torch.tensor(resampled_turns(episodes))},
    )
    recipe = SimpleNamespace(noted={})
    pairs = RefuelRecipe.estimate(recipe, rollouts, None, Step())
    assert recipe.noted["refuel/learnt"].value == np.mean(PEER["kept"])
    for side, mark in (("chosen", 1.0), ("reject", 0.0)):
        rows = torch.nonzero(pairs.extras[CHOSEN] == mark).flatten().tolist()
        trained = [table.ids[row][pairs.mask[row] > 0].tolist() for row in rows]
        assert trained == [ids if kept else [] for ids, kept in zip(PEER[side], PEER["kept"], strict=True)]
        assert pairs.extras[SCORE][rows].tolist() == PEER[f"{side}_reward"]


def test_turns_are_drawn_as_often_as_by_the_public_code():
    generator, found = torch.Generator().manual_seed(0), np.zeros((5, 5))
    for _ in range(20_000):
        turn, last = draw_turn(5, "sampled", generator)
        found[last, turn] += 1 / 20_000
    np.testing.assert_allclose(found, PEER["draws"], atol=0.01)
