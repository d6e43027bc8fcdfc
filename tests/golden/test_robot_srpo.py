"""SRPO's progress reward and loss against siiRL."""

import numpy as np
import torch

from mmrl.core import PolicyOutputs, Rollouts, get
from robotics.methods.progress import ProgressSettings, progress_rewards
from tests.golden.numbers import assert_agrees, inputs_of, load


def test_progress_rewards_are_those_of_the_public_code():
    file = load("srpo")
    (peer,) = file.peers
    latents = np.array(file.inputs["embedding"])
    valid = (latents != 0).any(1)
    settings = ProgressSettings(preset="published")
    found = progress_rewards(latents, np.array(file.inputs["success"]), valid, file.inputs["task"], settings)
    assert found.reward.dtype == np.float32
    np.testing.assert_allclose(found.reward, np.array(peer["progress"], np.float32), rtol=2**-23)
    expected = np.array([np.nan if x is None else x for x in peer["distance"]], np.float32)
    np.testing.assert_allclose(found.distance, expected, rtol=2**-23)


def test_the_loss_is_that_of_the_public_code():
    b, (peer,) = inputs_of("srpo"), load("srpo").peers
    objective, logp = get("srpo"), b.logp.requires_grad_()
    rollouts = objective.compute_advantages(Rollouts(b.group, b.mask, b.logp_old, b.reward))
    torch.testing.assert_close(rollouts.advantage, b.advantage, rtol=1e-12, atol=1e-12)
    loss = objective.loss(PolicyOutputs(logp), rollouts, objective.denominators(rollouts)).loss
    (gradient,) = torch.autograd.grad(loss, logp)
    assert_agrees(loss, peer, "loss", size=float(gradient.abs().sum()))
    assert_agrees(gradient, peer, "gradient")
