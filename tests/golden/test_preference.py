"""Preference losses against TRL and the papers' public code."""

from types import SimpleNamespace

import pytest
import torch

from mmrl.core import PolicyOutputs, PreferenceObjective, Rollouts, get_preference
from mmrl.core.blocks.preference import BASELINE, CHOSEN, OWN, PREVIOUS, SCORE, MeanScore
from mmrl.core.loss import LossOutput
from tests.golden.numbers import assert_agrees, inputs_of, load

FILES = ("dpo", "robust_dpo", "ipo", "slic", "rpo", "sppo", "refuel", "spc", "xpo", "nash_md", "inpo", "a_lol")
BY_HAND = ("direct_advantage",)
FROM_TRL = ("exo", "nca", "bco", "anchored_zero", "anchored_down", "discopop", "length_normalised_dpo")
WITHOUT_REFERENCE = ("simpo", "cpo", "orpo")
BETA = 5000.0
"""Of diffusion_dpo."""
CASES = [(paper, peer) for paper in FILES + BY_HAND + FROM_TRL + WITHOUT_REFERENCE for peer in load(paper).peers]
"""Files with each of their peers."""


def labelled(b, peer) -> tuple[PreferenceObjective, Rollouts, torch.Tensor]:
    """KTO, its answers with the labels of a peer, and their log-probabilities."""
    marks, paired = torch.tensor(peer["labels"]).double(), peer["labels"] == [True] * 4 + [False] * 4
    group = torch.arange(4).repeat(2) if paired else torch.arange(8)
    extras = {CHOSEN: marks, BASELINE: torch.full((8,), float(peer["baseline"]), dtype=torch.float64)}
    rollouts = Rollouts(group, b.mask, torch.zeros_like(b.mask), torch.zeros(8), logp_ref=b.logp_ref, extras=extras)
    return configured("kto", peer["options"]), rollouts, b.logp.requires_grad_()


@pytest.mark.parametrize("peer", load("kto").peers, ids=["pairs", "single"])
def test_kto_is_that_of_trl_with_and_without_pairs(peer):
    objective, rollouts, logp = labelled(inputs_of("kto"), peer)
    counts, group = objective.denominators(rollouts), rollouts.group
    output = objective.step_loss(PolicyOutputs(logp), rollouts, counts)
    assert_agrees(output.loss, peer, "loss")
    assert_agrees(torch.autograd.grad(output.loss, logp)[0], peer, "gradient")
    for name, value in peer["metrics"].items():
        assert output.metrics[name].value == pytest.approx(value, rel=1e-12), name
    rows = [torch.nonzero((group >= n) & (group < n + 2)).flatten() for n in range(0, rollouts.num_groups, 2)]
    losses = [objective.step_loss(PolicyOutputs(logp[own]), rollouts.select(own), counts).loss for own in rows]
    assert float(sum(losses).detach()) == pytest.approx(peer["loss"], rel=1e-12)


def rollouts_of(b, pairs: int) -> Rollouts:
    """Preferred rows, then rejected ones, as the files hold them."""
    group = torch.arange(pairs).repeat(2)
    extras = {CHOSEN: torch.tensor([1.0] * pairs + [0.0] * pairs), SCORE: b.score}
    found = {OWN: getattr(b, "own", None), PREVIOUS: getattr(b, PREVIOUS, None)}
    extras |= {name: value for name, value in found.items() if value is not None}
    return Rollouts(group, b.mask, torch.zeros_like(b.mask), torch.zeros(2 * pairs), logp_ref=b.logp_ref, extras=extras)


def configured(paper: str, options: dict) -> PreferenceObjective:
    objective = get_preference(paper)
    changes = {"likelihood": options} if "average" in options else {"loss": options}
    return objective.override(changes) if options else objective


def compute(paper: str, options: dict, b: SimpleNamespace) -> tuple[LossOutput, torch.Tensor]:
    """Loss of a row with other options on the inputs of a file, and its gradient."""
    logp = b.logp.requires_grad_()
    objective, rollouts = configured(paper, options), rollouts_of(b, 4)
    output = objective.step_loss(PolicyOutputs(logp), rollouts, objective.denominators(rollouts))
    return output, torch.autograd.grad(output.loss, logp)[0]


@pytest.mark.parametrize(("paper", "peer"), CASES, ids=[f"{paper}-{peer['options']}" for paper, peer in CASES])
def test_losses_are_those_of_the_public_code(paper, peer):
    output, gradient = compute(paper, peer["options"], inputs_of(paper, peer))
    factor = 2.0 if peer["options"].get("kind") == "sppo_hard" else 1.0  # TRL leaves out the paper's 1/2
    assert_agrees(factor * output.loss, peer, "loss")
    assert_agrees(factor * gradient, peer, "gradient")
    for name, value in peer.get("metrics", {}).items():
        if not isinstance(get_preference(paper).score, MeanScore):  # TRL's metrics are of sums, ours of these means
            assert output.metrics[name].value == pytest.approx(value, rel=1e-12), name


@pytest.mark.parametrize("peer", load("diffusion_dpo").peers, ids=["noise", "velocity", "near"])
def test_diffusion_dpo_is_that_of_the_public_code(peer):
    b = inputs_of("diffusion_dpo", peer)
    target = b.noise if peer["predicts"] == "noise" else b.noise - b.latents
    prediction = b.prediction.requires_grad_()

    def logp(predicted: torch.Tensor) -> torch.Tensor:
        return -0.5 * (predicted - target).square().flatten(1).mean(1, keepdim=True)

    objective = get_preference("diffusion_dpo")
    objective = objective.override({} if b.beta == BETA else {"loss": {"beta": b.beta}})
    marks = {CHOSEN: torch.tensor([1.0] * 3 + [0.0] * 3)}
    ones = torch.ones(6, 1, dtype=torch.float64)
    rollouts = Rollouts(
        torch.arange(3).repeat(2), ones, ones, torch.zeros(6), logp_ref=logp(b.prediction_ref), extras=marks
    )
    loss = objective.step_loss(PolicyOutputs(logp(prediction)), rollouts, objective.denominators(rollouts)).loss
    (gradient,) = torch.autograd.grad(loss, prediction)
    assert_agrees(loss, peer, "loss")
    assert_agrees(gradient, peer, "gradient")
