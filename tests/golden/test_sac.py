"""Soft actor-critic against Stable-Baselines3, torch, TorchRL, REDQ and RLPD."""

import math

import numpy as np
import torch

from robotics.offpolicy.sac_losses import (
    actor_loss,
    critic_loss,
    discounted_rewards,
    polyak_,
    soft_targets,
    soft_values,
    subset_min,
    temperature_loss,
)
from robotics.offpolicy.transitions import Experience, TransitionForm, prior_count
from robotics.policies.squashed import score_squashed
from tests.golden.numbers import FLOAT32, assert_agrees, inputs_of, load

B = inputs_of("sac")
PEERS = load("sac").peers


def peer_with(key):
    return next(peer for peer in PEERS if key in peer)


def test_the_density_of_a_squashed_gaussian_is_exact_in_the_tails():
    before = B.mean + B.log_std.exp() * B.noise
    found = score_squashed(before, B.mean, B.log_std)
    torch_peer, torchrl = (peer for peer in PEERS if "density" in peer)
    assert_agrees(found, torch_peer, "density")
    assert_agrees(found[:3], torchrl, "density")
    # float32, as in training
    low = score_squashed(before.float(), B.mean.float(), B.log_std.float())
    assert_agrees(low, torch_peer, "density", relative=8 * FLOAT32)


def test_the_density_of_stable_baselines3_lacks_nats_in_the_tails():
    """A documented difference: 1e-6 in the slope of tanh. With it, our formula gives their numbers."""
    before = B.mean + B.log_std.exp() * B.noise
    peer = peer_with("density_eps")
    normal = torch.distributions.Normal(B.mean, B.log_std.exp()).log_prob(before).sum(1)
    slope = 1 - before.tanh().square()
    assert_agrees(normal - (slope + 1e-6).log().sum(1), peer, "density_eps")
    apart = score_squashed(before, B.mean, B.log_std) - torch.tensor(peer["density_eps"])
    assert float(apart[:3].abs().max()) < 2e-5
    assert float(apart[3:].min()) > 10


def test_an_update_of_stable_baselines3():
    peer = peer_with("critic_loss")
    q, actor_q = B.q.clone().requires_grad_(), B.actor_q.clone().requires_grad_()
    logp = B.logp.clone().requires_grad_()
    terminated = torch.tensor([end in ("terminated", "both") for end in B.ends])
    value = soft_values(subset_min(B.next_q, 0), B.next_logp, B.alpha)
    steps = torch.ones(len(B.ends), dtype=torch.int64)
    targets = soft_targets(B.rewards[:, None], steps, terminated, value, B.gamma)
    loss = critic_loss(q, targets)
    assert_agrees(loss, peer, "critic_loss")
    loss.backward()
    assert_agrees(q.grad, peer, "q_gradient")
    actor = actor_loss(actor_q.min(0).values, logp, B.alpha)
    assert_agrees(actor, peer, "actor_loss")
    actor.backward()
    assert_agrees(actor_q.grad, peer, "actor_q_gradient")
    assert_agrees(logp.grad, peer, "logp_gradient")
    log_alpha = torch.tensor([math.log(B.alpha)], dtype=torch.float64, requires_grad=True)
    temperature = temperature_loss(log_alpha, B.logp, B.target_entropy)
    assert_agrees(temperature, peer, "temperature_loss")
    optimizer = torch.optim.Adam([log_alpha], lr=3e-4)
    temperature.backward()
    optimizer.step()
    assert_agrees(log_alpha, peer, "log_alpha")


def test_windows_cut_by_the_end_of_an_episode_are_discounted_by_their_steps():
    peer = peer_with("window_return")
    size, count = B.window, len(B.window_rewards)
    # episodes of 4 and 3 steps
    steps = torch.tensor([min(size, end - start) for start, end in zip(range(count), [4] * 4 + [7] * 3, strict=True)])
    padded = torch.cat([B.window_rewards, torch.full((size,), math.nan, dtype=torch.float64)])
    rewards = torch.stack([padded[start : start + size] for start in range(count)])
    assert_agrees(discounted_rewards(rewards, steps, B.gamma), peer, "window_return")
    done = torch.tensor(peer["window_done"], dtype=torch.bool)
    value = torch.full((count,), 5.0, dtype=torch.float64)
    found = soft_targets(rewards, steps, done, value, B.gamma)
    expected = torch.tensor(peer["window_return"]) + torch.tensor(peer["window_discount"]) * 5.0 * ~done
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_a_window_of_an_episode_ends_as_in_the_buffer_of_stable_baselines3():
    """The truncated episode goes on in the value of its last observation; the terminated one does not."""
    peer = peer_with("window_done")
    found = []
    for length, terminated in ((4, False), (3, True)):
        zeros = np.zeros((length + 1, 1), np.float32)
        parts = (zeros[:-1, None], np.zeros((length, 1)), np.ones(length, np.int32))
        episode = Experience(zeros, zeros[:, :0], *parts, 0, "", terminated, False)
        ends = episode.records(TransitionForm(1, 0, 1, 1))["terminated"]
        found += [float(ends[start : start + B.window].any()) for start in range(length)]
    assert found == peer["window_done"]


def test_polyak_average():
    weights = [B.weights_target.clone()]
    polyak_(weights, [B.weights], B.tau)
    assert_agrees(weights[0], peer_with("moved"), "moved")


def test_redq_target_and_actor():
    peer = peer_with("subset")
    chosen = B.many_q[torch.tensor(peer["subset"])]
    terminated = torch.tensor([False, True, False, True])
    value = soft_values(subset_min(chosen, 0), B.next_logp, B.alpha)
    steps = torch.ones(4, dtype=torch.int64)
    assert_agrees(soft_targets(B.rewards[:, None], steps, terminated, value, B.gamma), peer, "subset_targets")
    many = B.many_q.clone().requires_grad_()
    loss = actor_loss(many.mean(0), B.logp, B.alpha)
    assert_agrees(loss, peer, "mean_actor_loss")
    loss.backward()
    assert_agrees(many.grad, peer, "mean_actor_gradient")


def test_a_subset_is_drawn_without_replacement_for_the_whole_batch():
    generator = torch.Generator().manual_seed(0)
    pairs = {torch.minimum(B.many_q[i], B.many_q[j]).numpy().tobytes() for i in range(10) for j in range(10) if i != j}
    drawn = {subset_min(B.many_q, 2, generator).numpy().tobytes() for _ in range(400)}
    assert drawn <= pairs
    assert len(drawn) == len(pairs)
    assert torch.equal(subset_min(B.many_q, 10), B.many_q.min(0).values)


def test_half_of_each_batch_of_rlpd_is_prior_data():
    peer = peer_with("prior_rows")
    # its batches for several updates are cut into slices with the same share, if the batch is even
    assert prior_count(256, 0.5) == peer["prior_rows"][0][0]
    # an odd batch changes sides from slice to slice there; here the rest is the run's own
    assert prior_count(7, 0.5) == peer["prior_rows"][1][0]
    assert [prior_count(6, ratio) for ratio in (0.0, 0.25, 1.0)] == [0, 2, 6]


def test_gradients_stay_where_they_belong():
    value = torch.zeros(4, requires_grad=True)
    steps, terminated = torch.ones(4, dtype=torch.int64), torch.zeros(4, dtype=torch.bool)
    targets = soft_targets(torch.zeros(4, 1), steps, terminated, value, 0.9)
    assert not targets.requires_grad
    logp = torch.zeros(4, requires_grad=True)
    log_alpha = torch.zeros((), requires_grad=True)
    temperature_loss(log_alpha, logp, -1.0).backward()
    assert logp.grad is None
    # log alpha, and not alpha, multiplies the gap: its gradient does not vanish with alpha
    assert float(log_alpha.grad) == 1.0
