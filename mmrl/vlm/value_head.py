"""The critic: a small network from the model's last state to a value."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from mmrl.vlm.model_config import CriticSettings


def make_value_head(width: int, settings: CriticSettings) -> nn.Module:
    """A critic from (M, H) to (M, 1) in float32, whatever the model's precision is.

    Its last layer starts at zero: every value is 0 at first, so that the first advantages are plain returns.
    """
    sizes = [width, *settings.hidden]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        hidden = [nn.Linear(before, after) for before, after in itertools.pairwise(sizes)]
    last = nn.Linear(sizes[-1], 1)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    layers = [part for linear in hidden for part in (linear, nn.ReLU())]
    return (nn.Sequential(*layers, last) if layers else last).float()
