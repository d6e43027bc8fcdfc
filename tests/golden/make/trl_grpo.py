"""All combinations of TRL's GRPO options: losses with their gradients, and advantages."""

import inspect
import itertools
import textwrap
from types import SimpleNamespace
from typing import Any

import torch

from tests.golden.make.peers import Made, package, tensors
from tests.golden.make.tokens import Trl, batch

LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo")
LENGTH = 64
FIRST, LAST = 'if self.multi_objective_aggregation == "sum_then_normalize":', "advantages = torch.nan_to_num("
"""The lines of `GRPOTrainer._generate_and_score_completions` that turn rewards into advantages."""


def make() -> Made:
    inputs = batch()
    advantage = group_advantages(inputs)
    cases = [
        {"loss_type": loss, "level": level, "beta": beta, "high": high, "corrected": corrected}
        for loss, level, beta, high in itertools.product(LOSSES, ("token", "sequence"), (0.0, 0.04), (0.2, 0.28))
        for corrected in ((False, True) if beta and high == 0.2 else (False,))
    ]
    peers = [Trl(inputs).grpo(advantage, length=LENGTH, **case) | {"options": case} for case in cases]
    peers += [scaled(inputs, scale) | {"options": {"scale_rewards": scale}} for scale in ("group", "batch", "none")]
    return "huggingface/trl GRPOTrainer", inputs | {"length": LENGTH, "advantage": advantage.tolist()}, peers


def group_advantages(inputs: dict[str, Any]) -> torch.Tensor:
    return scaled(inputs, "group")["advantage"]


def scaled(inputs: dict[str, Any], scale: str) -> dict[str, Any]:
    """Advantages (B,) by the trainer's own lines, from given rewards."""
    import trl.trainer.grpo_trainer as module

    source = textwrap.dedent(inspect.getsource(module.GRPOTrainer._generate_and_score_completions)).splitlines()
    first, last = (next(i for i, line in enumerate(source) if mark in line) for mark in (FIRST, LAST))
    b = tensors(inputs)
    trainer = SimpleNamespace(
        multi_objective_aggregation="sum_then_normalize",
        scale_rewards=scale,
        reward_weights=torch.ones(1, dtype=torch.float64),
    )
    rewards = b.reward[:, None]
    names = vars(module) | {
        "self": trainer,
        "rewards_per_func": rewards,
        "unscorable_mask": torch.isnan(rewards).all(dim=1),
        "num_generations": 4,
        "device": "cpu",
    }
    exec(compile(textwrap.dedent("\n".join(source[first : last + 1])), module.__file__, "exec"), names)
    call = "trl.GRPOTrainer._generate_and_score_completions, rewards to advantages"
    exact = {"relative": 1e-7, "because": "trl.trainer.utils.nanstd divides the counts in float32"}
    return {"program": package("trl"), "calls": [call], **exact, "advantage": names["advantages"]}
