"""Metrics of a step and the outcome of a run, over all processes."""

from __future__ import annotations

import functools
import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from accelerate import PartialState

from mmrl.core.blocks.filter import KeepAll
from mmrl.core.loss import Metric, merge_metrics, metric_values, plain_metrics
from mmrl.core.rollouts import Rollouts
from mmrl.runs.folder import DONE, NOTHING_LEARNED
from mmrl.runs.run_log import RunLog
from mmrl.training.processes import from_all
from mmrl.training.recipe import Recipe, Step
from mmrl.training.update import Updater

LOGGER = logging.getLogger("mmrl")
CLOSE = 1e-3
"""Relative difference of a number that every process computes by itself; machines round differently."""


def collect_metrics(
    recipe: Recipe[Any, Any], rollouts: Rollouts, step: Step, *, teaches: bool = True
) -> dict[str, float]:
    """Metrics of a completed step from domain, stages and terms, of all processes; every process calls it.

    `teaches` is false where a filter left this process nothing, and its rows are there for company.
    """
    found = recipe.step_metrics(rollouts) | recipe.noted
    # cleared here, so that every step starts without the notes of the last
    recipe.noted.clear()
    for each in recipe.additions:
        found |= each.metrics(rollouts, step)
    return over_processes(found, teaches=teaches)


def over_processes(found: Mapping[str, float | Metric], *, teaches: bool = True) -> dict[str, float]:
    """Numbers of the whole run; every process calls it.

    A `Metric` is the share of one process and is merged with those of the others, of processes whose rows teach if any
    do. A number is that of the whole run already; where processes disagree, a warning names it.
    """
    # as numbers: tensors of GPUs cannot be sent
    shares = plain_metrics({name: value for name, value in found.items() if isinstance(value, Metric)})
    numbers = {name: float(value) for name, value in found.items() if not isinstance(value, Metric)}
    parts = from_all((teaches, shares, numbers))
    # without any process that teaches, those that are there for company are merged
    anywhere = any(taught for taught, _, _ in parts)
    merged = metric_values(merge_metrics(own for taught, own, _ in parts if taught or not anywhere))
    for _, _, own in parts:
        # the first process that has a number gives it
        for name, value in own.items():
            if not _same(merged.setdefault(name, value), value):
                _warn_of(name)
    return merged


def _same(one: float, other: float) -> bool:
    return one == other or math.isclose(one, other, rel_tol=CLOSE) or (math.isnan(one) and math.isnan(other))


@functools.cache
def _warn_of(name: str) -> None:
    LOGGER.warning(
        "metric %s differs between the processes of the run, and the first one's is logged; give an mmrl.core.Metric, "
        "which is added up over all of them",
        name,
    )


class RunCounts:
    """Has every process know the counts of the whole run, those in `Recipe.added`.

    Each process counts by itself; `share` adds what the others have counted since the last time.
    """

    def __init__(self, recipe: Recipe[Any, Any]) -> None:
        self._counters: dict[str, Any] = {
            name: each for name, each in recipe.added.items() if isinstance(each, Mapping)
        }
        self.begin()

    def begin(self) -> None:
        """Take the counts as those of the whole run, as they are after a resume, or when a step's are cleared."""
        self._known = {name: Counter(each) for name, each in self._counters.items()}

    def share(self) -> None:
        """Add what the other processes have counted; every process calls it."""
        new = {name: self._since(name, each) for name, each in self._counters.items()}
        # own counts are in already
        for rank, counts in enumerate(from_all(new)):
            for name, others in counts.items() if rank != PartialState().process_index else ():
                self._counters[name].update(others)
        self.begin()

    def _since(self, name: str, counter: Mapping[str, float]) -> dict[str, float]:
        return {key: count - self._known[name][key] for key, count in counter.items()}


def outcome(recipe: Recipe[Any, Any], updater: Updater, log: RunLog, steps: int) -> dict[str, str]:
    """Status of a run at its last step; if it learned nothing, also the reason, which is logged as a warning.

    Every process calls it.
    """
    learning = "critic" if recipe.critic_only else "policy"
    # 0 optimiser steps in 0 steps is no failure
    if steps and not updater.optimiser_step:
        causes = "; ".join(_causes(recipe, updater, log)) or "no group had an advantage other than 0"
        reason = f"nothing was learned: the optimiser took no step in {steps} steps, because {causes}"
        log.warnings.say(steps, NOTHING_LEARNED, f"{reason}; look at the samples in the report and their rewards")
        return {"status": NOTHING_LEARNED, "reason": reason}
    if steps and not updater.moved:
        log.warnings.say(
            steps,
            "nothing_moved",
            f"no weight of the {learning} changed in {steps} steps, of which the optimiser took "
            f"{updater.optimiser_step}; look at the rewards and at the learning rate",
        )
    return {"status": DONE}


def _causes(recipe: Recipe[Any, Any], updater: Updater, log: RunLog) -> Iterator[str]:
    """Reason why no optimiser step was taken, from the run's counts."""
    totals = log.totals
    if updater.skipped:
        yield f"{updater.skipped} were skipped for numbers that are not finite"
    if totals["groups"] and totals["unscored"] == totals["rows"]:
        yield f"none of {totals['rows']} samples could be scored"
    elif not recipe.supervised and not totals["kept"] and not isinstance(recipe.objective.filter, KeepAll):
        chosen = recipe.objective.filter
        yield f"objective.filter '{chosen.kind}' kept none of {totals['groups']} groups ({chosen.formula()})"
