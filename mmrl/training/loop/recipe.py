"""What a recipe supplies to the loop: the stages of the algorithm, each with a default that a paper may override."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from mmrl.core.aggregation import Denominators
from mmrl.core.groups import group_sum
from mmrl.core.objective import LossOutput, Objective, PolicyOutputs
from mmrl.core.rollouts import Rollouts
from mmrl.errors import RunError, UserError
from mmrl.training.loop.distributed import global_advantages
from mmrl.training.loop.evaluation import Evaluation
from mmrl.training.loop.loss_terms import LossTerms
from mmrl.training.loop.old_logprobs import OldLogProbs
from mmrl.training.loop.reference import Reference
from mmrl.training.loop.settings import RunConfig
from mmrl.training.record.fingerprint import content_digest
from mmrl.training.record.samples import SampleRecord
from mmrl.training.record.stopwatch import stopwatch

PolicyT = TypeVar("PolicyT", bound=nn.Module)
TaskT = TypeVar("TaskT")
Scorer = Callable[[nn.Module, Rollouts, frozenset[str]], PolicyOutputs]
"""Function of a policy, rollouts and the names of the outputs asked for, such as `Recipe.scores`."""


class NoUsableTasksError(RunError):
    """None of the tasks of a draw could be used; the loop draws others a few times before it gives up."""


class PrefixScope(Protocol):
    """Work that the chunks of a batch share, such as the forward pass of a prompt that several of them need."""

    def backward(self) -> None:
        """Backpropagate through the shared work; called once, after the backward pass of the last chunk."""
        ...


class _NoPrefix:
    def backward(self) -> None:
        """Nothing is shared."""


class Recipe(ABC, Generic[PolicyT, TaskT]):
    """Stages of one method on one domain.

    In each step the loop calls `rollout`, `score`, `compute_logprobs` and `advantages`, then `loss` for every
    micro-batch. A subclass sets `policy`, `objective`, `train_tasks` and `eval_tasks` in its `__init__`.
    """

    config: RunConfig
    policy: PolicyT
    """The trained module, unwrapped; scores rollouts when called and has save_pretrained and load_weights."""
    objective: Objective
    train_tasks: Sequence[TaskT]
    eval_tasks: Mapping[str, Sequence[Any]]
    """Held-out splits by name; the first one is the headline."""
    uses_rewards: ClassVar[bool] = True
    """False for supervised recipes: no reward statistics, no group filter."""
    has_loss_terms: ClassVar[bool] = False
    """True where `loss_terms`, or a `loss` of the recipe's own, has a gradient even if every advantage is 0."""
    waits_for_signal: ClassVar[bool] = False
    """True where a minibatch whose advantages are all 0 takes no optimiser step: other terms of the loss, such as the
    distance to a reference that the policy nearly equals, have tiny gradients, which AdamW scales up to whole steps."""
    start: Reference | None = None
    """The policy as it was at the start, where a recipe keeps it anyway; a KL term to the start then needs no copy."""

    @abstractmethod
    def rollout(self, policy: PolicyT, tasks: Sequence[TaskT], generator: torch.Generator) -> Rollouts:
        """Sample G sequences of decisions for each task.

        Returns:
            Rollouts with `logp_old` as sampled and `reward` not yet set (NaN).
        """

    @abstractmethod
    def score(self, rollouts: Rollouts) -> Rollouts:
        """Fill `reward` and `reward_terms`; NaN where a sample could not be scored."""

    @abstractmethod
    def scores(self, policy: nn.Module, rollouts: Rollouts, outputs: frozenset[str]) -> PolicyOutputs:
        """Evaluate a policy on the decisions of some rollouts.

        Returns:
            The outputs (B, T), with gradient where it is enabled.
        """

    @abstractmethod
    def evaluate(self, policy: PolicyT, split: str, accelerator: Accelerator) -> Evaluation:
        """Measure the policy on one of `eval_tasks`."""

    @abstractmethod
    def records(self, rollouts: Rollouts, limit: int) -> list[SampleRecord]:
        """Up to `limit` rollouts as text and images for the report, whole groups first."""

    def compute_logprobs(self, policy: PolicyT, reference: Reference, rollouts: Rollouts) -> Rollouts:
        """Add the constants of the update: old log-probs, values, reference log-probs.

        Gradient: none flows; everything here is a constant of the update.
        """
        return self.reference_pass(reference, self.old_pass(policy, rollouts))

    def advantages(self, rollouts: Rollouts, accelerator: Accelerator) -> Rollouts:
        """Turn rewards into per-decision advantages with the objective's estimator, over all processes."""
        return global_advantages(self.objective.compute_advantages, rollouts, accelerator)

    def denominators(self, minibatch: Rollouts) -> Denominators:
        """Count what the loss of an optimiser step is divided by; a recipe adds what its own terms need."""
        return self.objective.denominators(minibatch)

    def loss(self, policy: nn.Module, minibatch: Rollouts, denominators: Denominators) -> LossOutput:
        """Loss of one micro-batch, already divided by the counts of the whole optimiser step.

        Override `loss_terms` to add to it; a recipe that replaces it declares `has_loss_terms`.
        """
        scores = self.scores(policy, minibatch, self.loss_outputs)
        output = self.objective.loss(scores, self.old_in_update(minibatch, scores.logp), denominators)
        return self.loss_terms(policy, minibatch, scores, denominators).added_to(output)

    def loss_terms(
        self, policy: nn.Module, minibatch: Rollouts, scores: PolicyOutputs, denominators: Denominators
    ) -> LossTerms:
        """Terms that the recipe adds to the objective's loss; none by default. Set `has_loss_terms` with it."""
        return LossTerms()

    @property
    def compares_rows(self) -> bool:
        """Whether the loss of a row depends on the others of its group, which then stay in one micro-batch."""
        return self.objective.compares_rows

    @property
    def needs_reference_model(self) -> bool:
        """Whether the loop keeps a reference policy for this recipe."""
        return self.objective.needs_reference

    @property
    def loss_outputs(self) -> frozenset[str]:
        """Names of the policy outputs that the loss needs."""
        outputs = {"logp"}
        if self.objective.needs_entropy:
            outputs.add("entropy")
        if self.objective.needs_values:
            outputs.add("values")
        return frozenset(outputs)

    @property
    def old_logprobs(self) -> OldLogProbs:
        """Where the old log-probs come from."""
        return OldLogProbs.of(self.config.trainer)

    @property
    def needs_old_pass(self) -> bool:
        """Whether the rollouts are scored before the update: for old log-probs, a critic or a KL in the reward."""
        scored = self.objective.needs_values or self.objective.kl_in_reward
        return scored or self.old_logprobs is OldLogProbs.PASS_BEFORE_UPDATE

    def old_pass(self, policy: PolicyT, rollouts: Rollouts) -> Rollouts:
        """Score the rollouts with the policy before the update, where that is needed."""
        if not self.needs_old_pass:
            return rollouts
        outputs = frozenset({"logp", "values"} if self.objective.needs_values else {"logp"})
        with stopwatch("old_logp"):
            scores = self.scores_in_chunks(policy, rollouts, outputs)
        return self.old_logprobs.before_update(rollouts.replace(values=scores.values), scores.logp)

    def old_in_update(self, minibatch: Rollouts, logp: Tensor) -> Rollouts:
        """Put the old log-probs in place that the loss compares the update's own `logp` (B, T) with."""
        return self.old_logprobs.in_update(minibatch, logp)

    def reference_pass(self, reference: Reference, rollouts: Rollouts) -> Rollouts:
        """Score the rollouts with the reference policy, where the objective has a KL term."""
        if not self.objective.needs_reference:
            return rollouts
        with stopwatch("ref_logp"):
            scores = reference.score(lambda module: self.scores_in_chunks(module, rollouts, frozenset({"logp"})))
        return rollouts.replace(logp_ref=scores.logp)

    def groups_with_gradient(self, minibatch: Rollouts) -> Tensor:
        """Tell which groups can have a gradient; the update may leave out the others.

        Returns:
            (N,) bool: groups with an advantage other than 0; all of them where the loss has a term that does not
            vanish with the advantages: a KL, entropy or value term, or one of the recipe's own (`has_loss_terms`).
        """
        if self.has_loss_terms or self.objective.regularised:
            return torch.ones(minibatch.num_groups, dtype=torch.bool, device=minibatch.mask.device)
        return self.groups_with_signal(minibatch)

    def groups_with_signal(self, minibatch: Rollouts) -> Tensor:
        """Tell which groups (N,) have an advantage other than 0; all of them before there are advantages."""
        if minibatch.advantage is None:
            return torch.ones(minibatch.num_groups, dtype=torch.bool, device=minibatch.mask.device)
        moved = ((minibatch.advantage != 0) & (minibatch.loss_mask > 0)).any(1)
        return group_sum(moved.long(), minibatch.group) > 0

    def scores_in_chunks(
        self, policy: nn.Module, rollouts: Rollouts, outputs: frozenset[str], scorer: Scorer | None = None
    ) -> PolicyOutputs:
        """Score without gradient, `trainer.micro_batch` rows at a time.

        Returns:
            The outputs (B, T).
        """
        scorer = scorer or self.scores
        chunks = list(rollouts.micro_batches(self.config.trainer.micro_batch or rollouts.num_rows))
        with torch.no_grad(), self.prefix_scope_of(chunks, policy):
            parts = [scorer(policy, chunk, outputs) for chunk in chunks]

        def joined(name: str) -> Tensor:
            values = (getattr(part, name) for part in parts)
            return torch.cat([nn.functional.pad(x, (0, rollouts.num_decisions - x.shape[1])) for x in values])

        return PolicyOutputs(
            logp=joined("logp"),
            entropy=joined("entropy") if "entropy" in outputs else None,
            values=joined("values") if "values" in outputs else None,
        )

    def prefix_scope(self, policy: nn.Module) -> AbstractContextManager[PrefixScope]:
        """Share work between the chunks that are scored inside the context; by default nothing is shared.

        Chunks come in the order of `Rollouts.micro_batches`: parts of one group follow one another. With gradient,
        each chunk's loss is differentiated before the next one is scored.
        """
        return nullcontext(_NoPrefix())

    def prefix_scope_of(self, chunks: Sequence[Rollouts], policy: nn.Module) -> AbstractContextManager[PrefixScope]:
        """`prefix_scope` where there is more than one chunk to share it."""
        return self.prefix_scope(policy) if len(chunks) > 1 else nullcontext(_NoPrefix())

    def describe(self) -> str:
        """Formula of the loss with its constants, for the report."""
        return self.objective.describe()

    def samples_beside(self) -> int:
        """Samples that this process drew beside the rollouts since the last call; they count in the run's cost."""
        return 0

    def step_metrics(self, rollouts: Rollouts) -> dict[str, float]:
        """Metrics of this recipe beside those of the loop."""
        return {}

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        """Move schedules and adaptive coefficients; called after each step."""

    def state_dict(self) -> dict[str, Any]:
        """Numbers that a resumed run needs (adaptive coefficients, trackers)."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""

    def save_parts(self, folder: Path) -> None:
        """Write further weights into a checkpoint for use outside the run; a resume reads `state_dict` instead."""

    def data_digest(self) -> str:
        """Digest of the training tasks' contents, by which a resume tells other data; see `content_digest`."""
        return content_digest(self.train_tasks)

    @classmethod
    def export(cls, config: Any, checkpoint: Path, output: Path) -> str:
        """Write a checkpoint's model, whole, into a folder that its own library loads."""
        raise UserError(f"{cls.__name__} has no export of its own; the model as it is saved lies in {checkpoint}/model")

    def close(self) -> None:
        """Free worker processes."""
