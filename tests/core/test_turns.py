"""Advantages of turns that began in the same state."""

import pytest
import torch

from mmrl.contrib.rows.agentic import GroupBranches
from mmrl.core import Rollouts
from mmrl.core.blocks.advantage import GroupMean, GroupMeanStd
from mmrl.core.blocks.turns import GroupInGroup

MASK = torch.tensor([[1.0, 1, 0, 1, 1], [1, 0, 1, 1, 0], [1, 1, 1, 0, 0], [1, 1, 0, 0, 0]], dtype=torch.float64)
TURN = torch.tensor([[0, 0, 1, 1, 2], [0, 1, 1, 2, -1], [0, 0, 1, -1, -1], [0, 1, -1, -1, -1]])


def rollouts_of(anchor, received, reward=None) -> Rollouts:
    received = torch.tensor(received, dtype=torch.float64)
    return Rollouts(
        group=torch.tensor([0, 0, 1, 1]),
        mask=MASK,
        logp_old=torch.zeros_like(MASK),
        reward=received.sum(1) if reward is None else reward,
        turn=TURN,
        extras={"anchor": torch.tensor(anchor), "decision_reward": received},
    )


RECEIVED = [[0.0, 0, 0, 0, 1], [0, 0, 0, 0.5, 0], [0, 0.25, 0, 0, 0], [0, 0, 0, 0, 0]]
ANCHOR = [[7, 7, 8, 8, 7], [7, 8, 8, 9, 0], [7, 7, 5, 0, 0], [7, 5, 0, 0, 0]]


def test_a_turn_is_compared_with_turns_from_its_state():
    """With gamma 0.5, returns from each turn are 1/4, 1/2, 1 and 1/8, 1/4, 1/2, then 1/4, 0 and 0, 0."""
    advantage = GroupInGroup(weight=2.0, gamma=0.5, episode_mean="episodes")(rollouts_of(ANCHOR, RECEIVED))
    first = (1 / 4 + 1 + 1 / 8) / 3  # state 7 of group 0, twice in the first episode
    second = (1 / 2 + 1 / 4) / 2  # state 8
    expected = [
        [0.25 + 2 * (1 / 4 - first)] * 2 + [0] + [0.25 + 2 * (1 / 2 - second), 0.25 + 2 * (1 - first)],
        [-0.25 + 2 * (1 / 8 - first), 0, -0.25 + 2 * (1 / 4 - second), -0.25, 0],
        [0.125 + 2 * 0.125] * 2 + [0.125, 0, 0],
        [-0.125 - 2 * 0.125, -0.125, 0, 0, 0],
    ]
    torch.testing.assert_close(advantage, torch.tensor(expected, dtype=torch.float64))


def test_episodes_count_by_their_turns_or_once():
    alone = [[i * 10 + t for t in range(5)] for i in range(4)]
    rollouts = rollouts_of(alone, RECEIVED)
    once = GroupInGroup(episode_mean="episodes")(rollouts)
    torch.testing.assert_close(once, GroupMean()(rollouts), msg="every state is visited once")
    scaled = GroupInGroup(std=True, episode_mean="episodes", weight=0.0)(rollouts_of(ANCHOR, RECEIVED))
    torch.testing.assert_close(scaled, GroupMeanStd()(rollouts))
    by_turns = GroupInGroup()(rollouts_of(alone, [[0.0, 0, 0, 0, 1], [0] * 5, [0] * 5, [0] * 5]))
    assert by_turns[0, 0] == pytest.approx(0.5), "three turns each"
    assert GroupInGroup()(rollouts)[2, 0] == pytest.approx(0.25 / 2), "two turns each"


def test_an_unscored_episode_is_in_no_mean():
    reward = torch.tensor([float("nan"), 0.5, float("nan"), float("nan")], dtype=torch.float64)
    for mean in ("turns", "episodes"):
        advantage = GroupInGroup(weight=1.0, episode_mean=mean)(rollouts_of(ANCHOR, RECEIVED, reward))
        assert (advantage == 0).all(), "the only episode left visits each of its states once"


def test_missing_states_are_named():
    rollouts = rollouts_of(ANCHOR, RECEIVED)
    with pytest.raises(ValueError, match=r'extras\["anchor"\] is missing'):
        GroupInGroup()(rollouts.replace(extras={}))


def test_shared_decisions_get_the_mean_over_the_rows_that_share_them():
    """A row, a branch of it after 2 decisions, a branch of that one after 3, and a row of its own."""
    mask = torch.tensor([[1.0, 0, 1, 1, 1], [1, 0, 1, 1, 0], [1, 0, 1, 1, 1], [1, 1, 0, 0, 0]], dtype=torch.float64)
    rollouts = Rollouts(
        group=torch.zeros(4, dtype=torch.int64),
        mask=mask,
        logp_old=torch.zeros_like(mask),
        reward=torch.tensor([1.0, 0.0, 0.5, 0.25], dtype=torch.float64),
        extras={"parent": torch.tensor([0, 1, 1, 0]), "shared": torch.tensor([0, 2, 3, 0])},
    )
    alone = GroupMeanStd()(rollouts)[:, 0]
    found = GroupBranches()(rollouts)
    first, second = alone[:3].mean(), alone[1:3].mean()
    expected = [
        [first, 0, alone[0], alone[0], alone[0]],
        [first, 0, second, alone[1], 0],
        [first, 0, second, alone[2], alone[2]],
        [alone[3], alone[3], 0, 0, 0],
    ]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))
