"""Every option of an objective's blocks changes a number: an advantage, a loss, a gradient, or what is chosen."""

import dataclasses
import itertools
import typing
from types import SimpleNamespace

import pytest
import torch

from mmrl.core import Objective, PolicyOutputs
from mmrl.core.blocks import BLOCKS
from mmrl.core.blocks.credit import ValueLoss
from mmrl.fields import bounds_of
from tests.contracts.options import Leaf, defined_in, other_values
from tests.core.builders import random_rollouts

TASKS = [SimpleNamespace(columns={"level": number // 10, "length": number % 2}) for number in range(20)]
SITUATIONS = [(move, binary) for move in (0.3, 1.0, 3.0) for binary in (True, False)]
"""How far the policy has moved, and whether rewards are 0 and 1."""
NEEDED = {
    "gae": {"value": ValueLoss()},
    "gae_turn": {"value": ValueLoss()},
    "squared_error": {"advantage": {"kind": "gae"}},
    "gspo": {"ratio": {"kind": "sequence"}},
    **{kind: {"ratio": {"kind": "sequence_product"}} for kind in ("group_regression", "vespo")},
    "sequence_product": {"clip": {"kind": "ppo_clip", "high": 1e9}},
}
"""Further parts without which a block is refused, or cannot be seen."""
OPTIONS = {
    "fixed_length": {"length": 4},
    "scaling": {"whiten": "rows"},
    **{kind: {"coef": 0.1} for kind in (*BLOCKS["kl"], *BLOCKS["entropy"])},
    "target": {"coef": 0.1, "start": 0.05, "target": 0.8},
}
"""Options that a block cannot do without."""
VALUES = {"field": ["length"], "key": ["accuracy"], "ratio_limit": [1.0001], "dual": [1.0001], "cap": [10.5, 30.0]}
"""Other values of options, by name, where those that follow from type and bounds do not fit."""
ELSEWHERE = {("resample", "max_tries"): "the trainer samples further tasks"}
"""Options that no number here depends on."""


def batch(seed, binary):
    r = random_rollouts(seed, groups=10, samples=4, width=8)
    g = torch.Generator().manual_seed(seed)
    reward = torch.randint(0, 2, r.reward.shape, generator=g).double() if binary else r.reward
    source = torch.randint(0, 3, r.reward.shape, generator=g)
    truncated = torch.randint(0, 2, r.reward.shape, generator=g).double()
    more = {
        "source": source,
        "truncated": truncated,
        "bootstrap_value": truncated * 2,
        "task": r.group + 10 * (seed % 2),
        **{
            name: torch.rand(r.mask.shape, generator=g).double()
            for name in ("value_before", "value_after", "value_std")
        },
    }
    reward[-3:] = float("nan")  # a group with one scored row
    r.mask[r.lengths > 4, 1] = 0.0
    r = r.replace(logp_old=(5.0 if binary else 1.0) * r.logp_old, mask=r.mask)
    return r.replace(reward=reward, extras=r.extras | more, turn=torch.where(r.mask > 0, r.turn, -1))


def numbers(objective, move, binary, steps=3):
    """All that an objective computes in some steps."""
    state, found = objective.state(TASKS), []
    for step in range(steps):
        g = torch.Generator().manual_seed(step)
        now = objective.at(step / steps)
        rollouts = now.compute_advantages(batch(step, binary), state)
        outputs = {
            name: torch.randn(rollouts.mask.shape, generator=g).double() for name in ("logp", "values", "entropy")
        }
        outputs |= {"kl_ref": outputs["values"].abs(), "kl_old": 1e-5 * outputs["values"].exp()}
        outputs["logp"] = rollouts.logp_old + move * outputs["logp"]
        outputs["values"] = rollouts.values + move * outputs["values"]
        outputs["entropy"] = outputs["entropy"].abs()
        leaves = {name: value.requires_grad_() for name, value in outputs.items()}
        scores = PolicyOutputs(**leaves)
        if now.surveys:
            rollouts = now.settled([now.survey(scores, rollouts)], rollouts)
        loss = now.loss(scores, rollouts, now.denominators(rollouts)).loss
        gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        found += [rollouts.advantage, loss.detach(), *(x for x in gradients if x is not None)]
        found += [now.filter.kept(rollouts).double()]
        drawn = now.order(len(TASKS), 200, state, torch.Generator().manual_seed(step))
        found += [] if drawn is None else [drawn.double()]
    return torch.cat([x.flatten() for x in found])


def made(part, kind, **options):
    changes = {part: {"kind": kind} | OPTIONS.get(kind, {}) | options}
    blocks = {key: value for key, value in NEEDED.get(kind, {}).items() if not isinstance(value, dict)}
    others = {key: value for key, value in NEEDED.get(kind, {}).items() if isinstance(value, dict)}
    if kind == "squared_error":
        return Objective("mine", value=ValueLoss()).override(others | changes)
    return Objective("mine", **blocks).override(others | changes)


def is_valid(part, kind, name, value):
    try:
        made(part, kind, **{name: value}).validate()
    except ValueError:
        return False
    return True


CASES = [
    pytest.param(part, kind, item.name, id=f"{part}-{kind}-{item.name}")
    for part, table in BLOCKS.items()
    for kind, block in table.items()
    for item in dataclasses.fields(block)
    if (kind, item.name) not in ELSEWHERE
]


@pytest.mark.parametrize(("part", "kind", "name"), CASES)
def test_another_value_of_an_option_gives_other_numbers(part, kind, name):
    block = type(getattr(made(part, kind), part))
    item = next(item for item in dataclasses.fields(block) if item.name == name)
    value = getattr(getattr(made(part, kind), part), name)
    leaf = Leaf(
        name, (name,), (defined_in(block, name), name), value, typing.get_type_hints(block)[name], bounds_of(item)
    )
    allowed = [other for other in VALUES.get(name, other_values(leaf)) if is_valid(part, kind, name, other)]
    for other, (move, binary) in itertools.product(allowed, SITUATIONS):
        changed = made(part, kind, **{name: other})
        base = numbers(made(part, kind), move, binary)
        found = numbers(changed, move, binary)
        if found.shape != base.shape or not torch.equal(found.nan_to_num(), base.nan_to_num()):
            return
    assert not allowed, f"{allowed} in the place of {value}"
