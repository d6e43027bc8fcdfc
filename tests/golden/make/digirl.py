"""DigiRL by its public code: returns, filters, critics' losses and the actor's loss."""

import random
from types import SimpleNamespace

import torch

from tests.golden.make.peers import Clone, Made, numbers, tensors

COMMIT = "c74ec34029eb5092bf17a64211f2d0284c7d1ba8"


def make(path: str) -> Made:
    clone = Clone(path, "DigiRL-agent/digirl", COMMIT)
    inputs = {
        "rewards": [[0.0, 0.0, 0.0, 1.0], [0.0, 0.5, 0.0, 0.25], [1.0, 0.0, 0.0, 0.0]],
        "gamma": 0.5,
        "totals": [1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0],
        "rare": [0.0] * 11 + [1.0],
        "instruction_logits": numbers(1, 12, 2, low=-4, high=4),
        "logits": numbers(2, 2, 8, 2, low=-2, high=2),
        "next_logits": numbers(3, 2, 8, 2, low=-2, high=2),
        "reward": [0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0],
        "mc_return": [0.25, 0.5, 1.0, 0.0, 0.0, 0.0, 0.5, 1.0],
        "token_logits": numbers(4, 8, 5, 3, low=-9, high=9),
        "token": [[0, 1, 2, 0, 1], [2, 1, 0, 2, 1], [1, 1, 2, 0, 0], [0, 2, 1, 1, 2]] * 2,
        "mask": [[1.0] * n + [0.0] * (5 - n) for n in (5, 3, 4, 1, 2, 5, 4, 3)],
    }
    inputs["instruction_logits"][6] = [-20.0, 20.0]  # beyond the bounds of the value
    b = tensors(inputs)
    peer = {
        "program": clone.name,
        "calls": [
            "digirl/environment/env_utils.py:add_mc_return",
            "digirl/algorithms/offpolicy_train_loop.py:filter_buffer",
            "digirl/algorithms/offpolicy_train_loop.py:filterbc_buffer",
            "digirl/algorithms/digirl/trainer.py:DigiRLTrainer",
            "digirl/models/autoui_agent.py:114-117",
        ],
        "relative": 1e-6,
        "because": "its batches pass through float32",
        "returns": [returns(clone, row, inputs["gamma"]) for row in inputs["rewards"]],
        "kept": filtered(clone, inputs["totals"], b.instruction_logits),
        "kept_by_reward": filtered(clone, inputs["totals"], None),
        "kept_of_rare": filtered(clone, inputs["rare"], None),
        **losses(clone, b),
    }
    return "DigiRL, arXiv 2406.11896", inputs, [peer], clone


def returns(clone: Clone, rewards: list[float], gamma: float) -> list[float]:
    file = "digirl/environment/env_utils.py"
    steps = clone.function(file, "add_mc_return")([{"reward": reward} for reward in rewards], gamma)
    return [float(step["mc_return"]) for step in steps]


def filtered(clone: Clone, totals: list[float], logits: torch.Tensor | None) -> list[bool]:
    """Which trajectories are kept; each has one step whose action is its number."""
    file, kept = "digirl/algorithms/offpolicy_train_loop.py", []

    class Buffer:
        def __init__(self, **options: int) -> None:
            pass

        def insert(self, number: int, **rest: object) -> None:
            kept.append(number)

    names = {"ReplayBuffer": Buffer, "print": lambda *_: None}
    if logits is None:
        function = clone.function(file, "filterbc_buffer", **names)
        agent = None
    else:
        label = clone.function(file, "label_trajectories", print=lambda *_: None)
        function = clone.function(file, "filter_buffer", label_trajectories=label, **names)
        agent = SimpleNamespace(trajectory_critic=lambda seen: logits[seen])
    trajectories = [
        [{"number": number, "observation": number, "trajectory_reward": total}] for number, total in enumerate(totals)
    ]
    function(trajectories, 4, 100, agent)
    return [number in kept for number in range(len(totals))]


def losses(clone: Clone, b: SimpleNamespace) -> dict:
    """Losses of the critics and of the actor, with their gradients."""
    b.logits.requires_grad_()
    b.next_logits.requires_grad_()
    b.instruction_logits.requires_grad_()
    b.token_logits.requires_grad_()
    model = SimpleNamespace(device="cpu", dtype=torch.float64)
    chosen = {"now": b.logits, "next": b.next_logits}

    def log_prob(*_: object) -> torch.Tensor:
        lines = clone.lines(
            "digirl/models/autoui_agent.py",
            114,
            117,
            self=SimpleNamespace(softmax=torch.nn.Softmax(dim=-1)),
            outputs=SimpleNamespace(logits=b.token_logits),
            action_ids={"input_ids": b.token, "attention_mask": b.mask},
        )
        return torch.log(lines.selected_prediction_probs) * b.mask

    agent = SimpleNamespace(
        model=model,
        device="cpu",
        critic=lambda observation, *_, **__: tuple(chosen[observation]),
        trajectory_critic=lambda *_, **__: b.instruction_logits,
        get_log_prob=log_prob,
    )
    kind = clone.function(
        "digirl/algorithms/digirl/trainer.py", "DigiRLTrainer", random=random, dict_mean=None, tqdm=None
    )
    trainer = kind.__new__(kind)
    trainer.agent, trainer.criterion, trainer.softmax = agent, torch.nn.CrossEntropyLoss(), torch.nn.Softmax(dim=-1)
    trainer.accelerator = SimpleNamespace(unwrap_model=lambda x: x, backward=lambda loss: loss.backward())
    features = torch.zeros(8, 1)
    given = {"image_features": features, "next_image_features": features, "action": None}
    given |= {"observation": "now", "next_observation": "next", "done": [0.0] * 8}
    given |= {"reward": b.reward.tolist(), "mc_return": b.mc_return.tolist()}
    trainer.critic_loss(**given)
    found = {"step_gradient": b.logits.grad, "step_next_gradient": b.next_logits.grad}
    whole = trainer.trajectory_critic_loss(None, [float(t) for t in b.totals])
    found |= {"instruction_loss": whole["trajectory.v1.loss"], "instruction_gradient": b.instruction_logits.grad}
    actor = trainer.actor_loss(**given, pi_action=None, advantage=None)
    found |= {"actor_loss": actor["pg.loss"], "actor_gradient": b.token_logits.grad}
    return found | {"kept_steps": [bool((b.token_logits.grad[i] != 0).any()) for i in range(8)]}
