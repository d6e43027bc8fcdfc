"""Passes of a policy over rollouts: in chunks, and with prefixes that the chunks share."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mmrl.core.objective import Objective, PolicyOutputs
from mmrl.core.rollouts import Rollouts
from mmrl.training.loop.settings import TrainerConfig
from mmrl.training.loop.terms import Scorer

KEEPS_OLD = "keeps_logp_old"
"""Extra (B,), 1 for rows whose old log-probabilities stay as they are in `logp_old`, such as replayed ones."""


class PrefixScope(Protocol):
    """Work that the chunks of a batch share, such as the forward pass of a prompt that several of them need."""

    def backward(self) -> None:
        """Backpropagate through the shared work; called once, after the backward pass of the last chunk."""
        ...


class _NoPrefix:
    def backward(self) -> None:
        """Nothing is shared."""


def shared_prefix(policy: nn.Module, chunks: Sequence[Rollouts]) -> AbstractContextManager[PrefixScope]:
    """Share a policy's `prefixes`, if it has them, between the chunks that are scored inside the context.

    Chunks come in the order of `Rollouts.micro_batches`: parts of one group follow one another. With gradient, each
    chunk's loss is differentiated before the next one is scored.
    """
    prefixes: Any = getattr(getattr(policy, "module", policy), "prefixes", None)
    if prefixes is None or len(chunks) <= 1:
        return nullcontext(_NoPrefix())
    return prefixes.open()  # type: ignore[no-any-return]


def score_in_chunks(
    scorer: Scorer, policy: nn.Module, rollouts: Rollouts, outputs: frozenset[str], micro_batch: int
) -> PolicyOutputs:
    """Outputs (B, T) of a policy without gradient, so many rows at a time (0 = all)."""
    chunks = list(rollouts.micro_batches(micro_batch or rollouts.num_rows))
    with torch.no_grad(), shared_prefix(policy, chunks):
        parts = [scorer(policy, chunk, outputs) for chunk in chunks]

    def joined(name: str) -> Tensor:
        values = (getattr(part, name) for part in parts)
        return torch.cat([nn.functional.pad(x, (0, rollouts.num_decisions - x.shape[1])) for x in values])

    return PolicyOutputs(
        logp=joined("logp"),
        entropy=joined("entropy") if "entropy" in outputs else None,
        values=joined("values") if "values" in outputs else None,
    )


def scores_before_update(trainer: TrainerConfig, objective: Objective, provided: frozenset[str] = frozenset()) -> bool:
    """Whether the policy scores rollouts before an update, for a critic or old log-probabilities not yet provided."""
    recomputed = trainer.old_logp != "sampler" and (not trainer.single_update or objective.kl_in_reward)
    return (objective.needs_values and "values" not in provided) or (recomputed and "logp_old" not in provided)


def old_in_update(trainer: TrainerConfig, minibatch: Rollouts, logp: Tensor) -> Rollouts:
    """Take the update's own log-probabilities (B, T) as old ones, where a step takes a single optimiser step.

    Gradient: none flows into `logp_old`.
    """
    if trainer.old_logp == "sampler" or not trainer.single_update:
        return minibatch
    old = logp.detach()
    if KEEPS_OLD in minibatch.extras:
        old = torch.where(minibatch.extras[KEEPS_OLD][:, None] > 0, minibatch.logp_old, old)
    return minibatch.replace(logp_old=old)
