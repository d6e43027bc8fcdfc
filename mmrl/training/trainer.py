"""The training loop of every domain (rollout, score, advantages, update, evaluate), and the metrics of its steps."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Generic, Self, TypeVar

import torch
from accelerate import Accelerator, PartialState
from torch import Tensor

from mmrl.core.blocks.filter import DynamicSamplingBuffer, GroupFilter, KeepAll
from mmrl.core.loss import Metric, merge_metrics, metric_values, plain_metrics
from mmrl.core.payload import to_device
from mmrl.core.rollouts import PLACE, TASK, Rollouts
from mmrl.errors import RunError, RunStopped, UserError
from mmrl.runs.run_log import RunLog, batch_metrics, restart_peak_memory, stopwatch
from mmrl.runs.tracking import Tracker
from mmrl.training.processes import (
    HeapTrimmer,
    Streams,
    all_ranks,
    from_all,
    machine,
    make_generator,
    merge_lists,
    shard,
    share_weights,
    stream_seed,
    versions,
)
from mmrl.training.ray_rollers import open_rollers
from mmrl.training.recipe import NoUsableTasksError, Recipe, Step, make_reference
from mmrl.training.saving import RunSaver
from mmrl.training.scoring import EveryRewardFailedError, score_everywhere
from mmrl.training.settings import BaseRunConfig, ReferenceConfig
from mmrl.training.update import (
    Updater,
    Updates,
    has_advantage,
    needs_reference,
    outcome,
    unscored,
    update_constants,
    with_sampled,
)

LOGGER = logging.getLogger("mmrl")
CLOSE = 1e-3
"""Tolerated relative difference of a number that every process computes separately; machines round differently."""


def collect_metrics(
    recipe: Recipe[Any, Any], rollouts: Rollouts, step: Step, *, teaches: bool = True
) -> dict[str, float]:
    """Metrics of a completed step from domain, stages and terms, of all processes; all processes must call it.

    `teaches` is false where a filter left this process nothing, and its rows are there for company.
    """
    found = recipe.step_metrics(rollouts) | recipe.noted
    # cleared here, so that every step starts without the notes of the last
    recipe.noted.clear()
    for each in recipe.additions:
        found |= each.metrics(rollouts, step)
    return over_processes(found, teaches=teaches)


def over_processes(found: Mapping[str, float | Metric], *, teaches: bool = True) -> dict[str, float]:
    """Numbers of the whole run; all processes must call it.

    A `Metric` is one process's part and is merged with the others, only with processes whose rows teach if any do. A
    plain number already is that of the whole run; if processes disagree, a warning names it.
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
        "metric %s differs between the processes of the run, and the value of the first process is logged; "
        "return an mmrl.core.Metric, which is aggregated over all processes",
        name,
    )


class RunCounts:
    """Gives every process the counts in `Recipe.added` of the whole run.

    Each process counts separately; `share` adds what the others have counted since the last call.
    """

    def __init__(self, recipe: Recipe[Any, Any]) -> None:
        self._counters: dict[str, Any] = {
            name: each for name, each in recipe.added.items() if isinstance(each, Mapping)
        }
        self.begin()

    def begin(self) -> None:
        """Take the counts as those of the whole run, as after resuming or clearing a step's counts."""
        self._known = {name: Counter(each) for name, each in self._counters.items()}

    def share(self) -> None:
        """Add what the other processes have counted; all processes must call it."""
        new = {name: self._since(name, each) for name, each in self._counters.items()}
        # own counts are in already
        for rank, counts in enumerate(from_all(new)):
            for name, others in counts.items() if rank != PartialState().process_index else ():
                self._counters[name].update(others)
        self.begin()

    def _since(self, name: str, counter: Mapping[str, float]) -> dict[str, float]:
        return {key: count - self._known[name][key] for key, count in counter.items()}


SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
ECHO_S = 1.0
"""Seconds. Launchers forward a Ctrl-C that the terminal has already sent to the whole process group; a second one
within this time is the same key press."""
WAIT_S = 0.2
"""Seconds between two questions whether the data of a step has arrived."""
PATIENCE_S = 3600.0
"""Seconds without any of the data that a step waits for, after which the run ends with an error."""
SHOW_CURSOR = b"\x1b[?25h"
MAX_DRAWS = 10
"""Maximum number of consecutive draws without a usable task."""
TaskT = TypeVar("TaskT")


class StopSignals:
    """Turns SIGTERM, SIGHUP and the first Ctrl-C into a stop request that the loop checks between steps.

    A second Ctrl-C exits immediately with code 130 and no traceback; files on disk stay intact, since every file is
    written under a temporary name first. In an interactive session it raises KeyboardInterrupt instead. Signals that
    the process ignores, such as SIGHUP under nohup, stay ignored. Outside the main thread, where Python cannot handle
    signals, this does nothing.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        """The first signal received, or None."""
        self._first_s = 0.0
        self._previous: dict[int, Any] = {}
        self._terminals: list[int] = []

    def requested(self, accelerator: Accelerator) -> bool:
        """Whether any process of the run was asked to stop; all processes must call it."""
        # a vote: a process that stopped alone would leave the others waiting for it in the next collective call
        wanted = not all_ranks(self.signum is None, accelerator)
        if wanted and self.signum is None:
            self.signum = signal.SIGTERM  # another process was asked
        return wanted

    def __enter__(self) -> Self:
        # Python delivers signals to the main thread only
        if threading.current_thread() is threading.main_thread():
            # asked now: isatty fails on a terminal that has been closed
            self._terminals = [handle for handle in (1, 2) if os.isatty(handle)]
            for signum in SIGNALS:
                # None: a handler that was not installed from Python, and could not be put back
                if signal.getsignal(signum) not in (signal.SIG_IGN, None):
                    self._previous[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # a run in a notebook or a test must leave the caller's handlers as they were
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        self._previous.clear()

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signum is None:
            self.signum = signum
            self._first_s = now
            name = signal.Signals(signum).name
            # no logging here: the interrupted code may hold the lock of a handler
            self._say(f"mmrl: {name}: stopping after this step, with a checkpoint; press Ctrl-C to stop immediately\n")
        elif signum == signal.SIGINT and now - self._first_s > ECHO_S:
            self._end()
        # also when it is the second signal: the terminal has gone either way
        if signum == signal.SIGHUP:
            self._leave_terminals()

    def _say(self, text: str) -> None:
        """Write past Python's buffers, which the interrupted code may be using."""
        # one message for all processes of the terminal
        if os.environ.get("RANK", "0") == "0":
            with contextlib.suppress(OSError):
                os.write(2, text.encode())

    def _leave_terminals(self) -> None:
        """Redirect output after the terminal was closed, since writes to it would fail."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        # a write to a closed terminal raises OSError, which would end the run that SIGHUP asked to save
        for handle in self._terminals:
            os.dup2(nowhere, handle)
        os.close(nowhere)

    def _end(self) -> None:
        if hasattr(sys, "ps1"):
            # an interactive session survives; os._exit below would take it along
            raise KeyboardInterrupt
        if 1 in self._terminals:  # a progress bar hides the cursor
            with contextlib.suppress(OSError):
                os.write(1, SHOW_CURSOR)
        self._say("mmrl: stopped immediately\n")
        # no teardown: the user has asked twice, and files are complete at any time
        os._exit(128 + signal.SIGINT)


class Trainer:
    """Runs a recipe for `trainer.steps` steps, with evaluation, checkpoints and exact resume."""

    def __init__(
        self,
        recipe: Recipe[Any, Any],
        config: BaseRunConfig,
        run_dir: Path,
        accelerator: Accelerator,
        tracker: Tracker | None,
        stop: StopSignals | None = None,
        *,
        entry: Any = None,
    ) -> None:
        self.recipe = recipe
        self.config = config
        self.run_dir = run_dir
        self.accelerator = accelerator
        self.stop = stop
        self.tasks = TaskStream(recipe.train_tasks, config.seed, fingerprint=recipe.data_digest)
        if not recipe.supervised:
            # bound to the state: an adaptive order reads the statistics that compute_advantages has updated
            order, state = recipe.objective.order, recipe.objective_state
            self.tasks.choose = lambda count, generator: order(len(recipe.train_tasks), count, state, generator)
        recipe.policy.to(accelerator.device)  # before the reference is copied and the optimiser made
        # before the reference is copied, too: processes may have drawn new weights (LoRA, heads) differently
        share_weights(recipe.policy, accelerator)
        reference = getattr(config, "reference", ReferenceConfig())  # supervised configurations have none
        needed = needs_reference(recipe)
        if not needed and recipe.start is None and reference.kind not in ("auto", "none"):
            raise UserError(f"reference.kind is {reference.kind}, but nothing in this run uses a reference policy")
        self.reference = make_reference(reference, recipe.policy, needed=needed, start=recipe.start)
        self.heap = HeapTrimmer(enabled=config.trainer.release_memory and accelerator.device.type == "cpu")
        kind = type(recipe).updates or Updater
        self.updater: Updates = kind(recipe, accelerator, self.reference, run_dir / "failures", self.heap)
        self.log = RunLog(run_dir, accelerator.device, tracker)
        self.log.warnings.variety = recipe.variety
        self.log.warnings.alarms = getattr(recipe, "alarms", {})  # most recipes have none
        if not recipe.supervised:
            # rows of a group with equal rewards are only worth a warning if advantages compare them
            advantage = getattr(recipe.objective, "advantage", None)  # losses of pairs have none
            self.log.warnings.compared = recipe.compared if "samples" in getattr(advantage, "needs", ()) else ()
        terms = getattr(recipe.config, "rewards", ())
        self.log.warnings.only_logged = [term.name for term in terms if term.weight == 0]
        self.saver = RunSaver(
            recipe,
            config,
            run_dir,
            accelerator,
            reference=self.reference,
            updater=self.updater,
            tasks=self.tasks,
            log=self.log,
        )
        self.rollers = open_rollers(recipe, config, accelerator, run_dir, entry)
        self.counts = RunCounts(recipe)
        self.step = 0
        self.resumed = False

    @property
    def policy(self) -> Any:
        """The policy being trained."""
        return self.recipe.policy

    @property
    def stage(self) -> str:
        """The current stage of the run."""
        return f"{(self.log.watch.inside or ['no stage'])[-1]} of step {self.step + 1}"

    @property
    def group_filter(self) -> GroupFilter:
        """Selects the groups of a step to train on."""
        return KeepAll() if self.recipe.supervised else self.recipe.objective.filter

    @property
    def position(self) -> Step:
        """The next step."""
        return Step(self.step, self.config.trainer.steps)

    def run(self) -> dict[str, Any]:
        """Train to the end."""
        if not self.resumed:
            self.saver.start()
            # nothing has changed yet that a resume would need
            self._stop_if_asked(save=False)
            if self.config.evaluation.at_start:
                self.evaluate("before")
        # stopped between a step and its evaluation: the resumed run makes up for it first
        elif self.saver.evaluation_pending:
            self._evaluate_and_save()
        self._stop_if_asked()
        while self.step < self.config.trainer.steps:
            self._wait_for_data()
            self.train_step()
            self._stop_if_asked(evaluated=False)
            self._evaluate_and_save()
            self._stop_if_asked()
        return self._finish()

    def train_step(self) -> None:
        """One step of the algorithm: collect rollouts, estimate advantages, update the policy."""
        # so that the logged peak is that of this step
        restart_peak_memory(self.accelerator.device)
        step = self.position
        with self.log.watch.running(), stopwatch("step"):
            rollouts, metrics = self.collect()
            # before the update, whose time the workers then use; they sample with the weights of before it
            self._look_ahead()
            rewards, teaches = rollouts.reward, bool(self._kept(rollouts).any())
            if not teaches:
                rollouts = unscored(rollouts)  # the filter left nothing here: these are logged and teach nothing
            rollouts = self.recipe.thinned(with_sampled(self.recipe, rollouts))
            self.heap.trim()
            # the reference is in parts except while it scores, which saves its memory during sampling
            with self.accelerator.autocast(), self.reference.whole():
                rollouts = update_constants(self.recipe, self.policy, self.reference, rollouts, step)
            with stopwatch("advantages"):
                rollouts = self.recipe.advantages(rollouts, self.accelerator, step)
            if self.log.warnings.sees_equal_groups and not all_ranks(not has_advantage(rollouts), self.accelerator):
                self.log.warnings.forget_equal_groups()  # such as advantages of turns
            exact = "kl_ref" in self.recipe.loss_outputs  # the loss scores the reference, too
            with stopwatch("update"), self.accelerator.autocast(), self.reference.whole() if exact else nullcontext():
                metrics |= self.updater.update(rollouts, step, teaches=teaches)
        if not teaches:
            # the log shows the rewards of the rows that the update did not use
            rollouts = rollouts.replace(reward=rewards)
        self.step += 1
        # before the position moves on: terms and recipe see the step that they have taken part in
        self.recipe.on_step_end(step, metrics)
        for each in self.recipe.additions:
            each.on_step_end(step)
        self._log_step(rollouts, metrics, step, teaches=teaches)

    def collect(self) -> tuple[Rollouts, dict[str, float]]:
        """Sample and score the groups of a step; the filter drops or resamples groups without a signal."""
        wanted = self.config.trainer.tasks_per_step
        # no dropout while sampling: logp_old would otherwise be that of another network
        self.policy.eval()
        self.rollers.load(self.position)
        # a filter that does not resample has one try
        buffer = DynamicSamplingBuffer(wanted, max_tries=self.group_filter.tries)
        sampled: list[Rollouts] = []
        done = False
        while not done:
            # attempts are numbered, so that a repeated draw gets other random numbers
            batch = self._placed(self._sample(attempt=len(sampled)), attempt=len(sampled))
            # rewards and masks are enough for filter and metrics; images stay with their process
            sampled.append(batch.replace(payload=None).to("cpu"))
            buffer.add(batch, self._kept(sampled[-1]))
            # counted over all processes: a step has as many groups as with one process, however they are spread
            kept = sum(merge_lists([buffer.counts.kept], self.accelerator))
            done = kept >= wanted or buffer.exhausted
        # all that was sampled, dropped groups included: metrics must not depend on the filter
        everywhere = merge_lists(sampled, self.accelerator)
        # the cost of a step includes dropped groups and extra samples, on all processes
        self.log.count(everywhere, min(kept, wanted), sum(merge_lists([self.recipe.extra_samples], self.accelerator)))
        self.recipe.extra_samples = 0
        if not self.recipe.supervised:
            self.log.warnings.watch(everywhere)
        compared = () if self.recipe.supervised else self.recipe.compared or ("reward",)
        metrics = batch_metrics(everywhere, compared) | {"data/epoch": self.tasks.epoch}
        # with nothing kept, the last batch keeps the log going and the processes together
        taken = buffer.take() if buffer.counts.kept else None
        own_places = [] if taken is None else taken.places or []
        # the first `wanted` kept groups in the order of drawing, as one process would take them
        last_place = max(sorted(merge_lists(own_places, self.accelerator))[:wanted], default=0)
        # more than the step takes; places rise within a process, so the last one is its largest
        if taken is not None and own_places[-1] > last_place:
            keep = torch.tensor([place <= last_place for place in own_places])
            # a process without a group left still takes part in the update, with rows that count nothing
            return (taken.select_groups(keep) if bool(keep.any()) else unscored(batch)), metrics
        # not taken: `train_step` sees that the filter keeps nothing of it and unscores it
        return batch if taken is None else taken, metrics

    def _kept(self, rollouts: Rollouts) -> Tensor:
        """Mask (N,) of the groups to train on."""
        return self.group_filter.kept(rollouts, self.recipe.compared or ("reward",))

    def _placed(self, batch: Rollouts, attempt: int) -> Rollouts:
        """Record for each row its task's place among all tasks drawn in the step, and the index of the task."""
        # tasks.drawn holds the tasks of all processes, and `place` is the index among those
        place = batch.extras[PLACE]
        task = to_device(torch.tensor(self.tasks.drawn), place.device)[place]
        # later attempts come after all tasks of the earlier ones
        place = place + attempt * self.config.trainer.tasks_per_step
        return batch.replace(extras=batch.extras | {PLACE: place, TASK: task})

    def evaluate(self, tag: str) -> None:
        """Measure every held-out split."""
        if not self.recipe.eval_tasks:
            return
        self.policy.eval()
        start = nullcontext() if self.recipe.start is None else self.recipe.start.whole()
        with self.log.watch.stage("evaluate"), self.accelerator.autocast(), start:
            for index, split in enumerate(self.recipe.eval_tasks):
                result = self.rollers.evaluate(split, self.position)
                # an evaluation that fails at the start fails by its settings; later ones are only reported
                if result.failure and tag == "before":
                    raise RunError(result.failure)
                self.log.outcomes(self.step, split, result.outcomes)
                self.log.evaluation(self.step, tag, split, result.metrics)
                if index == 0:
                    self.log.samples(self.step, "eval", result.records)
                self.heap.trim()
        self.counts.share()

    def save(self) -> None:
        """Write a checkpoint. A full disk is reported, and training continues with the older checkpoints."""
        self.saver.save(self.step)

    def resume(self, *, from_last_good: bool = False) -> None:
        """Continue from the newest checkpoint, bit for bit like an uninterrupted run."""
        step = self.saver.resume(from_last_good=from_last_good)
        self.resumed = step is not None
        self.counts.begin()
        self.step = step or 0

    def _sample(self, attempt: int) -> Rollouts:
        # counts down, so that 0 is the last draw
        for draws_left in reversed(range(MAX_DRAWS)):
            streams = self._streams(self.step, attempt, draws_left)
            rollouts, failure = self._draw(streams)
            # all draw again if one has nothing, so that attempts and streams stay the same on every process
            if all_ranks(rollouts is not None, self.accelerator):
                break
            # the same error on every process, even on those whose own tasks were fine
            if not draws_left:
                raise failure or RunError("another process did not find a usable task")
        assert rollouts is not None
        with stopwatch("score"):
            return score_everywhere(lambda: self.rollers.score(rollouts, streams, self.position), failure)

    def _draw(self, streams: Streams) -> tuple[Rollouts | None, RunError | None]:
        # every process draws all tasks and takes its share, so the stream does not depend on their number
        tasks = shard(self.tasks.next(self.config.trainer.tasks_per_step), self.accelerator)
        with stopwatch("batch" if self.recipe.supervised else "rollout"):
            try:
                return self.rollers.rollout(tasks, streams, self.position), None
            except NoUsableTasksError as error:
                return None, error
            except EveryRewardFailedError as error:  # workers score, too
                return error.rollouts, error

    def _streams(self, step: int, attempt: int, draw: int) -> Streams:
        """Random streams of this process's tasks; `draw` counts down."""
        # the position in the step, so that a task draws the same numbers on any number of processes
        places = shard(range(self.config.trainer.tasks_per_step), self.accelerator)
        # counts up over the attempts and draws of a step
        number = attempt * MAX_DRAWS + MAX_DRAWS - 1 - draw
        return Streams(stream_seed(self.config.seed, "rollout", step, attempt, draw), places, number)

    def _look_ahead(self) -> None:
        """Start sampling the next step before the update, unless an evaluation or a checkpoint comes in between."""
        following, trainer = self.step + 1, self.config.trainer
        # a resumed run samples the step after a checkpoint with the new weights, so an uninterrupted run has to as well
        if self.rollers.looks_ahead and not self.saver.scheduled(following) and not self._evaluates_after(following):
            # peeked, not taken: the step that is interrupted draws the same tasks again
            tasks = shard(self.tasks.upcoming(trainer.tasks_per_step), self.accelerator)
            # attempt 0, draw 0: the first that `_sample` will ask for
            self.rollers.begin(tasks, self._streams(following, 0, MAX_DRAWS - 1), Step(following, trainer.steps))

    def _evaluates_after(self, step: int) -> bool:
        """Whether an evaluation follows this step; the one after the last step is not counted."""
        every = self.config.evaluation.every
        return bool(every) and step % every == 0 and step < self.config.trainer.steps

    def _log_step(self, rollouts: Rollouts, metrics: dict[str, float], step: Step, *, teaches: bool) -> None:
        self.counts.share()
        metrics |= collect_metrics(self.recipe, rollouts, step, teaches=teaches) | self.rollers.metrics()
        self.counts.begin()
        # from the copy on the host, which costs no synchronisation
        tokens = sum(merge_lists([float(rollouts.host.mask.sum())], self.accelerator))
        self.log.step(self.step, metrics, tokens)
        # without evaluations, samples of the first and of the last step are kept
        every = self.config.evaluation.every or self.config.trainer.steps
        keeps_samples = self.step in (1, self.config.trainer.steps) or self.step % every == 0
        if keeps_samples and self.log.tracker is not None:
            self.log.samples(self.step, "train", self.recipe.records(rollouts, self.config.evaluation.records))

    def _evaluate_and_save(self) -> None:
        """Evaluate and save if they are due."""
        last = self.step >= self.config.trainer.steps
        evaluation = self.config.evaluation
        # a stop between this step and its evaluation sets it again
        self.saver.evaluation_pending = False
        if self._evaluates_after(self.step) or (last and evaluation.at_end):
            self.evaluate("after" if last else "during")
        # a checkpoint by schedule may be marked as the best; one by time may not, since its step depends on speed
        if self.saver.scheduled(self.step):
            self.save()
            self.saver.note_best(self.step)
        elif self.saver.overdue():
            self.save()

    def _wait_for_data(self) -> None:
        """Wait until the recipe has the data of the next step; a signal ends the run meanwhile."""
        if type(self.recipe).waits_for is Recipe.waits_for:
            return  # most recipes never wait, and need not ask the other processes in every step
        known, began = "", 0.0
        while lacks := self._lacks():
            if not known:
                LOGGER.info("step %d waits: %s", self.step + 1, lacks)
            if lacks != known:
                known, began = lacks, time.monotonic()
            elif time.monotonic() - began > PATIENCE_S:
                raise RunError(f"step {self.step + 1} waited {PATIENCE_S / 60:.0f} minutes without a change: {lacks}")
            self._stop_if_asked()
            time.sleep(WAIT_S)

    def _lacks(self) -> str:
        """Describe what a process is waiting for, and on which machine: machines may not share the run folder."""
        own = self.recipe.waits_for(self.position)
        return next(filter(None, from_all(f"on {socket.gethostname()}, {own}" if own else "")), "")

    def _stop_if_asked(self, *, evaluated: bool = True, save: bool = True) -> None:
        """Stop between two steps if a signal was received."""
        if self.stop is None or not self.stop.requested(self.accelerator):
            return
        assert self.stop.signum is not None
        # a resume then makes up for the evaluation that this stop skips
        self.saver.evaluation_pending = not evaluated
        # before the first step there is nothing to save
        if save:
            self.saver.save_before_stop(self.step)
        self.accelerator.wait_for_everyone()  # a process that leaves early ends the one that still writes
        kept = self.saver.checkpoints.steps()
        saved = f"the newest checkpoint is from step {kept[-1]}" if kept else "there is no checkpoint"
        message = f"stopped after step {self.step} of {self.config.trainer.steps}; {saved}"
        raise RunStopped(self.stop.signum, message, resumable=bool(kept))

    def _finish(self) -> dict[str, Any]:
        found = {
            **outcome(self.recipe, self.updater, self.log, self.step),
            "recipe": self.config.recipe,
            "objective": self.recipe.own_loss or self.recipe.objective.name,
            "model_kind": self.recipe.model_kind,
            "objective_formula": self.recipe.describe(),
            "steps": self.step,
            "optimiser_steps": self.updater.optimiser_step,
            "optimiser_steps_skipped": self.updater.skipped,
            "optimiser_steps_without_gradient": self.updater.waited,
            "best_checkpoint": self.saver.checkpoints.best(),
            "data": {"tasks": len(self.tasks.tasks), "digest": self.tasks.contents},
            **machine(self.accelerator),
            "versions": versions(),
        }
        return self.log.result(found, write=self.accelerator.is_main_process)


class TaskStream(Generic[TaskT]):
    """Visits every task once per epoch, in an order that depends only on (seed, epoch), or as an objective chooses.

    Tasks that were requested ahead of time stay the next ones, even if the objective would choose others by then.
    """

    def __init__(
        self,
        tasks: Sequence[TaskT],
        seed: int,
        *,
        fingerprint: Callable[[], str] | None = None,
        shuffle: bool = True,
    ) -> None:
        if not tasks:
            raise UserError("there are no training tasks")
        self.tasks = tasks
        self.seed = seed
        self.shuffle = shuffle
        self._fingerprint = fingerprint
        self.position = 0
        self.drawn: list[int] = []
        """Indices of the tasks drawn last."""
        self._ahead: list[int] | None = None
        self._order: tuple[int, list[int]] | None = None
        self.choose: Callable[[int, torch.Generator], Tensor | None] = lambda count, generator: None
        """Chooses the indices of the next tasks; returns None to follow the epoch order."""

    @property
    def epoch(self) -> float:
        """Epochs over the tasks so far."""
        return self.position / len(self.tasks)

    def next(self, count: int) -> list[TaskT]:
        """Return the next `count` tasks; epochs follow each other without a gap."""
        # asked before the position moves, since `upcoming` depends on it
        drawn = self.upcoming(count)
        assert self._ahead is not None
        # indices and not tasks: the trainer records them with the rows
        self.drawn = self._ahead
        self._ahead = None
        self.position += count
        return drawn

    def upcoming(self, count: int) -> list[TaskT]:
        """Return the next `count` tasks without consuming them."""
        # drawn once: `begin` and the `rollout` after it must get the same tasks
        if self._ahead is None:
            # keyed by the position alone, so a resumed run chooses the same tasks
            chosen = self.choose(count, make_generator(self.seed, "task-choice", self.position))
            places = range(self.position, self.position + count)
            self._ahead = [self._at(place) for place in places] if chosen is None else chosen.tolist()
        return [self.tasks[index] for index in self._ahead]

    @cached_property
    def contents(self) -> str | None:
        """Digest of the tasks' contents, or None if no fingerprint function was given."""
        return None if self._fingerprint is None else self._fingerprint()

    def state_dict(self) -> dict[str, Any]:
        """Position in the stream, and a digest of the tasks."""
        found = {"position": self.position, "size": len(self.tasks), "contents": self.contents}
        # saved, since an objective might choose others by now
        return found if self._ahead is None else found | {"ahead": self._ahead}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position."""
        if state["size"] != len(self.tasks):
            raise UserError(
                f"the checkpoint was made with {state['size']} training tasks, but now there are "
                f"{len(self.tasks)}; resuming requires the same data"
            )
        # contents and not only the number: edited data of the same length would pass otherwise
        saved = state.get("contents")  # the first release kept none
        if saved is not None and self.contents is not None and saved != self.contents:
            raise UserError(
                f"the checkpoint was made with different training tasks: their number ({len(self.tasks)}) is the "
                f"same, but their contents differ (digest {saved}, now {self.contents}); resuming requires the "
                "same data; to train this model on other data, start a run with model.path=<checkpoint>/model "
                "and another output_dir"
            )
        self.position = int(state["position"])
        self._ahead = state.get("ahead")

    def _at(self, position: int) -> int:
        """Index of the task at a position of the stream."""
        # the epoch names the permutation, so that position alone says what comes next
        epoch, index = divmod(position, len(self.tasks))
        if not self.shuffle:
            return index
        # cached: one permutation an epoch, not one a task
        if self._order is None or self._order[0] != epoch:
            generator = make_generator(self.seed, "task-order", epoch)
            self._order = (epoch, torch.randperm(len(self.tasks), generator=generator).tolist())
        return self._order[1][index]
