"""Runs in float64."""

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.contracts.double import in_double


def test_what_asks_for_float32_or_has_read_it_gets_float64(tmp_path):
    file, saved = tmp_path / "weights.safetensors", {"weight": torch.rand(3)}
    save_file(saved, file)
    weight = nn.Parameter(torch.ones(2))
    with in_double():
        made = torch.zeros(2, dtype=torch.float32), torch.ones(2, dtype=torch.int32).float(), torch.rand(2)
        read = torch.from_numpy(np.ones(2, np.float32))
        loaded = load_file(file)["weight"]
        layer = nn.Linear(2, 1)
        layer(read * weight).sum().backward()
    assert {each.dtype for each in (*made, loaded, layer.weight, layer.weight.grad)} == {torch.float64}
    assert loaded.float().equal(saved["weight"])
    assert torch.zeros(2).dtype is torch.float32
