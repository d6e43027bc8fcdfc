"""What a recipe supplies to the loop: six stages, each with a default that a paper may override."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from mmrl.core.aggregation import Denominators
from mmrl.core.groups import group_sum
from mmrl.core.objective import LossOutput, Objective, PolicyOutputs
from mmrl.core.rollouts import Rollouts
from mmrl.errors import RunError
from mmrl.training.loop.distributed import global_advantages
from mmrl.training.loop.evaluation import Evaluation
from mmrl.training.loop.reference import Reference
from mmrl.training.loop.settings import RunConfig
from mmrl.training.record.samples import SampleRecord
from mmrl.training.record.stopwatch import stopwatch

__all__ = ["NoUsableTasksError", "PrefixScope", "Recipe"]


class NoUsableTasksError(RunError):
    """None of the tasks of a draw could be used; the loop draws others a few times before it gives up."""


class PrefixScope(Protocol):
    """What the chunks of a batch have in common, such as the forward pass of a prompt that several of them need."""

    def backward(self) -> None:
        """Differentiate what the chunks' own backward passes have left undone; called once, after the last of them."""
        ...


class _NoPrefix:
    def backward(self) -> None:
        """Nothing is left undone."""


class Recipe(ABC):
    """Stages of one method on one domain.

    The loop calls `rollout`, `score`, `compute_logprobs` and `advantages`, then `loss` for every micro-batch.
    A subclass sets `policy`, `objective`, `train_tasks` and `eval_tasks` when it is built.
    """

    config: RunConfig
    policy: nn.Module
    """The trained module, unwrapped; scores rollouts when called and has save_pretrained and load_weights."""
    objective: Objective
    train_tasks: Sequence[Any]
    eval_tasks: Mapping[str, Sequence[Any]]
    """Held-out splits by name; the first one is the headline."""
    uses_rewards: ClassVar[bool] = True
    """False for supervised recipes: no reward statistics, no group filter."""
    start: Reference | None = None
    """The policy as it was at the start, where a recipe keeps it anyway; a KL term to the start then needs no copy."""

    @abstractmethod
    def rollout(self, policy: nn.Module, tasks: Sequence[Any], generator: torch.Generator) -> Rollouts:
        """Sample G decisions sequences for each task with the current policy.

        Args:
            policy: the unwrapped policy.
            tasks: this process's tasks of the step.
            generator: CPU generator, the only source of randomness.

        Returns:
            Rollouts with `logp_old` as sampled and `reward` not yet set (NaN).

        Raises:
            NoUsableTasksError: none of the tasks can be used.
        """

    @abstractmethod
    def score(self, rollouts: Rollouts) -> Rollouts:
        """Fill `reward` and `reward_terms`; NaN where a sample could not be scored."""

    @abstractmethod
    def scores(
        self, policy: nn.Module, rollouts: Rollouts, want: frozenset[str], view: str = "original"
    ) -> PolicyOutputs:
        """Log-probs (and entropy, values when wanted) of the rollouts' decisions under `policy`."""

    @abstractmethod
    def evaluate(self, policy: nn.Module, split: str, accelerator: Accelerator) -> Evaluation:
        """Measure the policy on one of `eval_tasks`."""

    @abstractmethod
    def records(self, rollouts: Rollouts, limit: int) -> list[SampleRecord]:
        """Up to `limit` rollouts as text and images for the report, whole groups first."""

    @property
    def wanted_scores(self) -> frozenset[str]:
        """What the loss needs of a forward pass with gradient."""
        wanted = {"logp"}
        if self.objective.needs_entropy:
            wanted.add("entropy")
        if self.objective.needs_values:
            wanted.add("values")
        return frozenset(wanted)

    def compute_logprobs(self, policy: nn.Module, reference: Reference, rollouts: Rollouts) -> Rollouts:
        """Add the constants of the update: old log-probs, reference log-probs, values.

        Args:
            policy: the policy before the update.
            reference: the reference policy; used when the objective has a KL term.
            rollouts: scored rollouts.

        Returns:
            The rollouts with `logp_old`, `logp_ref` and `values` filled as the objective needs.

        Gradient: none flows; everything here is a constant of the update.
        """
        changes: dict[str, Any] = {}
        old_pass = self.config.trainer.old_logp == "recompute" and not self.config.trainer.single_update
        if old_pass or self.objective.needs_values or self.objective.kl_in_reward:
            wanted = frozenset({"logp", "values"} if self.objective.needs_values else {"logp"})
            with stopwatch("old_logp"):
                scores = self.scores_in_chunks(policy, rollouts, wanted)
            changes["values"] = scores.values
            if self.config.trainer.old_logp == "recompute":
                changes["logp_old"] = scores.logp
        if self.objective.needs_reference:
            with stopwatch("ref_logp"):
                changes["logp_ref"] = reference.score(
                    lambda module: self.scores_in_chunks(module, rollouts, frozenset({"logp"}))
                ).logp
        return rollouts.replace(**changes)

    def advantages(self, rollouts: Rollouts, accelerator: Accelerator) -> Rollouts:
        """Turn rewards into per-decision advantages with the objective's estimator, over all processes."""
        return global_advantages(self.objective.compute_advantages, rollouts, accelerator)

    def loss(self, policy: nn.Module, minibatch: Rollouts, denominators: Denominators) -> LossOutput:
        """Loss of one micro-batch, already divided by the counts of the whole optimiser step.

        Args:
            policy: the wrapped policy, called with gradient.
            minibatch: rows with advantages.
            denominators: counts over the whole optimiser step and all processes.

        Returns:
            A scalar whose sum over micro-batches is the loss of the step, and its metrics.
        """
        scores = self.scores(policy, minibatch, self.wanted_scores)
        return self.objective.loss(scores, self.with_old_logp(minibatch, scores), denominators)

    def groups_with_gradient(self, minibatch: Rollouts) -> Tensor:
        """Say which groups can have a gradient; the update may leave out the others.

        Args:
            minibatch: rows with advantages.

        Returns:
            (N,) bool: groups with an advantage other than 0. All true where the loss also has a KL, entropy or value
            term, and for a recipe with a loss of its own, which may override this too.
        """
        if type(self).loss is not Recipe.loss or self.objective.regularised or minibatch.advantage is None:
            return torch.ones(minibatch.num_groups, dtype=torch.bool, device=minibatch.mask.device)
        moved = ((minibatch.advantage != 0) & (minibatch.loss_mask > 0)).any(1)
        return group_sum(moved.long(), minibatch.group) > 0

    def with_old_logp(self, minibatch: Rollouts, scores: PolicyOutputs) -> Rollouts:
        """Old log-probs of an update that is its rollouts' only one are the new ones, so the ratio is exactly 1."""
        trainer = self.config.trainer
        if trainer.old_logp == "recompute" and trainer.single_update:
            return minibatch.replace(logp_old=scores.logp.detach())
        return minibatch

    def scores_in_chunks(
        self, policy: nn.Module, rollouts: Rollouts, want: frozenset[str], view: str = "original"
    ) -> PolicyOutputs:
        """`scores` without gradient in micro-batches of `trainer.micro_batch` rows, padded back to (B, T)."""
        chunks = list(rollouts.micro_batches(self.config.trainer.micro_batch or rollouts.num_rows))
        length = rollouts.mask.shape[1]
        with torch.no_grad(), self.prefix_scope_of(chunks, policy):
            parts = [self.scores(policy, chunk, want, view) for chunk in chunks]
        return PolicyOutputs(
            logp=_stack([part.logp for part in parts], length),
            entropy=_stack([part.entropy for part in parts], length) if "entropy" in want else None,
            values=_stack([part.values for part in parts], length) if "values" in want else None,
        )

    def prefix_scope(self, policy: nn.Module) -> AbstractContextManager[PrefixScope]:
        """Open the work that chunks scored inside the context share; a recipe without such work keeps this default.

        Chunks come in the order of `Rollouts.micro_batches`: parts of one group follow one another. With gradient,
        each chunk's loss is differentiated before the next one is scored.

        Args:
            policy: the module that scores, unwrapped: the policy or its reference.

        Returns:
            A context manager; what it yields has gradients left over only where the chunks were scored with gradient.
        """
        return nullcontext(_NoPrefix())

    def prefix_scope_of(self, chunks: Sequence[Rollouts], policy: nn.Module) -> AbstractContextManager[PrefixScope]:
        """`prefix_scope` where there is more than one chunk to share it."""
        return self.prefix_scope(policy) if len(chunks) > 1 else nullcontext(_NoPrefix())

    def describe(self) -> str:
        """Formula of the loss with its constants, for the report."""
        return self.objective.describe()

    def step_metrics(self, rollouts: Rollouts) -> dict[str, float]:
        """Metrics of this recipe beside those of the loop."""
        return {}

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:  # noqa: B027
        """Move schedules and adaptive coefficients; called after each step.

        Args:
            step: steps done.
            metrics: metrics of the step.
        """

    def state_dict(self) -> dict[str, Any]:
        """Numbers that a resumed run needs (adaptive coefficients, trackers)."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Restore `state_dict`."""

    def save_parts(self, folder: Path) -> None:  # noqa: B027
        """Write further weights into a checkpoint, for use outside the run; `state_dict` is what a resume reads.

        Args:
            folder: folder of the checkpoint, which holds the policy in `model`.
        """

    def close(self) -> None:  # noqa: B027
        """Free worker processes."""


def _stack(parts: list[Any], length: int) -> Any:
    padded = [nn.functional.pad(part, (0, length - part.shape[1])) for part in parts]
    return torch.cat(padded)
