"""PROPS: the correction of a behaviour policy by the authors' code."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from tests.golden.make.peers import Clone, Made, doubles, numbers, tensors

COMMIT = "d5d91bd48b209bebe945c61b2a6b31f71cb71436"
FILE = "ppo_discrete.py"
ROWS, ENTRIES, ACTIONS = 12, 3, 4
# the second is stopped by its divergence, and the third has decisions beyond the clip
SETTINGS = (
    {"learning_rate": 1e-3, "epochs": 16, "clip": 0.3, "kl": 0.1, "max_grad_norm": 0.5},
    {"learning_rate": 0.05, "epochs": 16, "clip": 0.3, "kl": 0.02, "max_grad_norm": 0.5},
    {"learning_rate": 0.1, "epochs": 12, "clip": 0.1, "kl": None, "max_grad_norm": 0.05},
)


class Agent(nn.Module):
    """A linear policy of discrete actions."""

    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        self.weights = nn.Parameter(weights.clone())

    def get_action_and_value(self, states: Tensor, actions: Tensor) -> tuple[Any, Tensor, Any, Any]:
        logp = (states @ self.weights).log_softmax(-1)
        return None, logp.gather(1, actions[:, None]).squeeze(1), None, None


def make(path: str) -> Made:
    clone = Clone(path, "NicholasCorrado/PROPS", COMMIT)
    inputs: dict[str, Any] = {
        "states": numbers(0, ROWS, ENTRIES),
        "weights": numbers(1, ENTRIES, ACTIONS),
        "actions": [0, 1, 2, 3, 0, 0, 0, 1, 0, 2, 0, 0],
    }
    return "PROPS, arXiv 2311.08290", inputs, [corrected(clone, inputs, settings) for settings in SETTINGS], clone


def corrected(clone: Clone, inputs: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    b = tensors(inputs)
    agent = Agent(b.weights)
    with torch.no_grad():
        logp = agent.get_action_and_value(b.states, b.actions)[1]
    args = SimpleNamespace(
        props_num_minibatches=1,
        props_update_epochs=settings["epochs"],
        props_clip_coef=settings["clip"],
        props_target_kl=settings["kl"],
        max_grad_norm=settings["max_grad_norm"],
    )
    optimizer = torch.optim.Adam(agent.parameters(), lr=settings["learning_rate"], eps=1e-5)
    with doubles():
        logs = clone.function(FILE, "props_update", nn=nn)(agent, optimizer, b.states, b.actions, logp, args)
    return {
        "program": clone.name,
        "calls": [f"{FILE}:props_update"],
        "relative": 1e-12,
        "settings": settings,
        "weights": agent.weights.detach(),
        "updates": logs["props/minibatch"],
        "loss": logs["props/policy_loss"],
        "kl": logs["props/approx_kl"],
    }
