"""Learning from answers that were given instead of sampled: what supervised and preference recipes share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from mmrl.core.rollouts import Rollouts
from mmrl.training.loop.settings import BaseRunConfig
from mmrl.vlm.config import VlmParts, check_scoring
from mmrl.vlm.evaluation import AnswerScoring, VlmEvaluationConfig, scoring_evaluation
from mmrl.vlm.model_config import check_critic
from mmrl.vlm.payload import Prompt, VlmPayload
from mmrl.vlm.policy import VlmPolicy
from mmrl.vlm.task import VlmTask


@dataclass
class GivenAnswersConfig(VlmParts, BaseRunConfig):
    """A run on answers of the data; rewards and sampling belong to the evaluation of held-out questions."""

    evaluation: VlmEvaluationConfig = field(default_factory=scoring_evaluation)
    """Evaluation, with rewards that score answers and their lengths."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        super().validate()
        check_scoring(self, self.scoring.rewards, self.scoring.accuracy_reward)
        check_critic(self.model, needed=False)

    @property
    def scoring(self) -> AnswerScoring:
        """The part of `evaluation` that says how answers are sampled and scored."""
        assert isinstance(self.evaluation, AnswerScoring)
        return self.evaluation


def given_answers(
    policy: VlmPolicy,
    tasks: Sequence[VlmTask],
    prompts: Sequence[Prompt],
    texts: Sequence[str],
    ids: Sequence[Sequence[int]],
) -> Rollouts:
    """Answers to N questions as B rows, a fixed number for each question, without log-probabilities and rewards."""
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
