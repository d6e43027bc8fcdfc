"""Supervised warm start: maximum likelihood of given completions, in the loop of every other recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from mmrl.core.aggregation import Denominators
from mmrl.core.objective import LossOutput, PolicyOutputs
from mmrl.core.rollouts import Rollouts
from mmrl.errors import UserError
from mmrl.fields import rare
from mmrl.training.loop.likelihood import likelihood_loss
from mmrl.training.loop.recipe import SupervisedRecipe
from mmrl.training.loop.terms import Step
from mmrl.vlm.data import LoadedTasks
from mmrl.vlm.given import GivenAnswersConfig, given_answers
from mmrl.vlm.policy import VlmPolicy
from mmrl.vlm.recipe import Questions, VlmDomain
from mmrl.vlm.task import VlmTask


@dataclass
class SftConfig(GivenAnswersConfig):
    """A supervised run on a column of completions."""

    target_key: str = rare("completion")
    """Column with the text that the model learns to answer; the end token is added."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        super().validate()
        if self.eval_data and not self.scoring.rewards:
            raise ValueError("eval_data is given but evaluation.rewards is empty; name a score such as exact")


class SftRecipe(VlmDomain, SupervisedRecipe[VlmPolicy, VlmTask]):
    """Maximum likelihood of a column of completions."""

    config: SftConfig
    own_loss = "sft"

    def __init__(self, config: SftConfig, questions: Questions | None = None) -> None:
        super().__init__(config)
        self.open(config, questions or Questions(), config.scoring, trains_on_rewards=False)

    def prepare_tasks(self, loaded: LoadedTasks, *, training: bool) -> LoadedTasks:
        """Refuse training questions without a completion."""
        config, loaded = self.config, super().prepare_tasks(loaded, training=training)
        for task in loaded.tasks if training else ():
            if not isinstance(task.columns.get(config.target_key), str):
                raise UserError(
                    f"{config.data.path}: question {task.id} has no text in column '{config.target_key}' (target_key); "
                    f"columns: {', '.join(task.columns)}"
                )
        return loaded

    def batch(self, policy: VlmPolicy, tasks: Sequence[VlmTask], generator: torch.Generator, step: Step) -> Rollouts:
        """Tokenise the given completions."""
        usable, prompts = self.encode(policy, tasks)
        tokenizer = policy.processor.tokenizer
        texts = [str(task.columns[self.config.target_key]) for task in usable]
        ids = [[*tokenizer.encode(text, add_special_tokens=False), policy.eos_ids[0]] for text in texts]
        return given_answers(policy, usable, prompts, texts, ids)

    def scores(self, policy: nn.Module, rollouts: Rollouts, outputs: frozenset[str]) -> PolicyOutputs:
        """Teacher-forced scores."""
        return policy(rollouts, outputs=outputs)  # type: ignore[no-any-return]

    def loss(self, policy: nn.Module, minibatch: Rollouts, denominators: Denominators, step: Step) -> LossOutput:
        """Mean negative log-likelihood of the answers' tokens."""
        return likelihood_loss(self.scores(policy, minibatch, self.loss_outputs), minibatch, denominators)
