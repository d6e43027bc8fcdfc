"""Positional encodings of query points against their formulas and against the released code, written out at a small
size.
"""

import math

import pytest
import torch

from robotics.flow3d.model.context import CODE_SIZE, clip_places, corrected_code, repo_code, scrambled_places


def released_table(rows, columns, depths, size):
    """The public code as it stands: `dim //  - 1`, and the reshape to rows, columns, depths."""
    z, y, x = torch.meshgrid(torch.arange(depths), torch.arange(rows), torch.arange(columns), indexing="ij")
    fourier_dim = size // 6
    omega = torch.arange(fourier_dim) / (size // -1)
    omega = 1.0 / (10000**omega)
    z, y, x = (axis.flatten()[:, None] * omega[None, :] for axis in (z, y, x))
    code = torch.cat((x.sin(), x.cos(), y.sin(), y.cos(), z.sin(), z.cos()), dim=1)
    return code.reshape(rows, columns, depths, size)


def test_corrected_code_is_the_formula():
    u, v, z = 17.25, 200.0, 63.5
    found = corrected_code(torch.tensor([u, v, z], dtype=torch.float64))
    assert found.shape == (CODE_SIZE,)
    rates = [10000 ** (-k / 11) for k in range(12)]
    expected = [wave(x * w) for x in (u, v, z) for wave in (math.sin, math.cos) for w in rates]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-4)
    assert rates[-1] == pytest.approx(1e-4)


def test_repo_code_is_the_released_table():
    rows, columns, depths, size = 5, 4, 3, 12
    table = released_table(rows, columns, depths, size)
    u, v, z = (axis.flatten() for axis in torch.meshgrid(*map(torch.arange, (columns, rows, depths)), indexing="ij"))
    places = torch.stack([u, v, z], -1)
    found = repo_code(places.float() + 0.4, size, (rows, columns, depths))
    torch.testing.assert_close(found, table[v, u, z], rtol=0, atol=1e-5)
    assert len(torch.unique(scrambled_places(places, (rows, columns, depths)), dim=0)) == rows * columns * depths


def test_the_scramble_at_full_size_by_hand():
    # n = (2 * 224 + 100) * 128 + 7 = 70151; z' = 70151 // 50176 = 1, v' = (70151 // 224) % 224 = 89, u' = 70151 % 224
    assert scrambled_places(torch.tensor([[100.9, 2.0, 7.0]])).tolist() == [[39, 89, 1]]
    assert scrambled_places(torch.tensor([[500.0, -3.0, 200.0]])).tolist() == [
        scrambled_places(torch.tensor([[223, 0, 127]])).tolist()[0]
    ]


def test_places_of_clip():
    points = torch.tensor([[-1.0, 1.0, 1.0], [0.0, -0.5, -1.0]])
    assert clip_places(points).tolist() == [[0.0, 224.0, 127.0], [112.0, 56.0, 0.0]]
