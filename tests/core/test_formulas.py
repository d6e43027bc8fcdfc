"""A formula with a standard deviation names the divisor that its block computes with."""

import dataclasses
import itertools
import re

import numpy as np
import pytest
import torch

from mmrl.contrib.language.segment import tree_values
from mmrl.contrib.rows.estimators import GROUP_ADVANTAGE
from mmrl.core import all_objectives, all_preferences
from mmrl.core.blocks import BLOCKS, PREFERENCE_BLOCKS, all_kinds
from mmrl.fields import bounds_of
from tests.core.builders import random_rollouts

DEVIATION = re.compile(r"\bstd|\bvar\b|\bsigma\b|deviation|standardised|whiten|Var\(", re.IGNORECASE)
"""A deviation or variance in a formula."""
NAMED = re.compile(r"with ddof (\d)")
ROLLOUTS = random_rollouts(seed=3, groups=3, samples=4)
ROLLOUTS = ROLLOUTS.replace(reward=ROLLOUTS.reward.sigmoid(), extras=ROLLOUTS.extras | {"task": ROLLOUTS.group})
R, TRAINED = ROLLOUTS.reward.view(3, 4).numpy(), ROLLOUTS.mask.numpy() > 0
LENGTHS = TRAINED.sum(1)
TURNS = -(-LENGTHS // 2)
"""Turns of a row, of two decisions each."""
COEFS = np.linspace(-1.0, 1.0, 12)
"""Advantages for a block that is given some."""


def by_group(x, ddof, eps=1e-6):
    """Rewards (N, G) standardised by their group, (B,)."""
    return ((x - x.mean(1, keepdims=True)) / (x.std(1, ddof=ddof, keepdims=True) + eps)).reshape(-1)


def whitened(samples, x, ddof, eps_to="variance"):
    spread = np.sqrt(samples.var(ddof=ddof) + 1e-8) if eps_to == "variance" else samples.std(ddof=ddof) + 1e-8
    return (x - samples.mean()) / spread


def over_batch(x, ddof):
    return whitened(x.reshape(-1).repeat(LENGTHS), x.reshape(-1), ddof)


def outcomes(block, ddof):
    won = (R >= 0.6).astype(float)
    within = [
        R - np.where(won == side, R, 0).sum(1, keepdims=True) / np.maximum((won == side).sum(1), 1)[:, None]
        for side in (0, 1)
    ]
    floor = np.std([1.0, 0.0, 0.0, 0.0], ddof=ddof)
    spread = np.maximum(won.std(1, ddof=ddof, keepdims=True), floor) + block.eps
    return ((won - won.mean(1, keepdims=True) + np.where(won == 0, *within)) / spread).reshape(-1)


def best(block, ddof):
    ordered = np.sort(R, 1)
    lead = (ordered[:, -1] - ordered[:, -2]) / (R.std(1, ddof=ddof) + block.eps)
    return np.where(ordered[:, -1:] == R, lead[:, None], 0).reshape(-1)


def virtual(block, ddof):
    joined = np.concatenate([R, np.ones((3, 1))], 1)
    return by_group(joined, ddof).reshape(3, 5)[:, :4].reshape(-1)


def repeated(counts, ddof):
    """Rewards standardised by their group, in which each row counts so many times (B,)."""
    found = []
    for rewards, number in zip(R, counts.reshape(3, 4), strict=True):
        counted = rewards.repeat(number)
        found += [*((rewards - counted.mean()) / (counted.std(ddof=ddof) + 1e-6))]
    return np.array(found)


def blended(block, ddof):
    """The group's advantage among all groups (B,)."""
    return by_group(R.mean(1)[None], ddof).repeat(4)


def risk(block, ddof):
    """One bundle of the three tasks; the first quantiles are those of its papers."""
    x = R.mean(0) * block.bundle
    a, b = np.quantile(x, block.low), np.quantile(x, block.high)
    between = (np.maximum(x - a, 0) - np.maximum(x - b, 0)) / (block.high - block.low + 1e-6)
    short = block.mix * np.maximum(a - x, 0) / (block.low + 1e-6)
    papers = (between - short) / (1 + block.mix) / (x.std(ddof=ddof) + 1e-6)
    over = R.std(1, ddof=ddof, keepdims=True) + 1e-6 if block.credit == "deviation" else 1.0
    return (papers[None] / over * np.ones((3, 4))).reshape(-1)


def beta(block, ddof):
    mean, p = R.mean(1, keepdims=True), R.mean(1)
    factor = (p.mean() * (1 - p.mean()) / p.var(ddof=ddof) - 1) / 3
    shape = [torch.as_tensor(max(1 + factor * share, 1)) for share in (p.mean(), 1 - p.mean())]
    density = torch.distributions.Beta(*shape).log_prob(torch.from_numpy(mean)).exp().numpy()
    return ((R - mean) / density).reshape(-1)


def gained(block, ddof):
    """Turn rewards of one group, with gamma 0."""
    block_rewards = block.rewards(ROLLOUTS).numpy() * TRAINED
    found = np.zeros(TRAINED.shape)
    for rows in np.arange(12).reshape(3, 4):
        turns = {(i, k): block_rewards[i, 2 * k : 2 * k + 2].sum() for i in rows for k in range(TURNS[i])}
        last = {(i, k): block.apart and k + 1 == TURNS[i] for i, k in turns}
        for place, value in turns.items():
            among = np.array([turns[other] for other in turns if last[other] == last[place]])
            spread = np.sqrt(among.var(ddof=ddof) + 1e-8) + 1e-6
            i, k = place
            found[i, 2 * k : 2 * k + 2] = (value - among.mean()) / spread
    return found


def scaled(block, ddof):
    advantage = ROLLOUTS.extras["noise"].numpy()
    rows = [advantage[i][TRAINED[i]].mean() for i in range(12)]
    turns = [advantage[i, 2 * k : min(2 * k + 2, LENGTHS[i])].mean() for i in range(12) for k in range(TURNS[i])]
    samples = {"decisions": advantage[TRAINED], "rows": np.array(rows), "turns": np.array(turns)}[block.whiten]
    return whitened(samples, advantage, ddof, block.eps_to)


def regressed(block, ddof):
    x = ROLLOUTS.extras["noise"][:, 0].numpy()
    predicted = (x - x.mean()) / (x.std(ddof=ddof) + block.eps)
    return ((COEFS - predicted) ** 2)[:, None] * np.ones((1, 6))


def preferred(block, ddof):
    difference = (ROLLOUTS.logp_old - 0.1 - ROLLOUTS.logp_ref).numpy()
    score, found = block.beta * (difference * TRAINED).sum(1).reshape(3, 4), []
    for s, r in zip(score, R, strict=True):
        good, bad = s[r > r.mean()], s[r < r.mean()]
        ahead = np.log1p(np.exp(bad.mean() - good.mean()))
        found.append(ahead + block.variance * (good.var(ddof=ddof) if len(good) > ddof else 0.0))
    return np.array(found)


def entropies(block, ddof):
    entropy = ROLLOUTS.entropy.numpy()
    return np.maximum(1 + block.scale * (entropy - entropy[TRAINED].mean()) / entropy[TRAINED].std(ddof=ddof), 0)


# of each kind: changes under which its deviation is seen, and the numbers that a divisor gives
ROWS = {
    "group_mean_std": [({}, lambda block, ddof: by_group(R, ddof))],
    "group_mean_batch_std": [({}, lambda _, ddof: over_batch(R - R.mean(1, keepdims=True), ddof))],
    "group_mean_global_std": [
        ({}, lambda _, ddof: ((R - R.mean(1, keepdims=True)) / (R.std(ddof=ddof) + 1e-6)).reshape(-1))
    ],
    "group_outcome_std": [({"solved": 0.6}, outcomes)],
    "best_of_group": [({}, best)],
    "group_in_group": [
        ({"std": True, "weight": 0.0, "episode_mean": "episodes"}, lambda _, ddof: by_group(R, ddof)),
        ({"std": True, "weight": 0.0, "episode_mean": "turns"}, lambda _, ddof: repeated(TURNS, ddof)),
    ],
    "whitened_returns": [({}, lambda _, ddof: over_batch(R, ddof))],
    "group_branches": [({}, lambda _, ddof: by_group(R, ddof))],
    "beta_normalised": [({}, beta)],
    "virtual_best": [({}, virtual)],
    "turn_normalised": [({"gamma": 0.0}, gained), ({"gamma": 0.0, "apart": True}, gained)],
    "token_group_mean_std": [
        ({"limit": 1e9}, lambda _, ddof: repeated(LENGTHS, ddof)),
        ({"limit": 1e-9}, lambda _, ddof: by_group(R, ddof)),
    ],
    "budget_target": [({"weight": 0.0}, lambda _, ddof: by_group(R, ddof))],
    "consistency_blend": [({}, blended)],
    "early_code": [({"bound": 0.0}, lambda _, ddof: by_group(R, ddof))],
    "smooth_std": [({}, lambda _, ddof: by_group(R, ddof, 0.0))],
    "bundled_risk": [({"credit": credit, "bundle": 3}, risk) for credit in ("uniform", "deviation")],
    "scaling": [
        ({"whiten": whiten, "eps_to": eps_to}, scaled)
        for whiten in ("decisions", "rows", "turns")
        for eps_to in ("variance", "deviation")
    ],
    "group_regression": [({}, regressed)],
    "group_preference": [({"beta": 1.0}, preferred)],
    "entropy_balanced": [({}, entropies)],
}


BASES = {kind: (part, block) for part in (*BLOCKS, *PREFERENCE_BLOCKS) for kind, block in all_kinds(part).items()}
KINDS = [(kind, i) for kind, cases in ROWS.items() for i in range(len(cases))]


def computed(part, block):
    """The numbers of a block on the rollouts of this file."""
    if part in ("advantage", "weight"):
        return block(ROLLOUTS)
    if part == "scaling":
        return block(ROLLOUTS.extras["noise"], ROLLOUTS)
    if block.kind == "group_preference":
        return block.preference(ROLLOUTS.logp_old - 0.1, ROLLOUTS)
    if block.kind == "consistency_blend":
        return block.constants(ROLLOUTS)[GROUP_ADVANTAGE]
    log_ratio = ROLLOUTS.extras["noise"][:, :1].expand(12, 6)
    return block(log_ratio, log_ratio, torch.from_numpy(COEFS)[:, None].expand(12, 6))[0]


@pytest.mark.parametrize(("kind", "number"), KINDS)
def test_the_named_divisor_is_the_computed_one(kind, number):
    part, made = BASES[kind]
    changes, expected = ROWS[kind][number]
    variants = [made(**changes)]
    if "ddof" in made.options():
        variants = [made(**changes, ddof=ddof) for ddof in (0, 1)]
    for block in variants:
        named = NAMED.findall(block.formula())
        # HAPO counts decisions first, then rows
        stated = int(named[number] if len(named) > 1 else named[0])
        found = computed(part, block).numpy()
        right, other = (expected(block, ddof) for ddof in (stated, 1 - stated))
        shown = TRAINED if found.shape == TRAINED.shape else np.ones(found.shape, bool)
        right, other = ((x[:, None] * np.ones(found.shape) if x.ndim < found.ndim else x) for x in (right, other))
        np.testing.assert_allclose(found[shown], right[shown], rtol=1e-9, atol=1e-12)
        assert np.abs(found[shown] - other[shown]).max() > 1e-3


def variants(made):
    """A kind of block with each value of its switches and choices."""
    switches = {}
    for item in dataclasses.fields(made):
        bounds = bounds_of(item)
        values = bounds.allowed if bounds is not None and bounds.allowed else ()
        values = (False, True) if isinstance(item.default, bool) else values
        if values:
            switches[item.name] = values
    for chosen in itertools.product(*switches.values()):
        yield made(**dict(zip(switches, chosen, strict=True)))


@pytest.mark.parametrize("kind", BASES)
def test_every_formula_with_a_deviation_names_its_divisor_and_is_compared(kind):
    for block in variants(BASES[kind][1]):
        try:
            text = block.formula()
        except NotImplementedError:
            continue
        if DEVIATION.search(text):
            assert NAMED.search(text), text
            assert kind in ROWS or kind == "segment_difference", f"{kind} needs a line in ROWS"


@pytest.mark.parametrize("name", all_objectives() | all_preferences())
def test_every_row_with_a_deviation_names_its_divisor(name):
    text = (all_objectives() | all_preferences())[name].describe().partition("\n")[2]
    assert bool(DEVIATION.search(text)) == bool(NAMED.search(text)), text


def test_the_deviation_of_segments_is_that_of_the_formula():
    formula = BASES["segment_difference"][1](std=True).formula()
    spread = tree_values([[0, 1], [0, 2], [0, 3]], [1.0, 0.0, 0.25])[0][1]
    assert spread == pytest.approx(np.std([1.0, 0.0, 0.25], ddof=int(NAMED.search(formula)[1])))


def test_information_gain_says_that_its_divisor_is_its_authors():
    row = all_objectives()["information_gain"]
    assert "sqrt(var r + 1e-08) + 1e-06" in row.describe()
    assert "ddof 0 and 1e-8 in the root, as in the later code" in row.differs
