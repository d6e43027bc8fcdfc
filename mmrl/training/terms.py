"""A step of the run, and what a paper adds to the loss of its objective."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from mmrl.core.loss import Denominators, Metric
from mmrl.core.objectives.objective import LossOutput, PolicyOutputs
from mmrl.core.rollouts import Rollouts

Scorer = Callable[[nn.Module, Rollouts, frozenset[str]], PolicyOutputs]
"""Scores the decisions of rollouts under a policy, given the names of the outputs that are wanted."""


@dataclass(frozen=True)
class Step:
    """Position in a run; the trainer owns it and hands it to every stage."""

    number: int = 0
    """Steps completed before this one, 0 in the first."""
    total: int = 1
    """Steps of the whole run."""


@dataclass(frozen=True)
class TermLoss:
    """Value of a loss term on a micro-batch."""

    terms: Mapping[str, Tensor] = field(default_factory=dict)
    """Weighted scalars by metric name, such as "loss/perception", divided by counts of the whole optimiser step."""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """Further metrics; the scalars are logged under their own names."""


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


class LossTerm(ABC):
    """A term that a method adds to the loss of its objective, with everything that belongs to it.

    The trainer calls `prepare` once a step and the term itself for every micro-batch; `counts` are summed over all
    processes and handed back in `Denominators.others`.
    """

    name: ClassVar[str]
    """Key of the term's state in checkpoints."""
    outputs: frozenset[str] = frozenset()
    """Policy outputs that the term reads beside the objective's: "entropy", "values", ..."""
    gradient: Literal["always", "never", "with_signal"] = "always"
    """When the term trains the policy: always; never (it only measures); or with_signal, only in minibatches with an
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

    @abstractmethod
    def __call__(
        self, policy: nn.Module, minibatch: Rollouts, scores: PolicyOutputs, counts: Denominators, step: Step
    ) -> TermLoss:
        """The term on a micro-batch, given the policy's outputs on it."""

    def formula(self) -> str:
        """Lines below the objective's formula in the report."""
        return ""

    def metrics(self, rollouts: Rollouts, step: Step) -> dict[str, float]:
        """Metrics of a completed step; every process calls it."""
        return {}

    def on_step_end(self, step: Step) -> None:  # noqa: B027
        """Move averages after a step."""

    def state_dict(self) -> Any:
        """State that a resumed run needs."""
        return None

    def load_state_dict(self, state: Any) -> None:  # noqa: B027
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
