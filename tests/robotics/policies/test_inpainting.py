"""Policies that continue a running chunk."""

import numpy as np
import pytest
import torch

from mmrl.errors import UserError
from robotics.policies.base.inpainting import RunningChunk, blend, check_inpaints, guided_velocity
from robotics.policies.lerobot.service import FlowService
from tests.robotics.policies.builders import B, D, K, draw, make_flow, make_gaussian, make_inputs, make_small

DELAY = torch.tensor([2, 1, 0])


def running(left=3, **changes):
    actions = torch.rand(B, left, D, generator=torch.Generator().manual_seed(7)) - 0.5
    return RunningChunk(actions, DELAY, **changes)


def test_without_a_running_chunk_nothing_changes():
    policy = make_flow(steps=5)
    plain = draw(policy, greedy=True)
    # a running chunk of weight 0 adds 0 to every velocity
    nothing = RunningChunk(torch.zeros(B, 1, D), torch.zeros(B, dtype=torch.long), limit=1e-30)
    assert torch.equal(draw(policy, greedy=True, previous=None).decisions, plain.decisions)
    assert torch.equal(draw(policy, greedy=True, previous=nothing).decisions, plain.decisions)


@pytest.mark.parametrize("options", [{}, {"noise": "learned"}])
def test_fixed_actions_agree_better_than_those_of_a_free_chunk(options):
    policy, given = make_flow(steps=5, **options), running()
    free, guided = draw(policy, greedy=True), draw(policy, greedy=True, previous=given)
    for row, delay in enumerate(DELAY.tolist()):
        before, after = (
            float((choice.actions[row, :delay] - given.actions[row, :delay]).abs().sum()) for choice in (free, guided)
        )
        assert after < 0.5 * before or not delay
    assert bool(guided.logp.isnan().all())
    assert not any(weight.grad is not None for weight in policy.parameters())


def test_a_policy_that_knows_one_way_only_is_not_bent():
    # its estimate of the actions does not depend on the noise, so the Jacobian is 0
    policy = make_flow(steps=5, parameterisation="x0")
    with torch.no_grad():
        policy.velocity.leave.weight.zero_()
        policy.velocity.leave.bias.fill_(0.3)
    free, guided = draw(policy, greedy=True), draw(policy, greedy=True, previous=running())
    torch.testing.assert_close(guided.actions, free.actions, atol=1e-5, rtol=0)


def test_rows_are_guided_by_their_own_chunks():
    policy, given = make_flow(steps=5), running()
    batch, both = make_inputs(), draw(policy, greedy=True, start=torch.zeros(B, K, D), previous=given)
    for row in range(B):
        alone = RunningChunk(given.actions[row : row + 1], given.delay[row : row + 1])
        start = torch.zeros(1, K, D)
        single = draw(policy, batch.select([row]), greedy=True, start=start, previous=alone)
        torch.testing.assert_close(single.actions[0], both.actions[row], atol=1e-5, rtol=1e-5)


def test_a_weight_above_the_number_of_steps_would_overshoot():
    policy = make_flow(steps=3)
    most, more = (draw(policy, greedy=True, previous=running(limit=limit)) for limit in (3.0, 50.0))
    assert torch.equal(most.decisions, more.decisions)
    less = draw(policy, greedy=True, previous=running(limit=2.0))
    assert not torch.equal(most.decisions, less.decisions)


def test_running_chunks_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"delay is \[4\]; must be in 0..3"):
        RunningChunk(torch.zeros(1, 3, D), torch.tensor([4]))
    with pytest.raises(ValueError, match="must be"):
        RunningChunk(torch.zeros(2, 3, D), torch.tensor([0]))
    with pytest.raises(ValueError, match="the policy's chunks are"):
        draw(make_flow(), previous=RunningChunk(torch.zeros(B, K + 1, D), DELAY))


@pytest.mark.parametrize("make", [make_small, make_gaussian])
def test_policies_without_a_flow_refuse(make):
    policy = make()
    with pytest.raises(UserError, match=rf"kind {policy.kind} cannot inpaint .* Blend overlapping chunks"):
        check_inpaints(policy)
    check_inpaints(make_flow())


def test_blending_by_hand():
    before, chunk = np.full((1, 2, 1), 1.0, np.float32), np.zeros((1, 4, 1), np.float32)
    share = 1 / 2  # (n - i) / (n - d + 1) at i = d = 1, n = 2
    weight = share * np.expm1(share) / np.expm1(1)
    np.testing.assert_allclose(blend(before, chunk, [1])[0, :, 0], [1, weight, 0, 0], rtol=1e-6)


def test_steps_in_the_process_of_lerobot_are_guided_alike():
    width, steps, limit = 3, 4, 4.0
    draws = torch.Generator().manual_seed(0)
    mixing = torch.randn(width, width, generator=draws)
    previous, noise = torch.randn(B, K, width, generator=draws), torch.randn(B, steps + 1, K, width, generator=draws)
    weights = torch.rand(B, K, width, generator=draws)

    def denoise(point, time):
        return torch.tanh(point @ mixing) + time[:, None, None]

    service = FlowService.__new__(FlowService)
    service._device, service._finished = "cpu", lambda chunk: chunk.numpy()
    service._predict = lambda fields, arrays, integrate: integrate(denoise)
    sigmas = [1 - step / steps for step in range(steps)]
    arrays = {
        "noise": noise.numpy(),
        "table": np.array([[sigma, 1.0, -1 / steps, 0.0] for sigma in sigmas], np.float32),
        "previous": previous.numpy(),
        "weights": weights.numpy(),
    }
    with torch.no_grad():
        found = service._sample({"limit": limit}, arrays)
        x = noise[:, 0]
        for sigma in sigmas:
            at = torch.full((B,), sigma)
            x = x - guided_velocity(lambda point, at=at: denoise(point, at), x, sigma, previous, weights, limit) / steps
    torch.testing.assert_close(torch.from_numpy(found["actions"]), x, atol=1e-5, rtol=1e-5)
