"""ArCHer by its public code: losses of critics and actor with their gradients, the average's move."""

from types import SimpleNamespace
from typing import Any

import torch

from tests.golden.make.peers import Clone, Made, numbers, tensors

FILE = "archer/algorithms/archer/trainer.py"
AGENT = "archer/models/archer_agent.py"


def make(path: str) -> Made:
    clone = Clone(path, "YifeiZhou02/ArCHer", "7c771a7610cb34e54ba53d69d1fb7337103e5648")
    inputs: dict[str, Any] = {
        "q": numbers(1, 2, 6, low=-1, high=2),
        "v": numbers(2, 2, 6, low=-1, high=2),
        "own_q": numbers(3, 2, 6, low=-1, high=2),
        "next_v": numbers(4, 2, 6, low=-1, high=2),
        "reward": [0.0, 0.0, 1.0, 0.0, 0.5, 0.0],
        "done": [0.0, 0.0, 1.0, 0.0, 0.0, 1.0],
        "gamma": 0.95,
        "tau": 0.1,
        "token_logp": numbers(5, 6, 3, low=-3, high=0),
        "weights": numbers(6, 4, low=-1, high=1),
        "averages": numbers(7, 4, low=-1, high=1),
    }
    peer = {"program": clone.name, "calls": [f"{FILE}:ArcherTrainer", f"{AGENT}:ArcherAgent"], "relative": 1e-6}
    peer |= {"because": "rewards pass through float32", **losses(clone, tensors(inputs))}
    return "ArCHer, arXiv 2402.19446", inputs, [peer], clone


def losses(clone: Clone, b: SimpleNamespace) -> dict[str, Any]:
    for leaf in (b.q, b.v, b.token_logp):
        leaf.requires_grad_()
    held = {"before": (b.own_q, b.own_q), "after": (b.next_v, b.next_v)}
    agent = SimpleNamespace(
        model=SimpleNamespace(device="cpu", dtype=torch.float64),
        critic=lambda *_, **__: (*b.q, *b.v),
        target_critic=lambda observation, *_, **__: (*held[observation][0], *held[observation][1]),
        get_action=lambda _: None,
        get_log_prob=lambda *_: b.token_logp.sum(1),
    )
    kind = clone.function(FILE, "ArcherTrainer", copy=__import__("copy"), Tuple=tuple)
    trainer = kind.__new__(kind)
    trainer.agent, trainer.gamma, trainer.criterion = agent, float(b.gamma), torch.nn.MSELoss()
    trainer.accelerator = SimpleNamespace(unwrap_model=lambda x: x, backward=lambda loss: loss.backward())
    given = {"reward": b.reward.tolist(), "done": b.done.tolist(), "mc_return": None, "action": None}
    found = trainer.critic_loss(observation="before", next_observation="after", **given)
    loss = sum(float(found[f"{head}.loss"]) for head in ("q1", "q2", "v1", "v2"))
    advantage = torch.minimum(*b.own_q) - torch.minimum(*b.v.detach())  # as in ArcherTrainer.update
    actor = trainer.actor_loss(None, None, advantage.tolist())
    average, critic = (torch.nn.ParameterList([torch.nn.Parameter(x)]) for x in (b.averages, b.weights))
    both = SimpleNamespace(target_critic=average, critic=critic)
    clone.function(AGENT, "ArcherAgent", Tuple=tuple).soft_update_target_critic(both, float(b.tau))
    return {
        "critic_loss": loss,
        "q_gradient": b.q.grad,
        "v_gradient": b.v.grad,
        "actor_loss": actor["pg.loss"],
        "actor_gradient": b.token_logp.grad,
        "average": average[0].detach(),
    }
