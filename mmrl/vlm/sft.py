"""Supervised warm start: maximum likelihood of given completions through the same loop as reinforcement learning.

A completion is a rollout that was given instead of sampled: with advantage 1 the plain policy-gradient surrogate has
exactly the gradient of the negative log-likelihood, so batches, checkpoints, guards and reports are those of every
other recipe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mmrl.core.catalogue import get
from mmrl.core.objective import Objective
from mmrl.core.rollouts import Rollouts
from mmrl.errors import UserError
from mmrl.fields import rare
from mmrl.vlm.given import GivenAnswersConfig, GivenAnswersRecipe
from mmrl.vlm.policy import VlmPolicy
from mmrl.vlm.task import VlmTask


@dataclass
class SftConfig(GivenAnswersConfig):
    """A supervised run on a column of completions."""

    target_key: str = rare("completion")
    """Column with the text that the model learns to answer; the end token is added."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        super().validate()
        if self.trainer.samples_per_task != 1:
            raise ValueError(
                f"trainer.samples_per_task is {self.trainer.samples_per_task}; supervised runs have one completion a "
                "question, set it to 1"
            )
        if self.eval_data and not self.rewards:
            raise ValueError("eval_data is given but rewards is empty; evaluations need a score such as exact")


class SftRecipe(GivenAnswersRecipe):
    """Maximum likelihood of a column of completions."""

    config: SftConfig

    def make_objective(self) -> Objective:
        """Maximum likelihood."""
        return get("sft")

    def check_answers(self, tasks: Sequence[VlmTask]) -> None:
        """Refuse questions without a completion."""
        config = self.config
        for task in tasks:
            if not isinstance(task.columns.get(config.target_key), str):
                raise UserError(
                    f"{config.data.path}: question {task.id} has no text in column '{config.target_key}' (target_key); "
                    f"columns: {', '.join(task.columns)}"
                )

    def rollout(self, policy: VlmPolicy, tasks: Sequence[VlmTask], generator: torch.Generator) -> Rollouts:
        """Tokenise the given completions as if they had been sampled."""
        usable, prompts = self.encode(policy, tasks)
        tokenizer = policy.processor.tokenizer
        texts = [str(task.columns[self.config.target_key]) for task in usable]
        ids = [[*tokenizer.encode(text, add_special_tokens=False), policy.eos_ids[0]] for text in texts]
        return self.given(policy, usable, prompts, texts, ids)
