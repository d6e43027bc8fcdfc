"""Learning from answers that were given instead of sampled: what supervised and preference recipes share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mmrl.core.rollouts import Rollouts
from mmrl.vlm.config import VlmRunConfig
from mmrl.vlm.model_config import check_critic
from mmrl.vlm.payload import Prompt, VlmPayload
from mmrl.vlm.policy import VlmPolicy
from mmrl.vlm.task import VlmTask


@dataclass
class GivenAnswersConfig(VlmRunConfig):
    """A run on answers of the data; rewards only measure held-out questions."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        super().validate()
        check_critic(self.model, needed=False)


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
