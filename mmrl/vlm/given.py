"""Learning from answers that were given instead of sampled: what supervised and preference recipes share."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from mmrl.core.rollouts import Rollouts
from mmrl.rewards import RewardSum
from mmrl.training.loop.likelihood import LikelihoodRecipe
from mmrl.training.loop.scoring import RewardErrors
from mmrl.vlm.config import VlmRunConfig
from mmrl.vlm.data import load_splits, load_tasks
from mmrl.vlm.model_config import check_critic
from mmrl.vlm.models import load_policy
from mmrl.vlm.payload import Prompt, VlmPayload
from mmrl.vlm.policy import VlmPolicy
from mmrl.vlm.recipe import VlmRecipe
from mmrl.vlm.scoring import check_columns, splits_by_key
from mmrl.vlm.task import VlmTask


@dataclass
class GivenAnswersConfig(VlmRunConfig):
    """A run on answers of the data; rewards only measure held-out questions."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        super().validate()
        check_critic(self.model, needed=False)


class GivenAnswersRecipe(LikelihoodRecipe[VlmPolicy, VlmTask], VlmRecipe):
    """Model, data and evaluation of a run on given answers."""

    config: GivenAnswersConfig  # type: ignore[assignment]

    def __init__(self, config: GivenAnswersConfig) -> None:
        self.config = config
        self.objective = self.make_objective()
        loaded = self.prepare_tasks(load_tasks(config.data), training=True)
        self.check_answers(loaded.tasks)
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

    @abstractmethod
    def make_objective(self) -> Any:
        """What is minimised."""

    def check_answers(self, tasks: Sequence[VlmTask]) -> None:
        """Refuse training questions without an answer, before the model is loaded; raises UserError."""

    def given(
        self,
        policy: VlmPolicy,
        tasks: Sequence[VlmTask],
        prompts: Sequence[Prompt],
        texts: Sequence[str],
        ids: Sequence[Sequence[int]],
    ) -> Rollouts:
        """Answers as if they had been sampled."""
        longest = max(len(row) for row in ids)
        responses = torch.tensor([[*row, *[policy.pad_id] * (longest - len(row))] for row in ids])
        mask = torch.tensor([[1.0] * len(row) + [0.0] * (longest - len(row)) for row in ids])
        rollouts = Rollouts(
            group=torch.arange(len(tasks)).repeat_interleave(len(ids) // len(tasks)),
            mask=mask,
            logp_old=torch.zeros_like(mask),
            reward=torch.zeros(len(ids)),
            payload=VlmPayload(list(prompts), list(tasks), responses, list(texts), ["eos"] * len(ids)),
        )
        return rollouts.to(next(policy.parameters()).device)

    def score(self, rollouts: Rollouts) -> Rollouts:
        """Nothing to score."""
        return rollouts
