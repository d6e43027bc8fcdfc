"""GDPO's advantages against its public code."""

import torch

from mmrl.core import Objective, Rollouts, decoupled_advantages
from mmrl.core.blocks.advantage import GroupMeanStd
from tests.golden.numbers import assert_agrees, inputs_of, load


def test_gdpo_is_its_public_code():
    b, (peer,) = inputs_of("gdpo"), load("gdpo").peers
    rollouts = Rollouts(
        group=b.group,
        mask=torch.ones(12, 2, dtype=torch.float64),
        logp_old=torch.zeros(12, 2, dtype=torch.float64),
        reward=b.right + b.length,
        reward_terms={"right": b.right, "length": b.length},
    )
    weights = dict(zip(("right", "length"), b.weights.tolist(), strict=True))
    found = decoupled_advantages(Objective("gdpo", GroupMeanStd(eps=1e-4)), rollouts, weights).advantage
    assert_agrees(found[:, 0], peer, "advantage")
    assert_agrees(found[:, 1], peer, "advantage")
