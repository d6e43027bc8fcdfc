import math

import torch

from robotics.policies.base.encoder import octave_code, octave_size


def test_octaves():
    found = octave_code(torch.tensor([[0.25, -0.5]], dtype=torch.float64), 2)
    expected = [
        number
        for x in (0.25, -0.5)
        for number in (x, *(f(math.pi * k * x) for f in (math.sin, math.cos) for k in (1, 2)))
    ]
    assert found.shape == (1, octave_size(2, 2))
    torch.testing.assert_close(found[0], torch.tensor(expected, dtype=torch.float64))
