"""Real-time chunking against its authors' code and lerobot's."""

import numpy as np
import pytest
import torch

from robotics.policies.base.inpainting import guided_velocity, soft_mask
from tests.golden.numbers import FLOAT32, assert_agrees, inputs_of, load


def test_soft_masks_are_the_authors():
    b, peer = inputs_of("real_time_chunking"), load("real_time_chunking").peers[0]
    chunk = b.previous.shape[1]
    found = np.concatenate([soft_mask([delay], left, chunk) for delay, left in b.cases.tolist()])
    assert_agrees(found, peer, "weights", relative=FLOAT32)
    assert [row[:delay].tolist() for row, (delay, _) in zip(found, b.cases.tolist(), strict=True)] == [
        [1.0] * delay for delay, _ in b.cases.tolist()
    ]


def test_chunks_are_the_authors():
    b, peer = inputs_of("real_time_chunking"), load("real_time_chunking").peers[0]
    shape, chunks = b.previous.shape, []
    for weights in peer["weights"]:
        x = torch.tensor(peer["noise"], dtype=torch.float64)
        weight = torch.tensor(weights, dtype=torch.float64)[:, None]
        for number in range(b.steps):
            sigma = 1 - number / b.steps

            def predict(point, sigma=sigma):
                # the authors' velocity is actions - noise
                return -torch.tanh(point.flatten(1) @ b.mixing + b.observation + 1 - sigma).view(shape)

            x = x - guided_velocity(predict, x, sigma, b.previous, weight, b.limit) / b.steps
        chunks.append(x)
    assert_agrees(torch.stack(chunks), peer, "chunks", relative=1e-9)


def test_guided_velocities_are_those_of_lerobot_where_the_jacobian_is_one():
    b, peer = inputs_of("real_time_chunking"), load("real_time_chunking").peers[1]
    found = []
    for delay, left in b.cases.tolist():
        weight = torch.from_numpy(soft_mask([delay], left, b.previous.shape[1]))[0, :, None]
        given = (b.previous, weight, b.limit)
        found.append([guided_velocity(lambda _: b.constant, b.latents, sigma, *given) for sigma in b.sigmas.tolist()])
    assert_agrees(torch.stack([torch.stack(each) for each in found]), peer, "velocities", relative=1e-5)


@pytest.mark.parametrize("slope", [0.0, 0.7, -0.4])
def test_a_linear_velocity_is_pulled_as_computed_by_hand(slope):
    # v = slope x has A_hat = (1 - sigma slope) x, so J is that number
    x, previous, sigma = torch.tensor([[0.5]]), torch.tensor([[0.2]]), 0.6
    jacobian = 1 - sigma * slope
    weight = (sigma**2 + (1 - sigma) ** 2) / (sigma * (1 - sigma))
    expected = slope * 0.5 - weight * jacobian * 0.25 * (0.2 - jacobian * 0.5)
    found = guided_velocity(lambda point: slope * point, x, sigma, previous, torch.tensor(0.25))
    assert found.item() == pytest.approx(expected, rel=1e-6)
