"""Sampling and scoring of tasks, and trials of evaluations: in this process, or in workers with a copy of the recipe.

A step's tasks are cut into units. A worker samples and scores a unit with the weights of the step, and sends back its
rows with whatever the recipe noted meanwhile. Random streams belong to the places of the tasks in the step, so a unit
has the same rows wherever it is sampled, and once more if its worker is lost; rows come back in the order of the tasks.
The units of an evaluation are the batches that one process would run, so its numbers are the same to the last bit.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from accelerate import Accelerator

from mmrl.core.rollouts import PLACE, Rollouts
from mmrl.errors import RunError, UserError
from mmrl.training.evaluation import Evaluation, Row, Trial
from mmrl.training.processes import Streams
from mmrl.training.recipe import NoUsableTasksError, Recipe, Step
from mmrl.training.scoring import EveryRewardFailedError

LOGGER = logging.getLogger("mmrl")


class Rollers(Protocol):
    """Samples and scores tasks."""

    looks_ahead: bool
    """Whether the tasks of a step are begun during the update before."""

    def load(self, step: Step) -> None:
        """Sample with the policy's weights as they are now from here on; called once a step."""
        ...

    def begin(self, tasks: Sequence[Any], streams: Streams, step: Step) -> None:
        """Sample the tasks that `rollout` will be asked for next, and return at once."""
        ...

    def rollout(self, tasks: Sequence[Any], streams: Streams, step: Step) -> Rollouts:
        """Rows of the tasks; see `Recipe.rollout`."""
        ...

    def score(self, rollouts: Rollouts, step: Step) -> Rollouts:
        """The same rows with their rewards; see `Recipe.score`."""
        ...

    def evaluate(self, split: str, step: Step) -> Evaluation:
        """Measure the policy as it is now; see `Recipe.evaluate`."""
        ...

    def metrics(self) -> dict[str, float]:
        """Metrics of a completed step; every process calls it."""
        ...

    def close(self) -> None:
        """End the workers."""
        ...


@dataclass(frozen=True)
class Unit:
    """Tasks of a step that are sampled together."""

    tasks: Sequence[Any]
    streams: Streams
    step: Step


@dataclass(frozen=True)
class TrialUnit:
    """Trials of an evaluation that are run together."""

    tasks: Sequence[Trial[Any]]
    start: int
    """Place of the first one among the trials of the process."""
    split: str
    measure: int
    """Number of the measure among those of the split."""
    step: Step


@dataclass
class Outcome:
    """Rows of a unit."""

    rollouts: Rollouts | None = None
    """None where no task could be used, where the unit was lost, and of an evaluation."""
    error: RunError | None = None
    """Reason why none of the rows teaches anything, which ends the run only if it holds for all units of a step."""
    added: Mapping[str, Any] = field(default_factory=dict)
    """Counts and entries that the recipe noted for later stages."""
    logs: Sequence[tuple[int, str]] = ()
    """Level and text of what was logged."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Files that were written into the run's folder, such as tracebacks, by their path there."""
    seconds: float = 0.0
    lost: bool = False
    """Whether the tasks are left out because every worker that tried them was lost."""
    rows: Sequence[Row] = ()
    """Rows of an evaluation."""


class LocalRollers:
    """Samples and scores in this process."""

    def __init__(self, recipe: Recipe[Any, Any], accelerator: Accelerator, unit: int = 0) -> None:
        self._recipe, self._accelerator, self._unit = recipe, accelerator, unit

    looks_ahead = False

    def load(self, step: Step) -> None:
        """The policy is at hand."""

    def begin(self, tasks: Sequence[Any], streams: Streams, step: Step) -> None:
        """Nothing is sampled beside the update."""

    def rollout(self, tasks: Sequence[Any], streams: Streams, step: Step) -> Rollouts:
        """Rows of the tasks, unit by unit where they are cut."""
        if not self._unit or not self._recipe.rolls_apart(step):
            with torch.no_grad(), self._accelerator.autocast():
                rollouts = self._recipe.rollout(self._recipe.policy, tasks, streams, step)
            return placed(rollouts, Unit(tasks, streams, step), self._recipe)
        units = cut(tasks, streams, step, self._unit)
        return joined([sampled(self._recipe, unit, self._accelerator) for unit in units])

    def score(self, rollouts: Rollouts, step: Step) -> Rollouts:
        """The rows with their rewards."""
        done = self._unit and self._recipe.rolls_apart(step) and self._recipe.scores_apart
        return rollouts if done else self._recipe.score(rollouts, step)

    def evaluate(self, split: str, step: Step) -> Evaluation:
        """Measure the policy."""
        return self._recipe.evaluate(self._recipe.policy, split, self._accelerator, step)

    def metrics(self) -> dict[str, float]:
        """Nothing to report."""
        return {}

    def close(self) -> None:
        """Nothing to end."""


def cut(tasks: Sequence[Any], streams: Streams, step: Step, size: int) -> list[Unit]:
    """Units of some tasks each, in order."""
    spans = [range(start, min(start + size, len(tasks))) for start in range(0, len(tasks), size)]
    return [Unit([tasks[number] for number in span], streams.select(span), step) for span in spans]


def measured(recipe: Recipe[Any, Any], unit: TrialUnit, accelerator: Accelerator) -> Outcome:
    """Rows of a unit of an evaluation."""
    measure = recipe.measures(recipe.policy, unit.split, unit.step)[unit.measure]
    with torch.no_grad(), accelerator.autocast():
        return Outcome(rows=measure.run(unit.tasks, unit.start))


def sampled(recipe: Recipe[Any, Any], unit: Unit, accelerator: Accelerator) -> Outcome:
    """Rows of a unit, scored if that needs no others."""
    try:
        with torch.no_grad(), accelerator.autocast():
            rollouts = recipe.rollout(recipe.policy, unit.tasks, unit.streams, unit.step)
        rollouts = placed(rollouts, unit, recipe)
        return Outcome(recipe.score(rollouts, unit.step) if recipe.scores_apart else rollouts)
    except NoUsableTasksError as error:
        left = None if error.rollouts is None else placed(error.rollouts, unit, recipe)
        return Outcome(_scored(recipe, left, unit.step), _without_rows(error))
    except RunError as error:
        if not isinstance(getattr(error, "rollouts", None), Rollouts):
            raise
        return Outcome(placed(error.rollouts, unit, recipe), _without_rows(error))  # type: ignore[attr-defined]


def placed(rollouts: Rollouts, unit: Unit, recipe: Recipe[Any, Any]) -> Rollouts:
    """Rollouts that hold the place of each group's task in the step."""
    if PLACE in rollouts.extras:
        return rollouts
    if rollouts.num_groups != len(unit.tasks) and not recipe.supervised and recipe.objective_state.blocks:
        raise RunError(
            f"the rollout of {len(unit.tasks)} tasks has {rollouts.num_groups} groups, and '{recipe.objective.name}' "
            "remembers tasks: a recipe that leaves some out returns streams.among(tasks, kept).noted(rollouts)"
        )
    return unit.streams.noted(rollouts)


def _scored(recipe: Recipe[Any, Any], rollouts: Rollouts | None, step: Step) -> Rollouts | None:
    return recipe.score(rollouts, step) if rollouts is not None and recipe.scores_apart else rollouts


def _without_rows(error: RunError) -> RunError:
    return NoUsableTasksError(str(error)) if isinstance(error, NoUsableTasksError) else RunError(str(error))


def joined(outcomes: Sequence[Outcome]) -> Rollouts:
    """The rows of all units in order; raises what holds for all of them."""
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    rows = [outcome.rollouts for outcome in outcomes if outcome.rollouts is not None]
    if len(errors) == len(outcomes):
        error = next((error for error in errors if not isinstance(error, NoUsableTasksError)), errors[0])
        if rows and not isinstance(error, NoUsableTasksError):
            raise EveryRewardFailedError(str(error).partition(": ")[2], Rollouts.concat(rows))
        raise error
    return Rollouts.concat(rows)


@dataclass(frozen=True)
class Hello:
    """A worker's answer once it can sample."""

    host: str
    device: str


@dataclass(frozen=True)
class Refusal:
    """A worker's answer if it cannot."""

    reason: str


@dataclass(frozen=True)
class Lost:
    """A worker has gone, with what it was doing."""

    reason: str


@dataclass(frozen=True)
class Raised:
    """A unit has raised an error that no other worker would avoid."""

    error: BaseException
    trace: str


class Crew(Protocol):
    """Workers of an engine, each with a number."""

    def start(self) -> int:
        """Begin to start a worker, which answers with Hello, Refusal or Lost."""
        ...

    def ask(self, worker: int) -> None:
        """Ask a worker whether it is still there, which it answers with Hello, or Lost for it."""
        ...

    def send(self, worker: int, unit: Unit | TrialUnit) -> None:
        """Give a worker a unit, which it answers with an Outcome, or which ends in Raised or Lost."""
        ...

    def wait(self) -> tuple[int, Hello | Refusal | Outcome | Raised | Lost]:
        """The next answer, with the number of its worker; a worker that is lost is gone."""
        ...


class Dealer:
    """Gives units to workers that have answered, in order, and those of lost workers to others.

    Args:
        crew: the workers.
        size: wanted number of workers.
        tries: workers that may be lost over a unit before it is given up.
    """

    def __init__(self, crew: Crew, size: int, tries: int) -> None:
        self._crew, self._size, self._tries = crew, size, tries
        self._free: deque[int] = deque()
        self._in_vain = 0
        """Workers that were lost one after the other before they had answered."""
        self.again = 0
        """Units that were given to a worker once more."""
        for _ in range(size):
            crew.start()

    def start(self) -> Hello:
        """Wait for the first worker; raises UserError where it refuses, RunError where none starts."""
        while True:
            worker, answer = self._crew.wait()
            if isinstance(answer, Hello):
                self._free.append(worker)
                return answer
            self._replace(answer)

    def run(self, units: Sequence[Unit | TrialUnit]) -> Iterator[Outcome]:
        """The outcome of each unit, in their order, as soon as those before it are there."""
        waiting, running = deque(range(len(units))), dict[int, int]()
        lost: Counter[int] = Counter()
        done: dict[int, Outcome] = {}
        following = 0
        while True:
            while waiting and self._free:
                worker = self._free.popleft()
                running[worker] = waiting.popleft()
                self._crew.send(worker, units[running[worker]])
            while following in done:
                yield done.pop(following)
                following += 1
            if following == len(units):
                return
            worker, answer = self._crew.wait()
            number = running.pop(worker, None)
            if isinstance(answer, Hello | Outcome):
                self._in_vain = 0
                self._free.append(worker)
                if isinstance(answer, Outcome) and number is not None:
                    done[number] = answer
            else:
                self._replace(answer)
                if number is not None:
                    lost[number] += 1
                    if lost[number] < self._tries:
                        self.again += 1
                        waiting.appendleft(number)
                    else:
                        done[number] = _given_up(units[number], lost[number], answer)

    def _replace(self, answer: Refusal | Outcome | Raised | Lost) -> None:
        """Start another worker for one that was lost; raise anything else."""
        if isinstance(answer, Refusal):
            raise UserError(answer.reason)
        if isinstance(answer, Raised):
            for line in answer.trace.splitlines():
                LOGGER.error("  %s", line)
            raise answer.error
        assert isinstance(answer, Lost)
        self._in_vain += 1
        if self._in_vain >= self._size + self._tries:
            raise RunError(f"{self._in_vain} rollout workers in a row were lost; the last one: {answer.reason}")
        LOGGER.warning("a rollout worker was lost and another one takes its place: %s", answer.reason)
        self._crew.start()
        while self._free:  # those on the same machine may have gone too: work goes to workers that have answered
            self._crew.ask(self._free.popleft())


def _given_up(unit: Unit | TrialUnit, times: int, answer: Any) -> Outcome:
    reason = f"{times} rollout workers were lost over the same tasks; the last one: {answer.reason}"
    whole = "evaluation" if isinstance(unit, TrialUnit) else "step"
    LOGGER.error("the %s goes on without %d of its tasks: %s", whole, len(unit.tasks), reason)
    return Outcome(error=RunError(reason), lost=True)
