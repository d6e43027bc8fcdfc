"""The stages of a method, the terms that it adds to the loss, and its passes over rollouts."""

from __future__ import annotations

import copy
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from mmrl.core.loss import Denominators, Metric
from mmrl.core.objectives.objective import LossOutput, Objective, PolicyOutputs
from mmrl.core.rollouts import COLLISION, KEEPS_OLD, Rollouts
from mmrl.core.state import ObjectiveState, Stateful
from mmrl.errors import RunError, UserError
from mmrl.runs.export import Exported
from mmrl.runs.fingerprint import content_digest
from mmrl.runs.records import SampleRecord
from mmrl.training.evaluation import Elsewhere, Evaluation, Measure, evaluate_tasks
from mmrl.training.processes import Streams, global_advantages
from mmrl.training.settings import BaseRunConfig, BaseTrainerConfig, ReferenceConfig, TrustRegionConfig
from mmrl.training.sharding import in_parts, local, whole_weights

PolicyT = TypeVar("PolicyT", bound=nn.Module)
TaskT = TypeVar("TaskT")
ScoresT = TypeVar("ScoresT")


@dataclass(frozen=True)
class Step:
    """Position in a run; the trainer owns it and hands it to every stage."""

    number: int = 0
    """Steps completed before this one, 0 in the first."""
    total: int = 1
    """Steps of the whole run."""


class NoUsableTasksError(RunError):
    """None of the tasks of a draw could be used, and others are drawn; `rollouts` stay where some of those could be."""

    def __init__(self, message: str, rollouts: Rollouts | None = None) -> None:
        super().__init__(message)
        self.rollouts = rollouts


class Recipe(ABC, Generic[PolicyT, TaskT]):
    """Stages of one method on one domain.

    In each step the loop calls `rollout`, `score` and `advantages`, then `loss` for every micro-batch, and sometimes
    `evaluate`. A subclass sets `policy`, `objective`, `train_tasks` and `eval_tasks` in its `__init__`; a method that
    adds to the loss sets `terms`. A recipe counts no steps and draws all random numbers from the streams it is given.
    """

    policy: PolicyT
    """The trained module; scores rollouts when called and has save_pretrained and load_weights."""
    objective: Objective
    """The objective to optimise; a `PreferenceObjective`, or None, in supervised recipes."""
    terms: Sequence[LossTerm] = ()
    """Terms that the method adds to the loss of the objective."""
    train_tasks: Sequence[TaskT]
    eval_tasks: Mapping[str, Sequence[Any]]
    """Held-out splits by name; the first one is the headline."""
    supervised: ClassVar[bool] = False
    """Whether it learns from given data, without rewards; see `SupervisedRecipe`."""
    critic_only: ClassVar[bool] = False
    """Whether its loss trains the critic alone, and the policy stays as it is."""
    own_loss: ClassVar[str] = ""
    """Name of a loss that replaces the objective's, and has a gradient even if every advantage is 0."""
    start: Reference | None = None
    """The policy as it was at the start, where a recipe keeps it anyway; a KL term to the start then needs no copy."""
    reference: Reference | None = None
    """The reference policy of the step, for losses that compare with it exactly; set before the update."""
    trust_region: TrustRegionConfig | None = None
    """Natural-gradient steps within it, in place of AdamW's; `trainer.learning_rate` is the share of each."""
    extra_samples: int = 0
    """Samples drawn besides the rollouts in this step; they count in the run's cost. The trainer resets it."""
    variety: str = "a higher temperature"
    """Advice for samples of a task that differ more; empty where no option does that."""
    compared: Sequence[str] = ("reward",)
    """Rewards that samples of a task are compared by: the total `reward`, or terms, each by itself; empty where not."""
    samples_elsewhere: bool = False
    """Whether another engine than the policy samples, whose log-probabilities are compared with the policy's own."""
    scores_apart: bool = True
    """Whether `score` treats each task as if it were alone; else it is called with those of the whole step."""
    samples_as_it_scores: ClassVar[bool] = False
    """Whether sampling and update compute log-probabilities by the same arithmetic, so that rounding alone differs."""

    def __init__(self, config: BaseRunConfig) -> None:
        self.config: Any = config
        self.parts: dict[str, Stateful] = {}
        """Objects whose state checkpoints hold, by name."""
        self.added: dict[str, Any] = {}
        """Counters and lists that stages add to, by name; workers send theirs, processes share their counts."""
        self.noted: dict[str, float | Metric] = {}
        """Metrics of the step that stages add; a `Metric` is this process's share, a number that of the whole run."""

    @abstractmethod
    def rollout(self, policy: PolicyT, tasks: Sequence[TaskT], streams: Streams, step: Step) -> Rollouts:
        """Sample G sequences of decisions for each task.

        Args:
            policy: The policy in evaluation mode.
            tasks: N tasks of this process.
            streams: The only source of randomness, a stream for each task.
            step: Position in the run.

        Returns:
            N * G rows with `logp_old` (B, T) in nats as sampled and `reward` not yet set (NaN).

        Raises:
            NoUsableTasksError: None of the tasks can be used; the trainer draws others.
        """

    @abstractmethod
    def score(self, rollouts: Rollouts, step: Step) -> Rollouts:
        """Fill `reward` (B,) and `reward_terms`; NaN where a sample could not be scored."""

    @abstractmethod
    def scores(self, policy: nn.Module, rollouts: Rollouts, outputs: frozenset[str]) -> PolicyOutputs:
        """Score the decisions of rollouts under a policy or its reference; outputs (B, T), with gradient if enabled.

        `outputs` names those that are read: "logp", "entropy", "values", "kl_ref" or a term's own.
        """

    @abstractmethod
    def measures(self, policy: PolicyT, split: str, step: Step) -> Sequence[Measure[Any]]:
        """Measures of the policy on one of `eval_tasks`; the first one is the headline."""

    def evaluate(
        self, policy: PolicyT, split: str, accelerator: Accelerator, step: Step, elsewhere: Elsewhere | None = None
    ) -> Evaluation:
        """Measure the policy on one of `eval_tasks`; `step.number` steps are complete, `elsewhere` are workers."""
        with self.evaluating(policy):
            measures, limit = self.measures(policy, split, step), self.config.evaluation.records
            return evaluate_tasks(measures, self.eval_tasks[split], limit, accelerator, elsewhere)

    def evaluating(self, policy: PolicyT) -> AbstractContextManager[Any]:
        """Put the weights that evaluations use in the policy's place; `measures` are called meanwhile."""
        return nullcontext()

    def advantages(self, rollouts: Rollouts, accelerator: Accelerator, step: Step) -> Rollouts:
        """Turn rewards into advantages (B, T) with the objective's estimator, over all processes."""
        return self.estimate(rollouts, accelerator, step)

    def estimate(self, rollouts: Rollouts, accelerator: Accelerator, step: Step) -> Rollouts:
        """Advantages (B, T) of the objective's estimator over all processes; moves the state of its blocks."""
        estimator = functools.partial(self.objective.compute_advantages, state=self.objective_state)
        return global_advantages(estimator, rollouts, accelerator)

    @property
    def objective_state(self) -> ObjectiveState:
        """State of the objective's blocks, the same in every process; in `parts` where there is any."""
        if "objective" not in self.parts:
            try:
                state = self.objective.state(self.train_tasks)
            except ValueError as error:
                raise UserError(f"objective.{error}") from error
            if not state.blocks:
                return state
            self.parts["objective"] = state
        return self.parts["objective"]  # type: ignore[return-value]

    def loss(self, policy: nn.Module, minibatch: Rollouts, denominators: Denominators, step: Step) -> LossOutput:
        """Scalar loss of a micro-batch: the objective's, and the terms.

        `denominators` count the whole optimiser step on all processes, so that the losses of micro-batches add up.
        """
        scores = self.scores(policy, minibatch, self.loss_outputs)
        minibatch = old_in_update(self, minibatch, scores.logp)
        output = self.objective.at(step.number / step.total).loss(scores, minibatch, denominators)
        return self.plus_terms(output, policy, minibatch, scores, denominators, step)

    def micro_batches(self, minibatch: Rollouts, rows: int, *, whole_groups: bool) -> Iterator[Rollouts]:
        """Parts of an optimiser step whose losses add up; see `Rollouts.micro_batches`."""
        return minibatch.micro_batches(rows, whole_groups=whole_groups)

    def plus_terms(
        self,
        output: LossOutput,
        policy: nn.Module,
        minibatch: Rollouts,
        scores: PolicyOutputs,
        denominators: Denominators,
        step: Step,
    ) -> LossOutput:
        """The loss of a micro-batch with that of the terms, which read the policy's `scores` on it."""
        return with_terms(output, [term(policy, minibatch, scores, denominators, step) for term in self.terms])

    def rolls_apart(self, step: Step) -> bool:
        """Whether `rollout` treats each task of the step as if it were alone, so that workers can share them."""
        return True

    def rollout_state(self, tasks: Sequence[TaskT]) -> Any:
        """State, besides weights and step, that `rollout` and `score` need for these tasks; sent to rollout workers."""
        return None

    def load_rollout_state(self, state: Any) -> None:
        """Take over `rollout_state`, in a worker."""

    @property
    def keeps_sampled_logp(self) -> bool:
        """Whether the old log-probabilities are those recorded while sampling; see `trainer.old_logp`."""
        trainer, weights = self.config.trainer, self.policy.parameters()
        low = trainer.mixed_precision != "none" or any(weight.dtype.itemsize < 4 for weight in weights)
        exact = self.samples_as_it_scores and not low and "logp_rollout" not in self.objective.needs
        return trainer.old_logp == "sampler" or (trainer.old_logp == "auto" and exact)

    @property
    def keeps_logp_rollout(self) -> bool:
        """Whether the sampler's log-probabilities stay beside the old ones, to correct or measure the difference."""
        return (self.samples_elsewhere or "logp_rollout" in self.objective.needs) and not self.keeps_sampled_logp

    @property
    def loss_outputs(self) -> frozenset[str]:
        """Names of the policy outputs that objective and terms read."""
        own = self.objective
        read = own.needs & ({"entropy", "kl_old", "kl_ref"} if own.needs_reference else {"entropy", "kl_old"})
        read |= {"values"} if own.needs_values else set()
        return frozenset({"logp"} | read).union(*(term.outputs for term in self.terms))

    def scores_in_chunks(
        self, policy: nn.Module, rollouts: Rollouts, outputs: frozenset[str], scorer: Scorer | None = None
    ) -> PolicyOutputs:
        """Outputs (B, T) without gradient, `trainer.micro_batch` rows at a time."""
        return score_in_chunks(scorer or self.scores, policy, rollouts, outputs, self.config.trainer.micro_batch)

    def describe(self) -> str:
        """Formula of the loss with its constants, for the report."""
        return "\n".join([self.objective.describe(), *filter(None, (term.formula() for term in self.terms))])

    def records(self, rollouts: Rollouts, limit: int) -> list[SampleRecord]:
        """Up to `limit` rollouts as text and images for the report, whole groups first."""
        return []

    def step_metrics(self, rollouts: Rollouts) -> dict[str, float | Metric]:
        """Metrics of the domain after a step, see `noted`; counts in `added` are those of all processes."""
        return {}

    def on_step_end(self, step: Step, metrics: Mapping[str, float]) -> None:
        """Move averages and adaptive coefficients after a step."""

    def state_dict(self) -> dict[str, Any]:
        """State of `parts` and `terms`, for checkpoints."""
        terms = {term.name: term.state_dict() for term in self.terms}
        return {name: part.state_dict() for name, part in self.parts.items()} | {"terms": terms}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        for name in (name for name in self.parts if name in state):
            self.parts[name].load_state_dict(state[name])
        for term in (term for term in self.terms if term.name in state["terms"]):
            term.load_state_dict(state["terms"][term.name])

    def save_parts(self, folder: Path) -> None:
        """Write further weights into a checkpoint for use outside the run; a resume reads `state_dict` instead."""

    def data_digest(self) -> str:
        """Digest of the training tasks' contents, by which a resume recognises other data."""
        return content_digest(self.train_tasks)

    @classmethod
    def export(cls, config: Any, checkpoint: Path, output: Path) -> Exported:
        """Write a checkpoint's model for its own library; returns how it is loaded and used."""
        raise UserError(f"{cls.__name__} has no export of its own; the model as it is saved lies in {checkpoint}/model")

    def close(self) -> None:
        """Free worker processes."""


Scorer = Callable[[nn.Module, Rollouts, frozenset[str]], PolicyOutputs]
"""Scores the decisions of rollouts under a policy, given the names of the outputs that are wanted."""


@dataclass(frozen=True)
class Passes:
    """Passes without gradient before an update, `trainer.micro_batch` rows at a time."""

    policy: nn.Module
    """The policy that the update starts from."""
    run: Callable[[nn.Module, Rollouts, frozenset[str], Scorer | None], PolicyOutputs]
    """`Recipe.scores_in_chunks`."""

    def scores(self, rollouts: Rollouts, outputs: frozenset[str], scorer: Scorer | None = None) -> PolicyOutputs:
        """Outputs (B, T) of the policy, scored by the recipe unless another scorer is given."""
        return self.run(self.policy, rollouts, outputs, scorer)


@dataclass(frozen=True)
class TermLoss:
    """Value of a loss term on a micro-batch."""

    terms: Mapping[str, Tensor] = field(default_factory=dict)
    """Weighted scalars by metric name, such as "loss/perception", divided by counts of the whole optimiser step."""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """Further metrics; the scalars are logged under their own names."""


class LossTerm:
    """A term that a method adds to the loss of its objective, with everything that belongs to it.

    The trainer calls `prepare` once a step and the term itself for every micro-batch; `counts` are summed over all
    processes and handed back in `Denominators.others`.
    """

    name: ClassVar[str]
    """Key of the term's state in checkpoints."""
    outputs: frozenset[str] = frozenset()
    """Policy outputs that the term reads besides the objective's: "entropy", "values", ..."""
    gradient: Literal["always", "never", "with_signal"] = "always"
    """The term trains the policy always; never (it only measures); or with_signal, only in minibatches with an
    advantage other than 0. Others then take no step, because AdamW would scale tiny gradients up to whole steps."""

    def provides(self, step: Step) -> frozenset[str]:
        """Constants of the update ("logp_old", "values", "logp_ref") that need no pass of the trainer in this step."""
        return frozenset()

    def prepare(self, passes: Passes, rollouts: Rollouts, step: Step) -> Rollouts:
        """Add the term's constants of the update, after old and reference log-probabilities."""
        return rollouts

    def counts(self, minibatch: Rollouts) -> Mapping[str, float]:
        """Counts of an optimiser step that the term divides by, by name."""
        return {}

    def __call__(
        self, policy: nn.Module, minibatch: Rollouts, scores: PolicyOutputs, counts: Denominators, step: Step
    ) -> TermLoss:
        """The term on a micro-batch, given the policy's outputs on it; nothing where it only prepares the update."""
        return TermLoss()

    def formula(self) -> str:
        """Lines below the objective's formula in the report."""
        return ""

    def metrics(self, rollouts: Rollouts, step: Step) -> Mapping[str, float | Metric]:
        """Metrics of a completed step, see `Recipe.noted`; every process calls it."""
        return {}

    def on_step_end(self, step: Step) -> None:
        """Move averages after a step."""

    def state_dict(self) -> Any:
        """State that a resumed run needs."""
        return None

    def load_state_dict(self, state: Any) -> None:
        """Restore `state_dict`."""


def with_terms(output: LossOutput, found: Sequence[TermLoss]) -> LossOutput:
    """Add loss terms to the loss of an objective."""
    terms = {name: term for each in found for name, term in each.terms.items()}
    metrics = {name: metric for each in found for name, metric in each.metrics.items()}
    if not terms:
        return LossOutput(output.loss, output.metrics | metrics)
    total = output.loss + torch.stack(list(terms.values())).sum()
    summed = {name: Metric.summed(term.detach()) for name, term in {**terms, "loss/total": total}.items()}
    return LossOutput(total, output.metrics | summed | metrics)


def score_in_chunks(
    scorer: Scorer, policy: nn.Module, rollouts: Rollouts, outputs: frozenset[str], micro_batch: int
) -> PolicyOutputs:
    """Outputs (B, T) of a policy without gradient, in chunks of rows (0 = all at once)."""
    chunks, needed = list(rollouts.micro_batches(micro_batch or rollouts.num_rows)), {"logp", *outputs}
    with torch.no_grad(), shared_prefix(policy, chunks):
        parts = [scorer(policy, chunk, outputs) for chunk in chunks]

    def joined(name: str) -> Tensor:
        values = (getattr(part, name) for part in parts)
        # each chunk is as wide as its own longest row
        return torch.cat([nn.functional.pad(x, (0, rollouts.num_decisions - x.shape[1])) for x in values])

    return PolicyOutputs(**{name: joined(name) for name in ("logp", "entropy", "values", COLLISION) if name in needed})


def single_update(trainer: BaseTrainerConfig) -> bool:
    """Whether the rows of a step serve one optimiser step only, so that old = new log-probabilities."""
    return trainer.epochs == 1 and trainer.minibatches_per_step == 1


def scores_before_update(recipe: Recipe[Any, Any], provided: frozenset[str] = frozenset()) -> bool:
    """Whether the policy scores rollouts before an update: values, entropies or old log-probabilities are missing."""
    objective = recipe.objective
    recomputed = not recipe.keeps_sampled_logp and (not single_update(recipe.config.trainer) or objective.kl_in_reward)
    asks = (objective.needs_values and "values" not in provided) or objective.needs & {"entropy_old", COLLISION}
    return bool(asks) or (recomputed and "logp_old" not in provided)


def old_in_update(recipe: Recipe[Any, Any], minibatch: Rollouts, logp: Tensor) -> Rollouts:
    """Use the update's own log-probabilities (B, T), detached, as old ones where a step has one optimiser step."""
    if recipe.keeps_sampled_logp or not single_update(recipe.config.trainer):
        return minibatch
    # at the first and only update new = old: the ratio is 1 in value and has the gradient of logp
    old = logp.detach()
    if KEEPS_OLD in minibatch.extras:
        old = torch.where(minibatch.extras[KEEPS_OLD][:, None] > 0, minibatch.logp_old, old)
    return minibatch.replace(logp_old=old)


class PrefixScope(Protocol):
    """Work that the chunks of a batch share, such as the forward pass of a prompt that several of them need."""

    def backward(self) -> None:
        """Backpropagate through the shared work; called once, after the backward pass of the last chunk."""


def shared_prefix(policy: nn.Module, chunks: Sequence[Rollouts]) -> AbstractContextManager[PrefixScope]:
    """Share a policy's `prefixes` between chunks that are scored and differentiated in the order of their groups."""
    prefixes: Any = getattr(policy, "prefixes", None)
    if prefixes is None or len(chunks) <= 1:
        return nullcontext(SimpleNamespace(backward=lambda: None))
    return prefixes.open()  # type: ignore[no-any-return]


class Reference:
    """Scores rollouts with the policy that the KL term pulls towards."""

    def __init__(self, kind: str, policy: nn.Module, decay: float = 0.0) -> None:
        self.kind, self.decay, self._policy = kind, decay, policy
        self.copy = _frozen_copy(policy) if kind in ("frozen", "ema") else None

    def score(self, scorer: Callable[[nn.Module], ScoresT]) -> ScoresT:
        """Evaluate `scorer` on the reference, without gradient."""
        with torch.no_grad():
            if self.copy is not None:
                return scorer(self.copy)
            if self.kind == "adapter":
                with self._policy.disable_adapter():  # type: ignore[operator]
                    return scorer(self._policy)
        raise RuntimeError("this run has no reference policy; set reference.kind")

    def update(self) -> None:
        """Move an ema reference towards the policy; call once per optimiser step."""
        if self.kind == "ema" and self.copy is not None:
            with torch.no_grad(), in_parts(self.copy):
                for mean, value in zip(self.copy.parameters(), self._policy.parameters(), strict=True):
                    if value.requires_grad:
                        local(mean).lerp_(local(value).to(mean.dtype), 1.0 - self.decay)

    def to(self, device: torch.device | str) -> Reference:
        """Move the copy, if there is one; returns itself."""
        if self.copy is not None and any(weight.device != torch.device(device) for weight in self.copy.parameters()):
            self.copy.to(device)
        return self

    def whole(self) -> AbstractContextManager[None]:
        """Gather its weights where they are in parts; every process calls it."""
        return whole_weights(self.copy)

    @property
    def needs_saving(self) -> bool:
        """Whether a checkpoint needs separate weights for the reference."""
        return self.copy is not None

    def save(self, folder: Path) -> None:
        """Write the reference's weights into `folder`."""
        if self.copy is not None:
            self.copy.save_pretrained(folder)  # type: ignore[operator]

    def load(self, folder: Path) -> None:
        """Read weights written by `save`."""
        if self.copy is not None:
            self.copy.load_weights(folder)  # type: ignore[operator]


def make_reference(config: ReferenceConfig, policy: Any, *, needed: bool, start: Reference | None = None) -> Reference:
    """Build the reference policy of a run."""
    kind = start_kind(policy) if config.kind == "auto" and needed else config.kind
    if needed and kind == "none":
        raise UserError("the objective has a KL term but reference.kind is none; use auto, frozen, adapter or ema")
    if kind == "adapter" and not getattr(policy, "has_adapter", False):
        raise UserError("reference.kind is adapter but the model has no LoRA adapter; set model.lora.enabled=true")
    if needed and start is not None and start.kind == kind:
        return start.to(next(policy.parameters()).device)
    return Reference(kind if needed else "none", policy, config.ema_decay)


def start_kind(policy: Any) -> str:
    """Kind of reference that is the policy at the start: without its adapter where that is new, else a frozen copy."""
    new_adapter = getattr(policy, "has_adapter", False) and not getattr(policy, "starts_from_adapter", False)
    return "adapter" if new_adapter else "frozen"


def _frozen_copy(policy: nn.Module) -> nn.Module:
    copied = copy.deepcopy(policy)
    own = {name: parameter for name, parameter in policy.named_parameters() if parameter.requires_grad}
    shared = [name for name, parameter in copied.named_parameters() if parameter is own.get(name)]
    if shared:
        raise RuntimeError(f"a copy of the policy shares weights that are trained: {', '.join(shared[:4])}")
    return copied.eval().requires_grad_(False)
