"""Sampling and scoring of tasks, and trials of evaluations: in this process, or in workers with a copy of the recipe.

The tasks of a step are split into units. A worker samples and scores a unit with the weights of the step, and returns
its rows together with everything the recipe recorded. Random streams belong to the positions of tasks in the step, so a
unit gives the same rows on any worker, also if it is repeated after its worker was lost. Rows are returned in task
order. The units of an evaluation are the batches that a single process would run, so its results are bit-identical.
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
    """Whether sampling of a step starts during the previous update."""

    def load(self, step: Step) -> None:
        """Use the current weights of the policy from now on; called once per step."""
        ...

    def begin(self, tasks: Sequence[Any], streams: Streams, step: Step) -> None:
        """Start sampling the tasks of the next `rollout` call, and return immediately."""
        ...

    def rollout(self, tasks: Sequence[Any], streams: Streams, step: Step) -> Rollouts:
        """Rows of the tasks; see `Recipe.rollout`."""
        ...

    def score(self, rollouts: Rollouts, streams: Streams, step: Step) -> Rollouts:
        """The same rows with their rewards, given the streams of `rollout`; see `Recipe.score`."""
        ...

    def evaluate(self, split: str, step: Step) -> Evaluation:
        """Evaluate the current policy; see `Recipe.evaluate`."""
        ...

    def metrics(self) -> dict[str, float]:
        """Metrics of a completed step; all processes must call it."""
        ...

    def close(self) -> None:
        """End the workers."""
        ...


@dataclass(frozen=True)
class Unit:
    """Tasks of a step to sample together."""

    tasks: Sequence[Any]
    streams: Streams
    step: Step


@dataclass(frozen=True)
class TrialUnit:
    """Trials of an evaluation to run together."""

    tasks: Sequence[Trial[Any]]
    start: int
    """Index of the first one among the trials of the process."""
    split: str
    measure: int
    """Index of the measure within the split."""
    step: Step


@dataclass
class UnitOutcome:
    """Rows of a unit."""

    rollouts: Rollouts | None = None
    """None if no task could be used, if the unit was lost, or for an evaluation."""
    error: RunError | None = None
    """Why no row can be trained on; ends the run only if it happens to all units of a step."""
    added: Mapping[str, Any] = field(default_factory=dict)
    """Counts and entries that the recipe recorded for later stages."""
    logs: Sequence[tuple[int, str]] = ()
    """Level and text of log messages."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Files written for the run folder, such as tracebacks, by relative path."""
    seconds: float = 0.0
    lost: bool = False
    """Whether the tasks are skipped because every worker that tried them was lost."""
    rows: Sequence[Row] = ()
    """Rows of an evaluation."""


class LocalRollers:
    """Samples and scores in this process."""

    def __init__(self, recipe: Recipe[Any, Any], accelerator: Accelerator, unit: int = 0) -> None:
        self._recipe = recipe
        self._accelerator = accelerator
        self._unit = unit

    looks_ahead = False

    def load(self, step: Step) -> None:
        """Do nothing: the policy is in this process."""

    def begin(self, tasks: Sequence[Any], streams: Streams, step: Step) -> None:
        """Do nothing: there is no sampling during the update."""

    def rollout(self, tasks: Sequence[Any], streams: Streams, step: Step) -> Rollouts:
        """Rows of the tasks, unit by unit if a unit size is set."""
        # recipes whose tasks depend on each other cannot be cut into units
        if not self._unit or not self._recipe.rolls_apart(step):
            return rolled(self._recipe, Unit(tasks, streams, step), self._accelerator)
        units = cut(tasks, streams, step, self._unit)
        return joined([sampled(self._recipe, unit, self._accelerator) for unit in units])

    def score(self, rollouts: Rollouts, streams: Streams, step: Step) -> Rollouts:
        """The rows with their rewards."""
        done = self._unit and self._recipe.rolls_apart(step) and self._recipe.scores_apart
        # `sampled` has scored the units already
        return rollouts if done else scored(self._recipe, rollouts, streams, step)

    def evaluate(self, split: str, step: Step) -> Evaluation:
        """Measure the policy."""
        return self._recipe.evaluate(self._recipe.policy, split, self._accelerator, step)

    def metrics(self) -> dict[str, float]:
        """Nothing to report."""
        return {}

    def close(self) -> None:
        """Nothing to end."""


def cut(tasks: Sequence[Any], streams: Streams, step: Step, size: int) -> list[Unit]:
    """Split tasks into units of `size`, in order."""
    # in order, and all but the last full: units must not depend on the number of workers
    spans = [range(start, min(start + size, len(tasks))) for start in range(0, len(tasks), size)]
    return [Unit([tasks[number] for number in span], streams.select(span), step) for span in spans]


def measured(recipe: Recipe[Any, Any], unit: TrialUnit, accelerator: Accelerator) -> UnitOutcome:
    """Run a unit of an evaluation."""
    # rebuilt in the worker, since a measure holds the policy
    measure = recipe.measures(recipe.policy, unit.split, unit.step)[unit.measure]
    with torch.no_grad(), accelerator.autocast():
        return UnitOutcome(rows=measure.run(unit.tasks, unit.start))


def sampled(recipe: Recipe[Any, Any], unit: Unit, accelerator: Accelerator) -> UnitOutcome:
    """Sample a unit, and score it if its score does not depend on other units."""

    def rewarded(rollouts: Rollouts) -> Rollouts:
        return scored(recipe, rollouts, unit.streams, unit.step) if recipe.scores_apart else rollouts

    try:
        return UnitOutcome(rewarded(rolled(recipe, unit, accelerator)))
    except NoUsableTasksError as error:
        return UnitOutcome(None if error.rollouts is None else rewarded(error.rollouts), _without_rows(error))
    except RunError as error:
        # a reward that failed on every row of the unit; those of other units may be fine, so `joined` decides
        if not isinstance(getattr(error, "rollouts", None), Rollouts):
            raise
        return UnitOutcome(placed(error.rollouts, unit, recipe), _without_rows(error))  # type: ignore[attr-defined]


def rolled(recipe: Recipe[Any, Any], unit: Unit, accelerator: Accelerator) -> Rollouts:
    """Sample a unit between the recipe's stages; the rows have no rewards yet."""
    policy, streams, step = recipe.policy, unit.streams, unit.step

    def changed(rollouts: Rollouts) -> Rollouts:
        rollouts = placed(rollouts, unit, recipe)
        for stage in recipe.stages:
            rollouts = stage.after(policy, rollouts, streams.of_groups(rollouts), step)
        return rollouts

    with torch.no_grad(), accelerator.autocast():
        asked = unit.tasks
        for stage in recipe.stages:
            asked = stage.before(policy, asked, streams, step)
            if len(asked) != len(unit.tasks):
                # streams belong to the places of tasks
                raise ValueError(
                    f"stage '{stage.name}' returned {len(asked)} tasks for {len(unit.tasks)}; it must return one "
                    "per task"
                )
        try:
            return changed(recipe.rollout(policy, asked, streams, step))
        except NoUsableTasksError as error:
            error.rollouts = None if error.rollouts is None else changed(error.rollouts)
            raise


def scored(recipe: Recipe[Any, Any], rollouts: Rollouts, streams: Streams, step: Step) -> Rollouts:
    """Rows with their rewards, as the recipe's stages leave them; `streams` are those of the tasks."""
    failure: EveryRewardFailedError | None = None
    try:
        rollouts = recipe.score(rollouts, step)
    except EveryRewardFailedError as error:
        rollouts, failure = error.rollouts, error
    with torch.no_grad():
        for stage in recipe.stages:
            rollouts = stage.scored(recipe.policy, rollouts, streams.of_groups(rollouts), step)
    if failure is not None:
        # with what the stages add: these rows stay in the step if those of other processes could be scored
        failure.rollouts = rollouts
        raise failure
    return rollouts


def placed(rollouts: Rollouts, unit: Unit, recipe: Recipe[Any, Any]) -> Rollouts:
    """Record the position of each group's task in the step."""
    # the recipe has placed them itself
    if PLACE in rollouts.extras:
        return rollouts
    # an adaptive order counts results by task, and cannot tell which ones are missing
    if rollouts.num_groups != len(unit.tasks) and not recipe.supervised and recipe.objective_state.blocks:
        raise RunError(
            f"the rollout of {len(unit.tasks)} tasks has {rollouts.num_groups} groups, but "
            f"'{recipe.objective.name}' tracks tasks: a recipe that skips tasks must return streams.among(tasks, "
            "kept).noted(rollouts)"
        )
    return unit.streams.noted(rollouts)


def _without_rows(error: RunError) -> RunError:
    # without its rows: an error is pickled on its way back, and they are sent once already
    return NoUsableTasksError(str(error)) if isinstance(error, NoUsableTasksError) else RunError(str(error))


def joined(outcomes: Sequence[UnitOutcome]) -> Rollouts:
    """Join the rows of all units in order; raises an error if all units failed."""
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    rows = [outcome.rollouts for outcome in outcomes if outcome.rollouts is not None]
    # one unit that worked is enough for the step to go on
    if len(errors) == len(outcomes):
        # a broken reward says more than tasks that could not be used, after which others would be drawn
        error = next((error for error in errors if not isinstance(error, NoUsableTasksError)), errors[0])
        if rows and not isinstance(error, NoUsableTasksError):
            # the message of the unit, without its own prefix
            raise EveryRewardFailedError(str(error).partition(": ")[2], Rollouts.concat(rows))
        raise error
    return Rollouts.concat(rows)


@dataclass(frozen=True)
class Hello:
    """Reply of a worker that is ready."""

    host: str
    device: str


@dataclass(frozen=True)
class NotStarted:
    """Reply of a worker that cannot start."""

    reason: str


@dataclass(frozen=True)
class Lost:
    """A worker is gone, and its work is lost."""

    reason: str


@dataclass(frozen=True)
class Raised:
    """A unit raised an error that any other worker would raise too."""

    error: BaseException
    trace: str


class Crew(Protocol):
    """The numbered workers of an engine."""

    def start(self) -> int:
        """Start a worker in the background; it replies with Hello, NotStarted or Lost."""
        ...

    def ask(self, worker: int) -> None:
        """Ping a worker; the reply is Hello, or Lost if it is gone."""
        ...

    def send(self, worker: int, unit: Unit | TrialUnit) -> None:
        """Send a unit to a worker; the reply is a UnitOutcome, Raised or Lost."""
        ...

    def wait(self) -> tuple[int, Hello | NotStarted | UnitOutcome | Raised | Lost]:
        """Wait for the next reply and return it with its worker's number; lost workers are removed."""
        ...


TRIES = 3
"""Number of workers that may be lost on the same tasks before the step continues without these tasks."""


class Dealer:
    """Hands out units in order to workers that have replied, and units of lost workers to others.

    Args:
        crew: the workers.
        size: number of workers.
        tries: number of workers that may be lost on a unit before it is given up.
    """

    def __init__(self, crew: Crew, size: int, tries: int = TRIES) -> None:
        self._crew = crew
        self._size = size
        self._tries = tries
        # free workers in the order in which they became free
        self._free: deque[int] = deque()
        self._in_vain = 0
        """Workers lost in a row without any reply in between."""
        self.again = 0
        """Units that were repeated."""
        # all at once, since starting one takes as long as loading the model
        for _ in range(size):
            crew.start()

    def start(self) -> Hello:
        """Wait for the first worker; raises UserError if it cannot start, RunError if no worker starts."""
        while True:
            worker, answer = self._crew.wait()
            if isinstance(answer, Hello):
                # one worker is enough to begin; the others join when they answer
                self._free.append(worker)
                return answer
            self._replace(answer)

    def run(self, units: Sequence[Unit | TrialUnit]) -> Iterator[UnitOutcome]:
        """Yield the outcomes in order of the units, each as soon as all earlier ones are complete."""
        # a queue of positions, since a lost unit goes back to its head
        waiting, running = deque(range(len(units))), dict[int, int]()
        lost: Counter[int] = Counter()
        # outcomes that wait for those of earlier units
        done: dict[int, UnitOutcome] = {}
        following = 0
        while True:
            # before yielding, so that no worker idles while the caller works on rows
            while waiting and self._free:
                worker = self._free.popleft()
                running[worker] = waiting.popleft()
                # an idle worker takes the next unit, whichever it is: streams belong to tasks, so rows do not depend on
                # it
                self._crew.send(worker, units[running[worker]])
            # rows are returned in order, though units finish in any order
            while following in done:
                yield done.pop(following)
                following += 1
            if following == len(units):
                return
            worker, answer = self._crew.wait()
            # None for a worker that has just started or answered a ping
            number = running.pop(worker, None)
            if isinstance(answer, Hello | UnitOutcome):
                # an answer of any kind shows that workers can live
                self._in_vain = 0
                self._free.append(worker)
                if isinstance(answer, UnitOutcome) and number is not None:
                    done[number] = answer
            else:
                self._replace(answer)
                if number is not None:
                    lost[number] += 1
                    if lost[number] < self._tries:
                        self.again += 1
                        # first in line: later outcomes wait for this one
                        waiting.appendleft(number)
                    else:
                        done[number] = _given_up(units[number], lost[number], answer)

    def _replace(self, answer: NotStarted | UnitOutcome | Raised | Lost) -> None:
        """Replace a lost worker; raise for any other answer."""
        if isinstance(answer, NotStarted):
            raise UserError(answer.reason)
        # the traceback of the worker, which the raised error does not have
        if isinstance(answer, Raised):
            for line in answer.trace.splitlines():
                LOGGER.error("  %s", line)
            # an error in the code or the settings, which every worker would repeat
            raise answer.error
        assert isinstance(answer, Lost)
        self._in_vain += 1
        # all workers at once may be lost with a machine; more in a row means that none can live
        if self._in_vain >= self._size + self._tries:
            raise RunError(f"{self._in_vain} rollout workers in a row were lost; the last one: {answer.reason}")
        LOGGER.warning("a rollout worker was lost and is being replaced: %s", answer.reason)
        self._crew.start()
        while self._free:  # those on the same machine may have gone too: work goes to workers that have answered
            self._crew.ask(self._free.popleft())


def _given_up(unit: Unit | TrialUnit, times: int, answer: Any) -> UnitOutcome:
    reason = f"{times} rollout workers were lost on the same tasks; the last one: {answer.reason}"
    whole = "evaluation" if isinstance(unit, TrialUnit) else "step"
    # the step goes on with the tasks that are left
    LOGGER.error("the %s continues without %d of its tasks: %s", whole, len(unit.tasks), reason)
    return UnitOutcome(error=RunError(reason), lost=True)
