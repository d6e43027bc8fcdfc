"""Supervised warm start: maximum likelihood of given completions through the same loop as reinforcement learning.

A completion is a rollout that was given instead of sampled: with advantage 1 the plain policy-gradient surrogate has
exactly the gradient of the negative log-likelihood, so batches, checkpoints, guards and reports are those of every
other recipe.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from mmrl.core.catalogue import get
from mmrl.core.rollouts import Rollouts
from mmrl.errors import UserError
from mmrl.rewards import RewardConfig, RewardSum
from mmrl.training.loop.likelihood import LikelihoodRecipe
from mmrl.training.loop.scoring import RewardErrors
from mmrl.training.loop.settings import RunConfig
from mmrl.vlm.data import DataConfig, load_splits, load_tasks
from mmrl.vlm.evaluation import VlmEvaluationConfig
from mmrl.vlm.model_config import ModelConfig, check_critic, check_update_precision
from mmrl.vlm.models import load_policy
from mmrl.vlm.payload import VlmPayload
from mmrl.vlm.policy import VlmPolicy
from mmrl.vlm.recipe import VlmRecipe
from mmrl.vlm.sampling import SamplerConfig
from mmrl.vlm.scoring import check_columns, splits_by_key
from mmrl.vlm.task import VlmTask

__all__ = ["SftConfig", "SftRecipe"]

OBJECTIVE = get("sft")


@dataclass
class SftConfig(RunConfig):
    """A supervised run on a column of completions."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """Model, adapter, precision."""
    data: DataConfig = field(default_factory=DataConfig)
    """Training questions with completions."""
    target_key: str = "completion"
    """Column with the text that the model learns to answer; the end token is added."""
    eval_data: dict[str, DataConfig] = field(default_factory=dict)
    """Held-out splits by name; the first one is the headline."""
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    """Sampling in evaluations."""
    rewards: list[RewardConfig] = field(default_factory=list)
    """Scores of evaluations; nothing is trained on them."""
    evaluation: VlmEvaluationConfig = field(default_factory=VlmEvaluationConfig)
    """Evaluation."""
    accuracy_reward: str = ""
    """Reward term whose value 1 counts as a right answer; empty = the last term."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        super().validate()
        check_update_precision(self.model, self.trainer.learning_rate)
        check_critic(self.model, needed=False)
        if self.trainer.samples_per_task != 1:
            raise ValueError(
                f"trainer.samples_per_task is {self.trainer.samples_per_task}; supervised runs have one completion a "
                "question, set it to 1"
            )
        names = [reward.name for reward in self.rewards]
        if self.eval_data and not names:
            raise ValueError("eval_data is given but rewards is empty; evaluations need a score such as exact")
        if self.accuracy_reward and self.accuracy_reward not in names:
            raise ValueError(f"accuracy_reward is '{self.accuracy_reward}' but the rewards are: {', '.join(names)}")


class SftRecipe(LikelihoodRecipe[VlmPolicy, VlmTask], VlmRecipe):
    """Maximum likelihood of a column of completions.

    Args:
        config: options of the run.

    Raises:
        UserError: model or data cannot be used, or a question has no completion.
    """

    config: SftConfig  # type: ignore[assignment]

    def __init__(self, config: SftConfig) -> None:
        self.config = config
        self.objective = OBJECTIVE
        loaded = self.prepare_tasks(load_tasks(config.data), training=True)
        for task in loaded.tasks:
            if not isinstance(task.columns.get(config.target_key), str):
                raise UserError(
                    f"{config.data.path}: question {task.id} has no text in column '{config.target_key}' (target_key); "
                    f"columns: {', '.join(task.columns)}"
                )
        self.train_tasks = loaded.tasks
        self.eval_tasks = load_splits(config, self.prepare_tasks)
        self.skipped = Counter(loaded.skipped)
        self.rewards = RewardSum(config.rewards)
        with ExitStack() as undone:
            undone.callback(self.rewards.close)
            check_columns(self.rewards, splits_by_key(self.eval_tasks))
            self.policy: VlmPolicy = load_policy(config.model)
            if self.eval_tasks:
                self.policy.check_response_length(config.sampler.max_new_tokens)
            undone.pop_all()
        self.version = 0
        self._errors = RewardErrors()
        self._controller = None

    def rollout(self, policy: VlmPolicy, tasks: Sequence[VlmTask], generator: torch.Generator) -> Rollouts:
        """Tokenise the given completions as if they had been sampled."""
        usable, prompts = self.encode(policy, tasks)
        tokenizer = policy.processor.tokenizer
        texts = [str(task.columns[self.config.target_key]) for task in usable]
        ids = [[*tokenizer.encode(text, add_special_tokens=False), policy.eos_ids[0]] for text in texts]
        longest = max(len(row) for row in ids)
        responses = torch.tensor([row + [policy.pad_id] * (longest - len(row)) for row in ids])
        mask = torch.tensor([[1.0] * len(row) + [0.0] * (longest - len(row)) for row in ids])
        device = next(policy.parameters()).device
        rollouts = Rollouts(
            group=torch.arange(len(usable)),
            mask=mask,
            logp_old=torch.zeros_like(mask),
            reward=torch.zeros(len(usable)),
            payload=VlmPayload(prompts, usable, responses, texts, ["eos"] * len(usable)),
        )
        return rollouts.to(device)

    def score(self, rollouts: Rollouts) -> Rollouts:
        """Nothing to score."""
        return rollouts
