"""Steps of image samplers, their log-probabilities and ratios, against the papers' own code."""

import pytest
import torch

from diffusion.methods.ddpo import PromptHistory
from diffusion.sampling.schedule import moving_window
from diffusion.sampling.steps import (
    CpsStep,
    DanceSdeStep,
    DdimStep,
    FlowSdeStep,
    flow_grpo_head_kl,
    gaussian_kl,
    guard_log_ratio,
)
from mmrl.core import PolicyOutputs, Rollouts, get
from tests.golden.numbers import PROGRESS, assert_agrees, group_numbers, inputs_of, load, tensor

UPDATES = ("flow_grpo", "flow_grpo_fast", "ddpo", "dance_grpo")
"""Rows whose files hold advantages and loss of an update."""


def agrees(kernel, paper, start, end, prefix="step_", names=("mean", "drawn")):
    """Mean, log-probability of the step's result, and its gradient with respect to the model's output."""
    b, peer = inputs_of(paper), load(paper).peers[0]
    mean_key, drawn_key = names
    velocity = b.velocity.requires_grad_()
    mean, std = kernel.transition(velocity, b.latents, start, end)
    assert_agrees(mean, peer, mean_key, relative=1e-12)
    logp = kernel.log_prob(tensor(peer[drawn_key]), mean, std)
    (gradient,) = torch.autograd.grad(logp.sum(), velocity)
    assert_agrees(logp, peer, f"{prefix}logp")
    assert_agrees(gradient, peer, f"{prefix}gradient", relative=1e-10)
    return std


def test_flow_grpo_steps():
    b, peer = inputs_of("flow_grpo"), load("flow_grpo").peers[0]
    start, end = b.sigmas[b.indices], b.sigmas[b.indices + 1]
    kernel = FlowSdeStep(sigma_max=float(b.sigmas[1]), noise_level=b.noise_level)
    std = agrees(kernel, "flow_grpo", start, end)
    assert_agrees(std / (start - end).sqrt(), peer, "deviation", relative=1e-12)


def test_dance_grpo_steps():
    b, peer = inputs_of("dance_grpo"), load("dance_grpo").peers[0]
    kernel = DanceSdeStep(b.eta)
    velocity = b.velocity.requires_grad_()
    mean, std = kernel.transition(velocity, b.latents, b.sigmas[b.index], b.sigmas[b.index + 1])
    assert_agrees(mean, peer, "mean", relative=1e-12)
    logp = kernel.log_prob(tensor(peer["drawn"]), mean, std)
    (gradient,) = torch.autograd.grad(logp.sum(), velocity)
    # Rounding to float32 moves x and mean (up to 4) by 2^-23 each, and so (x - mean) / std, which is up to 2.
    moved = 2 * 4 * 2**-23 / float(std[0])
    assert_agrees(logp, peer, "step_logp", relative=2 * moved)
    assert_agrees(gradient, peer, "step_gradient", relative=2 * moved)


def test_ddpo_steps():
    b, peer = inputs_of("ddpo"), load("ddpo").peers[0]
    signal, spread = b.alphas.sqrt(), (1 - b.alphas).sqrt()  # before and after each step
    scale = (signal + spread)[:, :, None, None, None]
    noise = b.velocity.requires_grad_()
    clean = (b.latents - spread[:, 0, None, None, None] * noise) / signal[:, 0, None, None, None]
    sigma = spread / (signal + spread)
    kernel = DdimStep(eta=1.0)
    mean, std = kernel.transition(noise - clean, b.latents / scale[:, 0], sigma[:, 0], sigma[:, 1])
    assert_agrees(mean * scale[:, 1], peer, "mean", relative=1e-12)
    logp = kernel.log_prob(tensor(peer["drawn"]) / scale[:, 1], mean, std)
    (gradient,) = torch.autograd.grad(logp.sum(), noise)
    assert_agrees(logp - scale[:, 1].flatten().log(), peer, "step_logp")
    assert_agrees(gradient, peer, "step_gradient", relative=1e-10)


def test_cps_steps():
    b = inputs_of("grpo_guard")
    kernel = CpsStep(b.cps_noise_level)
    (peer,) = load("grpo_guard").peers
    velocity = b.velocity.requires_grad_()
    mean, std = kernel.transition(velocity, b.latents, b.sigmas[:, 0], b.sigmas[:, 1])
    assert_agrees(mean, peer, "cps_mean")
    assert_agrees(std, peer, "cps_deviation")
    logp = kernel.log_prob(tensor(peer["cps_drawn"]), mean, std)
    (gradient,) = torch.autograd.grad(logp.sum(), velocity)
    assert_agrees(logp, peer, "cps_logp")
    assert_agrees(gradient, peer, "cps_gradient")


def test_grpo_guard_ratio_and_loss():
    b, (peer,) = inputs_of("grpo_guard"), load("grpo_guard").peers
    mean = (b.means + 1e-3 * b.moved).requires_grad_()
    std = b.std.reshape(-1, 1, 1, 1)
    drawn = b.means + std * b.noise
    logp, logp_old = (
        torch.distributions.Normal(middle, std).log_prob(drawn).flatten(1).mean(1) for middle in (mean, b.means)
    )
    ratio = guard_log_ratio(logp, logp_old, mean, b.means, b.std)
    # the logarithm of a ratio near 1 keeps 2^-52 of the 1
    torch.testing.assert_close(ratio.detach(), tensor(peer["log_ratio"]), rtol=0, atol=2**-50)
    objective = get("flow_grpo_fast").override({"clip": {"low": b.clip, "high": b.clip}})
    advantage = b.advantage.clamp(-5, 5)
    rollouts = Rollouts(
        group=torch.arange(3),
        mask=torch.ones(3, 1, dtype=torch.float64),
        logp_old=logp_old[:, None],
        reward=torch.zeros(3, dtype=torch.float64),
        advantage=advantage[:, None],
    )
    outputs = PolicyOutputs((logp_old + ratio)[:, None])
    loss = objective.loss(outputs, rollouts, objective.denominators(rollouts)).loss
    (gradient,) = torch.autograd.grad(loss, mean)
    assert_agrees(loss, peer, "loss")
    assert_agrees(gradient, peer, "gradient")
    assert (gradient.flatten(1).abs().sum(1) == 0).any()
    assert (gradient.flatten(1).abs().sum(1) > 0).any()


def test_the_history_of_prompts():
    file = load("ddpo")
    peer = file.peers[0]
    history = PromptHistory(buffer_size=6, min_count=4)
    for rollout, expected in zip(file.inputs["later"], peer["later_advantages"], strict=True):
        found = history.normalise(rollout["prompts"], rollout["reward"])
        torch.testing.assert_close(found, tensor(expected), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("name", UPDATES)
def test_advantages_and_loss_of_an_update(name, number):
    peer = load(name).peers[number]
    b = inputs_of(name, peer)
    objective, logp = get(name).at(PROGRESS), b.logp.requires_grad_()
    rollouts = Rollouts(group_numbers(b.prompts), torch.ones_like(b.logp), b.logp_old, b.reward)
    rollouts = objective.compute_advantages(rollouts)
    # the codes limit advantages in the loss
    limited = tensor(peer["advantage"]).clamp(-5, 5).tolist()
    assert_agrees(rollouts.advantage[:, 0], peer | {"advantage": limited}, "advantage", relative=1e-12)
    means = b.means.requires_grad_() if name == "flow_grpo" else None
    kl = None if means is None else released_kl(means, b.std)
    loss = objective.loss(PolicyOutputs(logp, kl_ref=kl), rollouts, objective.denominators(rollouts)).loss
    gradient = torch.autograd.grad(loss, logp, retain_graph=True)[0]
    assert_agrees(loss, peer, "loss", size=float(gradient.abs().sum()), relative=1e-12)
    assert_agrees(gradient, peer, "gradient", relative=1e-12)
    trained = gradient[rollouts.advantage != 0]
    assert (trained == 0).any()
    assert (trained != 0).any()
    if means is not None:
        assert_agrees(torch.autograd.grad(loss, means)[0][0], peer, "means_gradient", relative=1e-12)


def released_kl(means, std):
    """Flow-GRPO's divergence for three steps whose times are 1 apart, so that sqrt(-dt) is 1."""
    sigma, sigma_next = torch.tensor(1.0, dtype=torch.float64), torch.tensor(0.0, dtype=torch.float64)
    spread = std[:, None].expand(-1, means.shape[1])
    columns = [flow_grpo_head_kl(means[0, :, j], means[1, :, j], spread[j], sigma, sigma_next) for j in range(3)]
    return torch.stack(columns, 1)


def test_flow_dppo_loss():
    b, (peer,) = inputs_of("flow_dppo"), load("flow_dppo").peers
    mean = (b.means + b.moved).requires_grad_()
    std = b.std.reshape(1, 3, 1, 1, 1)
    drawn = b.means + std * b.noise
    logp, logp_old = (
        torch.distributions.Normal(middle, std).log_prob(drawn).flatten(2).mean(2) for middle in (mean, b.means)
    )
    flat = [part.flatten(0, 1) for part in (mean, b.means)]
    divergence = gaussian_kl(*flat, b.std.repeat(6)).view(6, 3)
    objective = get("flow_dppo")
    rollouts = Rollouts(b.group, torch.ones(6, 3, dtype=torch.float64), logp_old, b.reward)
    rollouts = objective.compute_advantages(rollouts)
    assert_agrees(rollouts.advantage[:, 0], peer, "advantage")
    found = objective.loss(PolicyOutputs(logp, kl_old=divergence), rollouts, objective.denominators(rollouts))
    (gradient,) = torch.autograd.grad(found.loss, mean)
    assert_agrees(found.loss, peer, "loss", size=float(rollouts.advantage.abs().mean()))
    assert_agrees(gradient, peer, "gradient", relative=1e-11)
    metrics = {"divergence_old": "divergence", "clip_fraction_high": "above", "clip_fraction_low": "below"}
    for own, theirs in metrics.items():
        assert_agrees(found.metrics[f"policy/{own}"].value, peer, theirs)
    assert peer["above"] > 0
    assert peer["below"] > 0


def test_places_of_mix_grpo():
    file = load("mix_grpo")
    mix, unirl = file.peers
    for case, starts in zip(file.inputs["first_rounds"], mix["starts"], strict=True):
        found = [moving_window(done, low=0, **case) for done in range(len(starts) + 1)]
        assert [window.start for window in found] == [*starts, 0]
        assert {len(window) for window in found} == {case["size"]}
    for case, windows in zip(file.inputs["rounds"], unirl["windows"], strict=True):
        places = {"low": case["low"], "high": case["steps"], "schedule": "progressive", "restart": case["restart"]}
        sizes = {name: case[name] for name in ("size", "every", "stride")}
        assert [[*moving_window(done, **places, **sizes)] for done in range(len(windows))] == windows


@pytest.mark.parametrize("peer", load("step_nft").peers, ids=["row", "others"])
def test_ranked_steps_of_pi_step_nft(peer):
    b = inputs_of("step_nft")
    times = torch.linspace(1, 0, b.steps + 1, dtype=torch.float64)
    kernel = FlowSdeStep(float(times[1]), b.noise_level)
    velocity = (b.velocity_old + b.moved).requires_grad_()
    given = (b.latents, times[b.place], times[b.place + 1])
    (mean, std), (old, _) = (kernel.transition(v, *given) for v in (velocity, b.velocity_old))
    assert_agrees(std, peer, "std")
    std = (std.square() + 1e-4).sqrt()  # the floor of the code
    reached = torch.tensor(peer["reached"], dtype=torch.float64)
    logp, logp_old = (kernel.log_prob(reached, middle, std)[:, None] for middle in (mean, old))
    objective, mask = get("step_nft").override(peer.get("changes", {})), torch.ones(6, 1, dtype=torch.float64)
    rollouts = objective.compute_advantages(Rollouts(b.group, mask, logp_old.detach(), b.reward))
    assert_agrees(rollouts.advantage[:, 0], peer, "advantage")
    outputs = PolicyOutputs(logp, kl_old=gaussian_kl(mean, old, std)[:, None])
    found = objective.loss(outputs, rollouts, objective.denominators(rollouts))
    (gradient,) = torch.autograd.grad(found.loss, velocity)
    assert_agrees(found.loss, peer, "loss")
    assert_agrees(gradient, peer, "gradient", relative=1e-11)
