"""HNPG by its public code: conjugate gradients, and natural-gradient steps of a Gaussian policy.

The actions of each state are the points of a Gauss-Hermite quadrature with three points, repeated by their weights
(1, 4, 1), so that the Fisher matrix of the sampled actions is the second derivative of the KL, which the code takes."""

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from tests.golden.make.peers import Clone, Made, numbers, tensors

STEPS, TOOLS, GRADIENTS = "trpo.py", "utils.py", "conjugate_gradients.py"
POINTS = [-math.sqrt(3), 0.0, 0.0, 0.0, 0.0, math.sqrt(3)]


class Gaussian(nn.Module):
    """A mean from one hidden layer and a standard deviation of its own, of actions of one number."""

    def __init__(self, inputs: SimpleNamespace) -> None:
        super().__init__()
        names = ("first", "bias", "second", "log_std")
        for name in names:
            self.register_parameter(name, nn.Parameter(getattr(inputs, name).clone()))

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean = torch.tanh(states @ self.first + self.bias) @ self.second
        log_std = self.log_std.expand_as(mean)
        return mean, log_std, log_std.exp()


def make(path: str) -> Made:
    torch.set_default_dtype(torch.float64)
    clone = Clone(path, "YifeiZhou02/HNPG", "7d7ace151c379497b0acc249ce8457b4e17b860d")
    inputs: dict[str, Any] = {
        "first": numbers(1, 2, 3),
        "bias": numbers(2, 3),
        "second": numbers(3, 3, 1),
        "log_std": [[-0.4]],
        "states": numbers(4, 7, 2, low=-2, high=2),
        "points": POINTS,
        "advantage": numbers(5, 42, low=-1, high=2),
        "damping": 0.1,
        "max_kl": [0.01, 3.0],
        "matrix": (torch.tensor(numbers(6, 5, 5)) @ torch.tensor(numbers(6, 5, 5)).T + 0.3 * torch.eye(5)).tolist(),
        "target": numbers(7, 5),
    }
    b = tensors(inputs)
    peer = {"program": clone.name, "calls": [f"{STEPS}:update_policy", f"{STEPS}:conjugate_gradients"]}
    peer |= {"relative": 1e-7, "because": "a central difference is compared with a second derivative"}
    peer |= {"solved": solver(clone)(lambda v: b.matrix @ v, b.target, 3)}
    found = [step(clone, b, max_kl) for max_kl in inputs["max_kl"]]
    return "HNPG, arXiv 2311.08384", inputs, [peer | {"step": torch.stack(found)}], clone


def solver(clone: Clone) -> Any:
    return clone.function(STEPS, "conjugate_gradients")


def step(clone: Clone, b: SimpleNamespace, max_kl: float) -> Tensor:
    """The step that the authors' code adds to the weights, as one vector."""
    policy, same = Gaussian(b), lambda x: x
    flat = {name: clone.function(TOOLS, name) for name in ("get_flat_params_from", "set_flat_params_to")}
    density = clone.function(TOOLS, "normal_log_density", math=math)
    names = {**flat, "Variable": same, "conjugate_gradients": solver(clone)}
    names |= {"linesearch": clone.function(STEPS, "linesearch", **flat)}
    names = {"trpo_step": clone.function(STEPS, "trpo_step", **names), "Variable": same, "normal_log_density": density}
    states = b.states.repeat_interleave(len(b.points), 0)
    mean, _, std = policy(states)
    actions = (mean + std * b.points.repeat(len(b.states))[:, None]).detach()
    before = flat["get_flat_params_from"](policy).clone()
    update = clone.function(STEPS, "update_policy", **names)
    update(policy, states, actions, b.advantage[:, None], max_kl, float(b.damping), "cpu")
    return flat["get_flat_params_from"](policy) - before
