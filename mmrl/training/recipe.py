"""Recipes: the stages of a method, its additional loss terms, and its forward passes over rollouts."""

from __future__ import annotations

import copy
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from mmrl.core.blocks.turns import Weight
from mmrl.core.loss import Denominators, Metric
from mmrl.core.objectives.objective import LossOutput, Objective, PolicyOutputs
from mmrl.core.payload import to_device
from mmrl.core.rollouts import COLLISION, KEEPS_OLD, Rollouts
from mmrl.core.state import ObjectiveState, Stateful
from mmrl.errors import RunError, UserError
from mmrl.rewards.reward_config import TrainerState
from mmrl.runs.export import Exported
from mmrl.runs.fingerprint import content_digest
from mmrl.runs.records import SampleRecord
from mmrl.training.evaluation import Elsewhere, Evaluation, Measure, evaluate_tasks
from mmrl.training.processes import Streams, global_advantages
from mmrl.training.scoring import scored_record
from mmrl.training.settings import BaseRunConfig, BaseTrainerConfig, ReferenceConfig, TrustRegionConfig
from mmrl.training.sharding import in_parts, local, whole_weights

PolicyT = TypeVar("PolicyT", bound=nn.Module)
TaskT = TypeVar("TaskT")
ScoresT = TypeVar("ScoresT")
WeightsT = TypeVar("WeightsT", contravariant=True)
AskedT = TypeVar("AskedT", contravariant=True)
SamplesT = TypeVar("SamplesT", covariant=True)


@dataclass(frozen=True)
class Step:
    """Position in a run; the trainer owns it and passes it to every stage."""

    number: int = 0
    """Number of completed steps, 0 in the first step."""
    total: int = 1
    """Total number of steps of the run."""


class NoUsableTasksError(RunError):
    """No task of a draw could be used, so new tasks are drawn; `rollouts` are kept if another unit has usable tasks."""

    def __init__(self, message: str, rollouts: Rollouts | None = None) -> None:
        super().__init__(message)
        self.rollouts = rollouts


class Recipe(ABC, Generic[PolicyT, TaskT]):
    """Stages of one method on one domain.

    In each step the loop calls `rollout`, `score` and `advantages`, then `loss` for every micro-batch, and sometimes
    `evaluate`. A subclass sets `policy`, `objective`, `train_tasks` and `eval_tasks` in its `__init__`; a method that
    adds to the loss sets `terms`, one that changes tasks or rows overrides `make_stages`. A recipe keeps no step
    counter and draws all random numbers from the given streams.
    """

    policy: PolicyT
    """The trained module; scores rollouts when called and has save_pretrained and load_weights."""
    objective: Objective
    """The objective to optimise; a `PreferenceObjective`, or None, in supervised recipes."""
    terms: Sequence[LossTerm] = ()
    """Additional loss terms of the method."""
    stages: Sequence[RolloutStage] = ()
    """Rollout stages of the method, in the order of their calls; set by `make_stages`."""
    train_tasks: Sequence[TaskT]
    eval_tasks: Mapping[str, Sequence[Any]]
    """Held-out splits by name; the first one is the main result."""
    supervised: ClassVar[bool] = False
    """Whether it trains on given data, without rewards; see `SupervisedRecipe`."""
    critic_only: ClassVar[bool] = False
    """Whether its loss only trains the critic and leaves the policy unchanged."""
    own_loss: ClassVar[str] = ""
    """Name of a loss that replaces that of the objective and has a gradient even if all advantages are 0."""
    start: Reference | None = None
    """The initial policy, if the recipe keeps it anyway; a KL term to it then needs no further copy."""
    reference: Reference | None = None
    """The reference policy of the step, for losses with an exact divergence from it; set before the update."""
    trust_region: TrustRegionConfig | None = None
    """Trust region of natural-gradient steps, used instead of AdamW; `trainer.learning_rate` scales each step."""
    extra_samples: int = 0
    """Samples drawn in this step in addition to the rollouts; part of the run's cost. The trainer resets it."""
    no_signal: str = "no group had a non-zero advantage"
    """Reason of a run without optimiser steps if nothing else explains it."""
    variety: str = "a higher temperature"
    """Advice on how to get more diverse samples; empty if no option does that."""
    compared: Sequence[str] = ("reward",)
    """Rewards by which samples of a task are compared: the total `reward`, or single terms; empty if they are not."""
    samples_elsewhere: bool = False
    """Whether an engine other than the policy samples; its log-probabilities are compared with those of the policy."""
    scores_apart: bool = True
    """Whether `score` treats tasks independently; otherwise it is called once with all tasks of the step."""
    samples_as_it_scores: ClassVar[bool] = False
    """Whether sampling and update compute log-probabilities with the same arithmetic, up to rounding."""

    updates: ClassVar[Callable[..., Any] | None] = None
    """Class of `mmrl.training.update.Updates` used instead of `Updater`, for example to learn from a replay."""

    def __init__(self, config: BaseRunConfig) -> None:
        self.config: Any = config
        if any(term.shuffle for term in getattr(config, "rewards", ())):
            self.scores_apart = False  # the values of all tasks are shuffled
        self.parts: dict[str, Stateful] = {}
        """Objects whose state is saved in checkpoints, by name."""
        # before data and model, so that stages can refuse data that they cannot use
        self.stages = self.make_stages()
        self.added: dict[str, Any] = {name: each for stage in self.stages for name, each in stage.added.items()}
        """Counters and lists that stages add to, by name. Workers return theirs, and processes share their counts."""
        self.opened = ExitStack()
        """Closes the workers, simulators and files that the recipe has opened."""
        self.noted: dict[str, float | Metric] = {}
        """Metrics that stages add in a step. A `Metric` is the part of this process, a number that of the run."""

    def make_stages(self) -> Sequence[RolloutStage]:
        """Return the rollout stages of the method; called first, when only `config` is set."""
        return ()

    @abstractmethod
    def rollout(self, policy: PolicyT, tasks: Sequence[TaskT], streams: Streams, step: Step) -> Rollouts:
        """Sample G sequences of decisions for each task.

        Args:
            policy: The policy in evaluation mode.
            tasks: N tasks of this process.
            streams: The only source of randomness, a stream for each task.
            step: Position in the run.

        Returns:
            N * G rows with `logp_old` (B, T) in nats as sampled, and `reward` still NaN.

        Raises:
            NoUsableTasksError: No task can be used; the trainer draws others.
        """

    @abstractmethod
    def score(self, rollouts: Rollouts, step: Step) -> Rollouts:
        """Set `reward` (B,) and `reward_terms`; NaN if a sample could not be scored."""

    @abstractmethod
    def scores(self, policy: nn.Module, rollouts: Rollouts, outputs: frozenset[str]) -> PolicyOutputs:
        """Score the decisions of rollouts under a policy or its reference; outputs (B, T), with gradient if enabled.

        `outputs` names the ones needed: "logp", "entropy", "values", "kl_ref" or those of a term.
        """

    @abstractmethod
    def measures(self, policy: PolicyT, split: str, step: Step) -> Sequence[Measure[Any]]:
        """Measures of the policy on one of `eval_tasks`; the first one is the main result."""

    def evaluate(
        self, policy: PolicyT, split: str, accelerator: Accelerator, step: Step, elsewhere: Elsewhere | None = None
    ) -> Evaluation:
        """Evaluate the policy on one of `eval_tasks`, after `step.number` steps; `elsewhere` runs trials in workers."""
        # averages of weights are in the policy only inside this context
        with self.evaluating(policy):
            measures, limit = self.measures(policy, split, step), self.config.evaluation.records
            return evaluate_tasks(measures, self.eval_tasks[split], limit, accelerator, elsewhere)

    def evaluating(self, policy: PolicyT) -> AbstractContextManager[Any]:
        """Context in which the policy has the weights to evaluate; `measures` is called inside."""
        return nullcontext()

    def thinned(self, rollouts: Rollouts) -> Rollouts:
        """Take rows that the objective will not learn from out of the mask, before the policy scores them."""
        # losses of pairs have no weights
        weight: Weight | None = None if self.supervised else getattr(self.objective, "weight", None)
        return rollouts if weight is None else weight.thinned(rollouts, self.objective_state.blocks.get("weight"))

    def advantages(self, rollouts: Rollouts, accelerator: Accelerator, step: Step) -> Rollouts:
        """Compute advantages (B, T) from rewards with the estimator of the objective, over all processes."""
        return self.estimate(rollouts, accelerator, step)

    def estimate(self, rollouts: Rollouts, accelerator: Accelerator, step: Step) -> Rollouts:
        """Advantages (B, T) of the objective over all processes; updates the state of its blocks."""
        # the state is updated in place, on the rows of all processes, and so stays the same on each
        estimator = functools.partial(self.objective.compute_advantages, state=self.objective_state)
        return global_advantages(estimator, rollouts, accelerator)

    @property
    def objective_state(self) -> ObjectiveState:
        """State of the blocks of the objective, the same in every process; kept in `parts` unless empty."""
        # on first use: it may depend on the training tasks, which a subclass sets after this class's __init__
        if "objective" not in self.parts:
            try:
                state = self.objective.state(self.train_tasks)
            except ValueError as error:
                raise UserError(f"objective.{error}") from error
            # nothing to save, so checkpoints hold no entry of it
            if not state.blocks:
                return state
            self.parts["objective"] = state
        return self.parts["objective"]  # type: ignore[return-value]

    def loss(self, policy: nn.Module, minibatch: Rollouts, denominators: Denominators, step: Step) -> LossOutput:
        """Scalar loss of a micro-batch: that of the objective plus the terms.

        `denominators` count the whole optimiser step on all processes, so that the losses of micro-batches add up.
        """
        # one forward pass for the objective and all terms
        scores = self.scores(policy, minibatch, self.loss_outputs)
        # after scoring: with a single optimiser step, these scores are the old ones
        minibatch = old_in_update(self, minibatch, scores.logp)
        # annealed coefficients follow the step, so they need no state in checkpoints
        output = self.objective.at(step.number / step.total).loss(scores, minibatch, denominators)
        if KEEPS_OLD not in minibatch.extras and is_old(self):
            # the distance of the policy to itself: what the update moves is not measured
            output.metrics.pop("policy/kl_old", None)
        return self.plus_terms(output, policy, minibatch, scores, denominators, step)

    def micro_batches(self, minibatch: Rollouts, rows: int, *, whole_groups: bool) -> Iterator[Rollouts]:
        """Split an optimiser step into parts whose losses add up; see `Rollouts.micro_batches`."""
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
        """Add the loss terms, which use the policy's `scores`, to the loss of a micro-batch."""
        return with_terms(output, [term(policy, minibatch, scores, denominators, step) for term in self.terms])

    @property
    def model_kind(self) -> str:
        """Readable kind of the trained model, such as "language model"; empty if clear from the recipe's name."""
        return str(getattr(self.policy, "model_kind", ""))

    @property
    def additions(self) -> list[LossTerm | RolloutStage]:
        """All loss terms and rollout stages."""
        return [*self.terms, *self.stages]

    def waits_for(self, step: Step) -> str:
        """Describe the data that the next step still needs from another process; empty if none. Called repeatedly."""
        return ""

    def rolls_apart(self, step: Step) -> bool:
        """Whether `rollout` treats the tasks of the step independently, so that workers can share them."""
        return all(stage.rolls_apart for stage in self.stages)

    def rollout_state(self, tasks: Sequence[TaskT]) -> Any:
        """Return what `rollout` and `score` need for these tasks besides weights and step; sent to workers."""
        return None

    def load_rollout_state(self, state: Any) -> None:
        """Load the result of `rollout_state` in a worker."""

    @property
    def keeps_sampled_logp(self) -> bool:
        """Whether the old log-probabilities are those recorded while sampling; see `trainer.old_logp`."""
        trainer, weights = self.config.trainer, self.policy.parameters()
        # low precision rounds differently in batches of other shapes, so that ratios of the first update would not be 1
        low = trainer.mixed_precision != "none" or any(weight.dtype.itemsize < 4 for weight in weights)
        exact = self.samples_as_it_scores and not low and "logp_rollout" not in self.objective.needs
        return trainer.old_logp == "sampler" or (trainer.old_logp == "auto" and exact)

    @property
    def keeps_both_logps(self) -> bool:
        """Whether to keep the sampler's log-probabilities next to the old ones, to correct or log the difference."""
        # kept in addition, since logp_old then is the trainer's own
        return (self.samples_elsewhere or "logp_rollout" in self.objective.needs) and not self.keeps_sampled_logp

    @property
    def loss_outputs(self) -> frozenset[str]:
        """Names of the policy outputs that the objective and the terms need."""
        own = self.objective
        # an exact KL is only scored if there is a reference to score it with
        read = own.needs & ({"entropy", "kl_old", "kl_ref"} if own.needs_reference else {"entropy", "kl_old"})
        read |= {"values"} if own.needs_values else set()
        return frozenset({"logp"} | read).union(*(term.outputs for term in self.terms))

    def scores_in_chunks(
        self, policy: nn.Module, rollouts: Rollouts, outputs: frozenset[str], scorer: Scorer | None = None
    ) -> PolicyOutputs:
        """Outputs (B, T) without gradient, `trainer.micro_batch` rows at a time."""
        # the same chunks as in the update, so that both fit in memory
        return score_in_chunks(scorer or self.scores, policy, rollouts, outputs, self.config.trainer.micro_batch)

    def describe(self) -> str:
        """Formula of the loss with its constants, for the report."""
        return "\n".join([self.objective.describe(), *filter(None, (each.formula() for each in self.additions))])

    def records(self, rollouts: Rollouts, limit: int) -> list[SampleRecord]:
        """Up to `limit` rollouts as text and images for the report, whole groups first."""
        shown = {row: self.describe_row(rollouts, row) for row in range(min(limit, rollouts.num_rows))}
        return [scored_record(rollouts, row, **about) for row, about in shown.items() if about is not None]

    def describe_row(self, rollouts: Rollouts, row: int) -> dict[str, Any] | None:
        """What the report shows of a row in addition to its reward and advantage: fields of `SampleRecord`, or None."""
        return None

    def step_metrics(self, rollouts: Rollouts) -> dict[str, float | Metric]:
        """Metrics of the domain after a step, as in `noted`; counts in `added` already cover all processes."""
        return {}

    def on_step_end(self, step: Step, metrics: Mapping[str, float]) -> None:
        """Update averages and adaptive coefficients after a step."""

    def state_dict(self) -> dict[str, Any]:
        """State of `parts`, `stages` and `terms`, for checkpoints."""
        terms = {term.name: term.state_dict() for term in self.terms}
        return {name: part.state_dict() for name, part in self._stateful().items()} | {"terms": terms}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        for name, part in self._stateful().items():
            if name in state:
                part.load_state_dict(state[name])
        for term in (term for term in self.terms if term.name in state["terms"]):
            term.load_state_dict(state["terms"][term.name])

    def save_parts(self, folder: Path) -> None:
        """Write additional files into a checkpoint: weights for use outside the run, or what `load_parts` reads."""

    def load_parts(self, folder: Path) -> None:
        """Read from a checkpoint what is too large for `state_dict`; called after `load_state_dict`."""

    def data_digest(self) -> str:
        """Digest of the training tasks' contents, used to detect different data when resuming."""
        # of the contents: a file may be edited and keep its name and length
        return content_digest(self.train_tasks)

    @classmethod
    def export(cls, config: Any, checkpoint: Path, output: Path) -> Exported:
        """Write the model of a checkpoint in the format of its library; returns how to load and use it."""
        raise UserError(f"{cls.__name__} has no export; the saved model is in {checkpoint}/model")

    def close(self) -> None:
        """Close everything that is open."""
        self.opened.close()

    def _stateful(self) -> dict[str, Stateful]:
        return self.parts | {stage.name: stage for stage in self.stages}


@contextmanager
def opening(opened: ExitStack) -> Iterator[ExitStack]:
    """Open the parts of a recipe; if one of them fails, the parts opened before it are closed."""
    try:
        yield opened
    except BaseException:  # a dry run ends here as well, see `mmrl.runs.dry_run`
        opened.close()
        raise


def reward_state(config: BaseRunConfig, tasks: Sequence[Any], step: Step) -> TrainerState:
    """What reward functions are told about the run: its steps and its epochs over the training tasks."""
    epoch = step.number * config.trainer.tasks_per_step / max(len(tasks), 1)
    return TrainerState(step.number, step.total, epoch)


class Sampler(Protocol[WeightsT, AskedT, SamplesT]):
    """Draws samples from the policy in this process, from an inference engine, or from workers on other machines.

    A recipe calls `load` before it samples in each step and only uses this protocol, so that the engine can be replaced
    without changing the recipe.
    """

    def load(self, weights: WeightsT, version: int) -> None:
        """Use these weights for sampling from now on."""
        ...

    def close(self) -> None:
        """Free what the sampler started; it is not used again."""
        ...

    def sample(self, tasks: Sequence[AskedT], n: int, streams: Streams) -> SamplesT:
        """Draw samples with the weights loaded last."""
        ...


Scorer = Callable[[nn.Module, Rollouts, frozenset[str]], PolicyOutputs]
"""Scores the decisions of rollouts under a policy, given the names of the requested outputs."""


@dataclass(frozen=True)
class Passes:
    """Forward passes without gradient before an update, `trainer.micro_batch` rows at a time."""

    policy: nn.Module
    """The policy before the update."""
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
    """Additional metrics; the scalars are logged under their own names."""


class LossTerm:
    """A term that a method adds to the loss of its objective, with its constants, state and metrics.

    The trainer calls `prepare` once per step and the term itself for every micro-batch; `counts` are summed over all
    processes and passed back in `Denominators.others`.
    """

    name: ClassVar[str]
    """Key of the term's state in checkpoints."""
    outputs: frozenset[str] = frozenset()
    """Policy outputs that the term needs in addition to those of the objective: "entropy", "values", ..."""
    gradient: Literal["always", "never", "with_signal"] = "always"
    """When the term trains the policy: always; never (it only measures); or with_signal, only in minibatches with a
    non-zero advantage. Other minibatches are then skipped, because AdamW would turn tiny gradients into full steps."""

    def provides(self, step: Step) -> frozenset[str]:
        """Constants of the update ("logp_old", "values", "logp_ref") that the trainer need not compute in this step."""
        return frozenset()

    def prepare(self, passes: Passes, rollouts: Rollouts, step: Step) -> Rollouts:
        """Add the constants of the term; called after old and reference log-probabilities are set."""
        return rollouts

    def counts(self, minibatch: Rollouts) -> Mapping[str, float]:
        """Denominators of the term for an optimiser step, by name."""
        return {}

    def __call__(
        self, policy: nn.Module, minibatch: Rollouts, scores: PolicyOutputs, counts: Denominators, step: Step
    ) -> TermLoss:
        """Compute the term on a micro-batch from the policy outputs; empty if it only prepares the update."""
        return TermLoss()

    def formula(self) -> str:
        """Lines below the objective's formula in the report."""
        return ""

    def metrics(self, rollouts: Rollouts, step: Step) -> Mapping[str, float | Metric]:
        """Metrics of a completed step, as in `Recipe.noted`; all processes must call it."""
        return {}

    def on_step_end(self, step: Step) -> None:
        """Update averages after a step."""

    def state_dict(self) -> Any:
        """State that a resumed run needs."""
        return None

    def load_state_dict(self, state: Any) -> None:
        """Restore `state_dict`."""


class RolloutStage:
    """A stage that a method adds to sampling, with its state and metrics.

    The loop calls `before` with tasks, `after` with the rows sampled for them, and `scored` when these have rewards.
    All three run without gradient and draw random numbers from `streams` only, which has a stream for each task.
    Rollout workers call them for a part of the tasks, with the state of the training process; what they count or
    collect for later belongs in `added`.
    """

    name: ClassVar[str]
    """Key of the stage's state in checkpoints, next to those of `Recipe.parts`."""
    rolls_apart: bool = True
    """Whether `before` and `after` treat the tasks of a step independently, so that workers can share them."""
    added: Mapping[str, Any] = MappingProxyType({})
    """Counters and lists that the stage adds to, by name; see `Recipe.added`."""

    def check_data(self, tasks: Sequence[Any]) -> None:
        """Reject training tasks that the stage cannot use, before the model is loaded; raises UserError."""

    def before(self, policy: Any, tasks: Sequence[Any], streams: Streams, step: Step) -> Sequence[Any]:
        """Return a task for each of `tasks`, to be sampled instead; evaluations keep the original ones."""
        return tasks

    def after(self, policy: Any, rollouts: Rollouts, streams: Streams, step: Step) -> Rollouts:
        """Change sampled rows that have no rewards yet; `streams` has a stream for each group."""
        return rollouts

    def scored(self, policy: Any, rollouts: Rollouts, streams: Streams, step: Step) -> Rollouts:
        """Change rows that have rewards, of all tasks of the step only if `Recipe.scores_apart` is False."""
        return rollouts

    def formula(self) -> str:
        """Lines below the objective's formula in the report."""
        return ""

    def metrics(self, rollouts: Rollouts, step: Step) -> Mapping[str, float | Metric]:
        """Metrics of a completed step, as in `Recipe.noted`; all processes must call it."""
        return {}

    def on_step_end(self, step: Step) -> None:
        """Update the state after a step, to the same on all processes; `merge_in_order` joins what they collected."""

    def state_dict(self) -> Any:
        """State that workers and a resumed run need."""
        return None

    def load_state_dict(self, state: Any) -> None:
        """Restore `state_dict`."""


def with_terms(output: LossOutput, found: Sequence[TermLoss]) -> LossOutput:
    """Add loss terms to the loss of an objective."""
    terms = {name: term for each in found for name, term in each.terms.items()}
    metrics = {name: metric for each in found for name, metric in each.metrics.items()}
    # without terms the objective's metrics stay as they are, "loss/total" included
    if not terms:
        return LossOutput(output.loss, output.metrics | metrics)
    total = output.loss + torch.stack(list(terms.values())).sum()
    # the objective's total is replaced by that of all terms
    summed = {name: Metric.summed(term.detach()) for name, term in {**terms, "loss/total": total}.items()}
    return LossOutput(total, output.metrics | summed | metrics)


def score_in_chunks(
    scorer: Scorer, policy: nn.Module, rollouts: Rollouts, outputs: frozenset[str], micro_batch: int
) -> PolicyOutputs:
    """Outputs (B, T) of a policy without gradient, in chunks of rows (0 = all rows together).

    Rows without a decision under the mask do not pass the policy; their outputs are 0.
    """
    rows = rows_under_mask(rollouts)
    seen = rollouts if rows is None else rollouts.select(rows)
    # whole groups together where they fit: a shared prompt is encoded once per chunk
    chunks, needed = list(seen.micro_batches(micro_batch or seen.num_rows)), {"logp", *outputs}
    # the prompt of a group that is split over chunks is encoded once, too
    with torch.no_grad(), shared_prefix(policy, chunks):
        parts = [scorer(policy, chunk, outputs) for chunk in chunks]

    def joined(name: str) -> Tensor:
        values = (getattr(part, name) for part in parts)
        # each chunk is as wide as its own longest row
        found = torch.cat([nn.functional.pad(x, (0, rollouts.num_decisions - x.shape[1])) for x in values])
        if rows is None:
            return found
        return found.new_zeros(rollouts.mask.shape).index_copy(0, to_device(rows, found.device), found)

    return PolicyOutputs(**{name: joined(name) for name in ("logp", "entropy", "values", COLLISION) if name in needed})


def rows_under_mask(rollouts: Rollouts) -> Tensor | None:
    """Indices (b,) on the host of the rows with a decision under the mask; None if these are all, or none."""
    found = rollouts.host.mask.any(1)
    return torch.nonzero(found).flatten() if bool(found.any()) and not bool(found.all()) else None


def single_update(trainer: BaseTrainerConfig) -> bool:
    """Whether the rows of a step are used for a single optimiser step, so that old = new log-probabilities."""
    # then the policy that scores in the loss is the old policy itself
    return trainer.epochs == 1 and trainer.minibatches_per_step == 1


def scores_before_update(recipe: Recipe[Any, Any], provided: frozenset[str] = frozenset()) -> bool:
    """Whether a pass is needed before the update, for values, entropies or old log-probabilities."""
    objective = recipe.objective
    # one update needs no pass (`old_in_update`), unless the KL is taken off the reward before it
    recomputed = not recipe.keeps_sampled_logp and (not single_update(recipe.config.trainer) or objective.kl_in_reward)
    asks = (objective.needs_values and "values" not in provided) or objective.needs & {"entropy_old", COLLISION}
    return bool(asks) or (recomputed and "logp_old" not in provided)


def is_old(recipe: Recipe[Any, Any]) -> bool:
    """Whether the policy in the loss is the old policy: a step has one optimiser step, and scores before it itself."""
    return not recipe.keeps_sampled_logp and single_update(recipe.config.trainer)


def old_in_update(recipe: Recipe[Any, Any], minibatch: Rollouts, logp: Tensor) -> Rollouts:
    """Use the log-probabilities (B, T) of the update, detached, as old ones if a step has a single optimiser step.

    `logp_old` is one of three: the sampler's (`Recipe.keeps_sampled_logp`); a pass before the update, if several
    optimiser steps follow (`update.update_constants`); or these.
    """
    if not is_old(recipe):
        return minibatch
    # at the first and only update new = old: the ratio is 1 in value and has the gradient of logp
    old = logp.detach()
    if KEEPS_OLD in minibatch.extras:
        # replayed rows come from an older policy: their ratio is not 1 even at the first update
        old = torch.where(minibatch.extras[KEEPS_OLD][:, None] > 0, minibatch.logp_old, old)
    return minibatch.replace(logp_old=old)


class PrefixScope(Protocol):
    """Work shared by the chunks of a batch, such as the forward pass of a common prompt."""

    def backward(self) -> None:
        """Backpropagate through the shared work; called once, after the backward pass of the last chunk."""


def shared_prefix(policy: nn.Module, chunks: Sequence[Rollouts]) -> AbstractContextManager[PrefixScope]:
    """Share a policy's `prefixes` between chunks that are processed in the order of their groups."""
    prefixes: Any = getattr(policy, "prefixes", None)
    # a single chunk shares nothing
    if prefixes is None or len(chunks) <= 1:
        return nullcontext(SimpleNamespace(backward=lambda: None))
    return prefixes.open()


class Reference:
    """The reference policy of the KL term."""

    def __init__(self, kind: str, policy: nn.Module, decay: float = 0.0) -> None:
        self.kind = kind
        self.decay = decay
        self._policy = policy
        # an adapter needs no copy: the model without it is the reference
        self.copy = _frozen_copy(policy) if kind in ("frozen", "ema") else None
        if kind == "ema" and any(weight.requires_grad and weight.dtype.itemsize < 4 for weight in policy.parameters()):
            raise UserError("reference.kind ema requires float32 weights: others round the steps of the average away")

    def score(self, scorer: Callable[[nn.Module], ScoresT]) -> ScoresT:
        """Call `scorer` on the reference, without gradient."""
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
            # each process averages its own parts; both sides are sharded alike
            with torch.no_grad(), in_parts(self.copy):
                for mean, value in zip(self.copy.parameters(), self._policy.parameters(), strict=True):
                    if value.requires_grad:  # frozen weights are equal in both
                        # mean <- decay mean + (1 - decay) value, in the precision of the mean
                        local(mean).lerp_(local(value).to(mean.dtype), 1.0 - self.decay)

    def to(self, device: torch.device | str) -> Reference:
        """Move the copy, if there is one; returns itself."""
        if self.copy is not None and any(weight.device != torch.device(device) for weight in self.copy.parameters()):
            self.copy.to(device)
        return self

    def whole(self) -> AbstractContextManager[None]:
        """Context with gathered weights, if they are sharded; all processes must enter it."""
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
    # auto: the cheapest kind that fits the model
    kind = start_kind(policy) if config.kind == "auto" and needed else config.kind
    if needed and kind == "none":
        raise UserError("the objective has a KL term but reference.kind is none; use auto, frozen, adapter or ema")
    if kind == "adapter" and not getattr(policy, "has_adapter", False):
        raise UserError("reference.kind is adapter but the model has no LoRA adapter; set model.lora.enabled=true")
    # the recipe has this copy already
    if needed and start is not None and start.kind == kind:
        return start.to(next(policy.parameters()).device)
    return Reference(kind if needed else "none", policy, config.ema_decay)


def start_kind(policy: Any) -> str:
    """Kind of reference for the initial policy: the model without its adapter if the adapter is new, else a copy."""
    new_adapter = getattr(policy, "has_adapter", False) and not getattr(policy, "starts_from_adapter", False)
    return "adapter" if new_adapter else "frozen"


def _frozen_copy(policy: nn.Module) -> nn.Module:
    copied = copy.deepcopy(policy)
    own = {name: parameter for name, parameter in policy.named_parameters() if parameter.requires_grad}
    # a class may keep references in __deepcopy__; a trained weight in the copy would move with the policy
    shared = [name for name, parameter in copied.named_parameters() if parameter is own.get(name)]
    if shared:
        raise RuntimeError(f"a copy of the policy shares weights that are trained: {', '.join(shared[:4])}")
    return copied.eval().requires_grad_(False)
