"""Critics of states and chunks of actions, all of them in one batched network.

Shapes: E critics, B rows, S entries of the critic's state, K control steps, D entries of an action, W width.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from robotics.policies.base.action_statistics import MOVES, STATE_LIMIT, StateStatistics


class QEnsemble(nn.Module):
    """E perceptrons from a state and a chunk of actions to a value; equal in form, different in weights.

    Each hidden layer is linear, then, with `norm`, layer normalisation, then ReLU. The state is standardised, actions
    are not: they are in -1..1.

    Args:
        state_size: S.
        action_size: K * D.
        critics: E.
        width: W of each hidden layer.
        layers: number of hidden layers.
        norm: whether to normalise the hidden layers, which bounds values far from the data.
        seed: of the weights; the global generator is not used.

    Source: layer normalisation of critics: RLPD, arXiv 2302.02948, section 4.2.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        state_size: int,
        action_size: int,
        critics: int = 2,
        width: int = 256,
        layers: int = 2,
        norm: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.critics = critics
        self.norm = norm
        generator = torch.Generator().manual_seed(seed)
        sizes = [state_size + action_size, *[width] * layers, 1]
        self.weights = nn.ParameterList()
        self.biases = nn.ParameterList()
        for inputs, outputs in pairwise(sizes):
            # as in nn.Linear
            limit = 1 / math.sqrt(inputs)
            for part, shape in ((self.weights, (critics, inputs, outputs)), (self.biases, (critics, 1, outputs))):
                part.append(nn.Parameter(torch.empty(shape).uniform_(-limit, limit, generator=generator)))
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(critics, 1, width)) for _ in range(layers * norm))
        self.shifts = nn.ParameterList(nn.Parameter(torch.zeros(critics, 1, width)) for _ in range(layers * norm))
        self.register_buffer("mean", torch.zeros(state_size))
        self.register_buffer("std", torch.ones(state_size))

    def scale_states(self, statistics: StateStatistics) -> None:
        """Standardise states by these statistics from now on."""
        self.mean.copy_(torch.as_tensor(statistics.mean))
        # an entry that never varied is only centred
        std = torch.as_tensor(statistics.std)
        self.std.copy_(std.where(std > MOVES, 1.0))

    def forward(self, states: Tensor, actions: Tensor) -> Tensor:
        """Values (E, B) of states (B, S) and actions (B, K, D).

        Gradient: into all weights and the actions.
        """
        scaled = ((states - self.mean) / self.std).clamp(-STATE_LIMIT, STATE_LIMIT)
        hidden = torch.cat([scaled, actions.flatten(1)], 1).expand(self.critics, -1, -1)
        last = len(self.weights) - 1
        for number, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            hidden = torch.baddbmm(bias, hidden, weight)
            if number == last:
                break
            if self.norm:
                hidden = layer_norm(hidden, hidden.shape[-1:]) * self.scales[number] + self.shifts[number]
            hidden = hidden.relu()
        return hidden.squeeze(-1)
