"""Matching losses against the papers' own code: AWM, DiffusionNFT, ORW-CFM-W2; decays of moving averages."""

import pytest
import torch

from diffusion.matching.losses import NoisyRows, nft_loss, nft_weight, pseudo_log_likelihood
from diffusion.matching.velocity import Matching
from diffusion.methods.nft import ADVANTAGE_MODES, MATCHING_LOSSES, reference_weight
from diffusion.methods.orw_cfm import WEIGHTS
from diffusion.models.ema import eval_ema_decay, nft_old_decay
from diffusion.sampling.steps import velocity_kl
from diffusion.sampling.trajectories import TrainedDecisions
from mmrl.core import PolicyOutputs, Rollouts, get
from tests.golden.numbers import FLOAT32, PROGRESS, assert_agrees, group_numbers, inputs_of, load


def matching_error(b):
    """Mean squared distance of the velocities to noise - image (K * B,), float64."""
    return (b.velocity - (b.noise - b.clean)).square().flatten(2).mean(2).flatten()


@pytest.mark.parametrize("weighting", load("awm").peers[0]["likelihood"])
def test_awm_likelihoods(weighting):
    b, peer = inputs_of("awm"), load("awm").peers[0]
    found = pseudo_log_likelihood(matching_error(b), b.sigma.repeat_interleave(12), weighting, 0.25)
    assert_agrees(found, peer["likelihood"] | {"relative": 1e-12, "program": peer["program"]}, weighting)


AWM = [("exp_first", "token", 0), ("sum_first", "sequence_full", 0), ("exp_first", "token", 1)]


@pytest.mark.parametrize(("average", "level", "number"), AWM)
def test_awm_update(average, level, number):
    peer = load("awm").peers[number]
    b = inputs_of("awm", peer)
    rows = len(b.reward)
    velocity, sigma = b.velocity.requires_grad_(), b.sigma.repeat_interleave(rows)
    logp = pseudo_log_likelihood(matching_error(b), sigma, "ghuber", 0.25).reshape(2, rows).T
    objective = get("awm").override({"ratio": {"kind": level}}).at(PROGRESS)
    rollouts = Rollouts(group_numbers(b.prompts), torch.ones_like(logp), (logp + b.logp_old_shift.T).detach(), b.reward)
    rollouts = objective.compute_advantages(rollouts)
    limited = torch.tensor(peer["advantage"], dtype=torch.float64).clamp(-5, 5) / 5
    torch.testing.assert_close(rollouts.advantage, limited[:, None].expand(rows, 2), rtol=1e-12, atol=1e-12)

    def distance(anchor, kind):
        return velocity_kl(velocity.flatten(0, 1), anchor.flatten(0, 1), sigma, kind).reshape(2, rows).T

    outputs = PolicyOutputs(logp, kl_ref=distance(b.velocity_ref, "uniform"))
    loss = objective.loss(outputs, rollouts, objective.denominators(rollouts)).loss
    loss = loss + b.config["ema_beta"] * distance(b.velocity_ema, "elbo").mean()
    (gradient,) = torch.autograd.grad(loss, velocity)
    # distances of velocities are float32 here
    expected = peer["losses"][average] | {"program": peer["program"]}
    assert_agrees(loss, expected, "loss", relative=4 * FLOAT32)
    assert_agrees(gradient, expected, "gradient", relative=4 * FLOAT32)


def test_nft_loss_and_weights():
    b, (peer,) = inputs_of("nft"), load("nft").peers
    velocity, t = b.velocity.requires_grad_(), b.sigma.reshape(-1, 1, 1, 1)
    noisy = NoisyRows((1 - t) * b.clean + t * b.noise, b.noise - b.clean, b.sigma, torch.arange(6))
    weight = nft_weight(b.advantage)
    assert_agrees(weight, peer, "weight")
    loss = nft_loss(velocity, b.velocity_old, noisy, b.clean, weight, b.beta).mean()
    loss = loss + b.kl_coef * velocity_kl(velocity, b.velocity_ref, b.sigma).mean()
    (gradient,) = torch.autograd.grad(loss, velocity)
    # rounded to float32 at the end here
    assert_agrees(loss, peer, "loss", relative=FLOAT32)
    assert_agrees(gradient, peer, "gradient", relative=FLOAT32)


def group_loss(b, name, temperature=None, **options):
    """Loss of the rows of two groups, and the gradient with respect to the velocity."""
    rule = MATCHING_LOSSES[{"dgpo": "group_preference", "crd": "centred_reward"}[name]](
        b.beta[name], b.clip, temperature, **options
    )
    velocity, old = b.velocity.clone().requires_grad_(), b.velocity + b.moved
    noisy = NoisyRows(b.target, b.target, torch.ones(6), torch.arange(6))
    matching = Matching(TrainedDecisions(torch.arange(6), torch.Size((6, 1))), noisy, b.target, velocity)
    rollouts = Rollouts(b.group, torch.ones(6, 1).double(), torch.zeros(6, 1).double(), torch.zeros(6).double())
    rollouts = rollouts.replace(advantage=b.advantage[:, None])
    constants = rule.constants(rule.gain(matching, old, b.velocity_ref).detach()[:, None], rollouts)
    loss = rule.rows(matching, old, b.advantage, [constant[:, 0] for constant in constants]).mean()
    return loss, torch.autograd.grad(loss, velocity)[0]


@pytest.mark.parametrize("moving", [False, True])
def test_group_preference_of_dgpo(moving):
    b, (peer, _) = inputs_of("group_losses"), load("group_losses").peers
    loss, gradient = group_loss(b, "dgpo", moving=moving)
    expected = peer["dgpo_moving" if moving else "dgpo"] | {"program": peer["program"]}
    assert 0 < sum(expected["stopped"]) < 6
    # matching errors are float32 here
    assert_agrees(loss, expected, "loss", size=20.0, relative=4 * FLOAT32)
    assert_agrees(gradient, expected, "gradient", relative=16 * FLOAT32)


@pytest.mark.parametrize("temperature", [None, 0.3])
def test_centred_reward_of_crd(temperature):
    b, (peer, _) = inputs_of("group_losses"), load("group_losses").peers
    loss, gradient = group_loss(b, "crd", temperature)
    expected = peer["crd"][str(temperature)] | {"program": peer["program"]}
    # implied rewards are rounded to float32 here
    assert_agrees(gradient, expected, "gradient", relative=8 * FLOAT32)
    if temperature is None:  # with one, the code's loss has a further constant
        assert_agrees(loss, expected, "loss", relative=8 * FLOAT32)


@pytest.mark.parametrize("temperature", [None, 0.3])
def test_cross_entropy_of_crd(temperature):
    b, (peer, _) = inputs_of("group_losses"), load("group_losses").peers
    loss, gradient = group_loss(b, "crd", temperature, distance="cross_entropy")
    expected = peer["crd_bce"][str(temperature)] | {"program": peer["program"]}
    assert_agrees(loss, expected, "loss", relative=8 * FLOAT32)
    assert_agrees(gradient, expected, "gradient", relative=8 * FLOAT32)


def test_the_weight_of_the_distance_to_the_reference_of_crd():
    b, (peer, _) = inputs_of("group_losses"), load("group_losses").peers
    distance = velocity_kl(b.velocity, b.velocity_ref, torch.ones(6))
    found = 0.1 * (reference_weight(b.advantage, 1e-4, 0.1) * distance).mean()
    assert_agrees(found, peer, "kl", relative=8 * FLOAT32)


def test_weights_by_mode():
    b, (_, peer) = inputs_of("group_losses"), load("group_losses").peers
    names = {"continuous": "all"}
    for mode, expected in peer["weights"].items():
        found = nft_weight(ADVANTAGE_MODES[names.get(mode, mode)](b.advantage.clamp(-5, 5)))
        assert found.tolist() == pytest.approx(expected, abs=1e-15), mode


@pytest.mark.parametrize("where", ["nft 0", "nft 1", "nft 2", "group_losses 2", "group_losses 3"])
def test_schedules_of_old_policies(where):
    paper, kind = where.split()
    file = load(paper)
    found = [nft_old_decay(step, int(kind)) for step in file.inputs["steps"]]
    assert found == pytest.approx(file.peers[0]["decay"][kind], rel=1e-14)


def test_decay_of_the_evaluated_average():
    found = [eval_ema_decay(step, 0.9) for step in range(0, 120, 7)]
    assert found == pytest.approx(load("flow_grpo").peers[0]["decay"], rel=1e-14)


def test_orw_weights_and_loss():
    b, (peer,) = inputs_of("orw_cfm"), load("orw_cfm").peers
    weight = WEIGHTS["exp"](b.reward, b.tau)
    assert_agrees(weight, peer, "weight")
    velocity = b.velocity.requires_grad_()
    noisy = NoisyRows(b.target, b.target, torch.zeros(6), torch.arange(6))
    loss = (weight * noisy.matching_error(velocity)).mean()
    loss = loss + b.alpha * velocity_kl(velocity, b.velocity_ref, torch.ones(6)).mean()
    (gradient,) = torch.autograd.grad(loss, velocity)
    # errors and distances are float32 here
    assert_agrees(loss, peer, "loss", relative=4 * FLOAT32)
    assert_agrees(gradient, peer, "gradient", relative=4 * FLOAT32)
