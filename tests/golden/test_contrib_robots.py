"""PMOE, PROPS and BESO against their authors' code."""

import numpy as np
import pytest
import torch

from robotics.contrib.beso import BesoPolicy, BesoPolicyConfig, denoised, denoising_error, noise_levels, scalings
from robotics.contrib.pmoe import Experts, MixtureActionPolicy, MixturePolicyConfig, mixture_log_prob
from robotics.contrib.props import PropsSettings, behaviour_loss, correct
from robotics.offpolicy.sac_losses import actor_loss
from robotics.policies.base.action_policy import PolicyInputs
from robotics.policies.base.encoder import EncoderConfig
from tests.golden.numbers import FLOAT32, assert_agrees, inputs_of, load

SMALL = EncoderConfig(image_size=None, state_size=1, width=8, heads=1, layers=1)


def test_the_loss_of_the_actor_of_pmoe():
    b, (peer, _) = inputs_of("pmoe"), load("pmoe").peers
    leaves = [part.clone().requires_grad_() for part in (b.logits, b.mean, b.log_std)]
    policy = MixtureActionPolicy.build(MixturePolicyConfig(2, 2, experts=3, encoder=SMALL), [""])
    policy.experts = lambda batch: Experts(leaves[0].log_softmax(1), *leaves[1:])
    policy._drawn_experts = lambda found, generator: (None, found.mean + found.log_std.exp() * b.noise)

    def judge(actions):
        return -(actions - b.centres).square().flatten(2).sum(2).max(0).values

    value, logp, frequency = policy.propose(None, None, judge)
    loss = actor_loss(value, logp, b.alpha) + frequency
    found = {"value": value, "logp": logp, "frequency": frequency, "loss": loss}
    gradients = torch.autograd.grad(loss, leaves)
    found |= {f"gradient_{name}": part for name, part in zip(("logits", "mean", "log_std"), gradients, strict=True)}
    for name, own in found.items():
        assert_agrees(own, peer, name)
    assert len(set(peer["best"])) == 3, "each expert is the best of a row"


def test_the_density_of_a_mixture():
    b, (_, peer) = inputs_of("pmoe"), load("pmoe").peers
    leaf = b.mean.clone().requires_grad_()
    logp = mixture_log_prob(b.before, Experts(b.logits.log_softmax(1), leaf, b.log_std))
    assert_agrees(logp.cumsum(1), peer, "density")
    assert_agrees(torch.autograd.grad(logp.sum(), leaf)[0], peer, "density_gradient")


@pytest.mark.parametrize("number", range(3))
def test_the_correction_of_props(number):
    b, peer = inputs_of("props"), load("props").peers[number]
    weights = b.weights.clone().requires_grad_()

    def logp():
        return (b.states @ weights).log_softmax(1).gather(1, b.actions[:, None]).squeeze(1)

    own, seen = logp().detach(), []

    def log_ratio(batch):
        seen.append(logp() - own)
        return seen[-1]

    settings = PropsSettings(**peer["settings"])
    assert_agrees(correct([weights], lambda: [None], log_ratio, settings), peer, "kl")
    assert_agrees(weights, peer, "weights")
    assert len(seen) == peer["updates"]
    assert_agrees(behaviour_loss(seen[-1], settings.clip), peer, "loss")


class Network(torch.nn.Module):
    """That of tests/golden/make/beso.py, on what the encoder says of state and goal."""

    def forward(self, seen, chunk, time):
        return (2 * chunk + seen[:, :1] + time[:, None]).tanh()


class Seen(torch.nn.Module):
    """State less half the goal, which is the instruction."""

    def forward(self, batch):
        goals = torch.tensor([float(text or 0) for text in batch.instructions], dtype=torch.float64)
        return (batch.state[:, 0] - 0.5 * goals)[:, None, None]


def test_the_denoiser_of_beso():
    b, (peer,) = inputs_of("beso"), load("beso").peers
    actions = b.actions.clone().requires_grad_()
    seen = (b.state - 0.5 * b.goal)[:, None]
    given = seen, actions.flatten(1), b.noise.flatten(1), b.sigma, b.sigma_data
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        loss = denoising_error(Network(), *given).mean()
        noisy = (b.actions + b.noise * b.sigma[:, None, None]).flatten(1)
        clean = denoised(Network(), seen, noisy, b.sigma, b.sigma_data)
    assert_agrees(torch.stack(scalings(b.sigma, b.sigma_data)), peer, "scalings", relative=1e-12)
    assert_agrees(loss, peer, "loss", relative=1e-12)
    assert_agrees(torch.autograd.grad(loss, actions)[0], peer, "gradient", relative=1e-12)
    assert_agrees(clean.view_as(b.actions), peer, "denoised", relative=1e-12)
    assert_agrees(noise_levels(b.uniform, b.sigma_data, b.sigma_min, b.sigma_max), peer, "levels")


@pytest.mark.parametrize("place", range(3))
def test_the_sampler_of_beso(place):
    b, (peer,) = inputs_of("beso"), load("beso").peers
    guidance = float(b.guidance[place])
    config = BesoPolicyConfig(2, 3, steps=b.steps, guidance=guidance, encoder=SMALL)
    policy = BesoPolicy.build(config, [""])
    policy.encoder, policy.network = Seen(), Network()
    batch = PolicyInputs(None, b.state[:, None], tuple(str(float(goal)) for goal in b.goal))
    choice = policy.act(batch, torch.Generator(), start=b.noise)
    found = choice.decisions
    np.testing.assert_allclose(found, peer["chunks"][place], rtol=0, atol=16 * FLOAT32)
    np.testing.assert_array_equal(choice.actions, found.clamp(-1, 1))
