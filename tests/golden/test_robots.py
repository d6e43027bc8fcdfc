"""Action tokens against OpenVLA, the temporal ensemble against ACT, and learned noise against RLinf."""

import math

import numpy as np
import torch

from robotics.episodes.collect import TemporalEnsemble
from robotics.policies.base.action_tokens import ActionTokenizer
from tests.golden.numbers import FLOAT32, assert_agrees, inputs_of, load
from tests.robotics.policies.builders import make_flow


def test_openvla_tokens():
    file = load("openvla")
    (peer,) = file.peers
    tokenizer = ActionTokenizer()
    first_id = file.inputs["vocabulary"] - tokenizer.bins
    indices = tokenizer.encode(np.array(file.inputs["actions"]))
    assert (first_id + indices).tolist() == peer["ids"]
    found = tokenizer.decode(np.array(peer["ids"]) - first_id)
    assert found.tolist() == np.array(peer["decoded"], np.float32).tolist()


def test_act_ensemble():
    file = load("act")
    chunks = np.array(file.inputs["chunks"])
    steps, chunk, size = chunks.shape
    ensemble = TemporalEnsemble(1, chunk, size, decay=0.01)
    found = np.stack([ensemble.step(chunks[t : t + 1], [0])[0] for t in range(steps)])
    assert_agrees(found, file.peers[0], "actions", relative=FLOAT32)


def test_flow_noise_of_rlinf():
    b, (peer,) = inputs_of("flow_noise"), load("flow_noise").peers
    low, high = b.bounds.tolist()
    rows = len(b.latents)
    policy = make_flow(noise="learned", min_std=low, max_std=high, steps=4, logp_reduction="mean")
    assert policy.sigmas[1:3].tolist() == [b.sigma, b.sigma_next]

    class Velocity(torch.nn.Module):
        def hidden(self, seen, latents, sigma):
            return b.head.flatten(1).float()

        def leave(self, hidden):
            return b.velocity.flatten(1)

    policy.velocity, policy.noise.layers = Velocity(), torch.nn.Identity()
    mean, std = policy._transition(torch.zeros(rows, 1), b.latents.flatten(1), 1)
    assert_agrees(mean.view_as(b.latents), peer, "mean")
    assert_agrees(std.view_as(b.latents), peer, "std")
    logp = np.array(peer["logp"]).reshape(rows, -1).mean(1)
    found = policy._score(b.following.flatten(1), mean, std)
    np.testing.assert_allclose(found.detach().numpy(), logp, rtol=1e-5)
    entropy = 0.5 * math.log(2 * math.pi * math.e) + std.log()
    assert_agrees(entropy.view_as(b.latents), peer, "entropy")
