"""VL-DAC's advantages and losses against its public code."""

import pytest
import torch

from mmrl.core import Objective, PolicyOutputs, Rollouts, get
from tests.golden.make.vl_dac import CONSTANTS
from tests.golden.numbers import PROGRESS, assert_agrees, inputs_of, load

CASES = {"time limit": "mask", "cut off": "bootstrap", "warm-up": "mask", "row": "mask"}


def objective_of(case: str) -> Objective:
    """The row of the catalogue, but for the last case with the constants of the public code's configuration."""
    if case == "row":
        return get("vl_dac").at(PROGRESS)
    advantage = {"gamma": CONSTANTS["gamma"], "lam": CONSTANTS["gae_lambda"], "truncation": CASES[case]}
    clip = CONSTANTS["clip_param"]
    return get("vl_dac").override(
        {
            "advantage": advantage,
            "clip": {"low": clip, "high": clip},
            "kl": {"coef": CONSTANTS["kl_beta"]},
            "value": {"coef": CONSTANTS["value_loss_coef"], "clip": clip},
        }
    )


def by_rows(b, flat: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
    """Numbers of the tokens (M,) as rows (B, T) of episodes."""
    episode = b.episode.repeat_interleave(b.tokens)
    rows = [flat[episode == number] for number in range(int(b.episode.max()) + 1)]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill)


def rollouts_of(b, case: str) -> Rollouts:
    last = b.tokens.cumsum(0) - 1
    received = torch.zeros_like(b.logp).index_put((last,), b.reward)
    turn = by_rows(b, torch.arange(len(b.tokens)).repeat_interleave(b.tokens), -1)
    mask = by_rows(b, torch.ones_like(b.logp))
    extras = {"decision_reward": by_rows(b, received), "truncated": b.truncated}
    if case == "cut off":
        extras["bootstrap_value"] = torch.tensor([0.0, 0.0, b.next_value], dtype=torch.float64)
    return Rollouts(
        group=torch.arange(len(mask)),
        mask=mask,
        logp_old=by_rows(b, b.logp_old),
        reward=extras["decision_reward"].sum(1),
        logp_ref=by_rows(b, b.logp_ref),
        values=by_rows(b, b.values.repeat_interleave(b.tokens)),
        turn=turn,
        extras=extras,
    )


@pytest.mark.parametrize("case", CASES)
def test_an_update_is_that_of_the_public_code(case):
    (peer,) = (peer for peer in load("vl_dac").peers if peer["case"] == case)
    b = inputs_of("vl_dac", peer)
    objective, starts = objective_of(case), b.tokens.cumsum(0) - b.tokens
    rollouts = objective.compute_advantages(rollouts_of(b, case))
    assert_agrees(rollouts.returns[rollouts.mask > 0][starts], peer, "returns")
    logp, values = b.logp.requires_grad_(), b.values_new.requires_grad_()
    scores = PolicyOutputs(by_rows(b, logp), values=by_rows(b, values.repeat_interleave(b.tokens)))
    loss_of = objective.critic_loss if case == "warm-up" else objective.loss
    loss = loss_of(scores, rollouts, objective.denominators(rollouts)).loss
    slopes = torch.autograd.grad(loss, [logp, values], materialize_grads=True)
    assert_agrees(loss, peer, "loss", size=1.0)
    assert_agrees(slopes[0], peer, "gradient", size=1.0)
    assert_agrees(slopes[1], peer, "gradient_values")


def test_the_ratio_limit_is_in_the_numbers():
    """The numbers depend on it: it changes a turn of the file."""
    b = inputs_of("vl_dac")
    objective = objective_of("time limit")
    rollouts = objective.compute_advantages(rollouts_of(b, "time limit"))
    scores = PolicyOutputs(by_rows(b, b.logp), values=rollouts.values)
    counts = objective.denominators(rollouts)
    without = objective.override({"clip": {"ratio_limit": None}})
    assert objective.loss(scores, rollouts, counts).loss + 0.1 < without.loss(scores, rollouts, counts).loss
