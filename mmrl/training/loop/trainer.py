"""The loop: tasks, rollout, score, advantages, update, evaluate; the same for every domain."""

from __future__ import annotations

import json
import logging
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from mmrl.core.blocks import KeepAll
from mmrl.core.filters import DynamicSamplingBuffer
from mmrl.core.rollouts import Rollouts
from mmrl.errors import RunError
from mmrl.training.loop.distributed import all_ranks, merge_lists
from mmrl.training.loop.recipe import NoUsableTasksError, Recipe
from mmrl.training.loop.reference import make_reference
from mmrl.training.loop.seeds import capture_global_rng, make_generator, restore_global_rng
from mmrl.training.loop.settings import RunConfig
from mmrl.training.loop.tasks import TaskStream
from mmrl.training.loop.update import Updater
from mmrl.training.record.checkpoint import Checkpoints, link_or_copy
from mmrl.training.record.jsonlines import finite_or_none, write_atomically
from mmrl.training.record.metrics import batch_metrics, peak_memory_mb, restart_peak_memory
from mmrl.training.record.samples import write_samples
from mmrl.training.record.statistics import HEADLINES
from mmrl.training.record.stopwatch import STAGES_BETWEEN, Stopwatch, stopwatch
from mmrl.training.record.tracking import Tracker

__all__ = ["Trainer"]

LOGGER = logging.getLogger("mmrl")
MAX_DRAWS = 10
"""Draws of tasks in a row without a usable one after which the run stops."""
LOOP_STAGES = ("rollout", "score", "old_logp", "ref_logp", "advantages", "forward", "backward", "optimizer", "update")
"""Stages of every run; one that a run does not need takes 0 seconds."""


class Trainer:
    """Runs a recipe for `trainer.steps` steps, with evaluation, checkpoints and exact resume.

    Args:
        recipe: the method and its domain.
        config: the run's options.
        run_dir: folder of the run.
        accelerator: device, precision and processes.
        tracker: where metrics go; None on processes other than the first.
    """

    def __init__(
        self,
        recipe: Recipe,
        config: RunConfig,
        run_dir: Path,
        accelerator: Accelerator,
        tracker: Tracker | None,
    ) -> None:
        self.recipe = recipe
        self.config = config
        self.run_dir = run_dir
        self.accelerator = accelerator
        self.tracker = tracker
        self.tasks = TaskStream(recipe.train_tasks, config.seed)
        self.reference = make_reference(
            config.reference, recipe.policy, needed=recipe.objective.needs_reference, start=recipe.start
        )
        self.updater = Updater(recipe, accelerator, self.reference, run_dir / "failures")
        self.checkpoints = Checkpoints(run_dir / "checkpoints", config.checkpoint.keep)
        self.step = 0
        self.totals = {"samples": 0, "tokens": 0, "seconds": 0.0}
        self.evaluations: list[dict[str, Any]] = []
        self.failed_checkpoints = 0
        self.watch = Stopwatch(accelerator.device)

    @property
    def policy(self) -> Any:
        """The policy without its data-parallel wrapper, for sampling."""
        return self.recipe.policy

    def run(self) -> dict[str, Any]:
        """Train to the end.

        Returns:
            The content of result.json.

        Raises:
            RunError: the run cannot go on.
        """
        if self.step == 0:
            self._start()
        while self.step < self.config.trainer.steps:
            self.train_step()
            self._periodic_work()
        return self._finish()

    def train_step(self) -> None:
        """One round of the algorithm."""
        restart_peak_memory(self.accelerator.device)
        with self.watch.running(), stopwatch("step"):
            rollouts, metrics = self.collect()
            with self.accelerator.autocast():
                rollouts = self.recipe.compute_logprobs(self.policy, self.reference, rollouts)
            with stopwatch("advantages"):
                rollouts = self.recipe.advantages(rollouts, self.accelerator)
            with stopwatch("update"), self.accelerator.autocast():
                metrics |= self.updater.update(rollouts, self.step)
        self.step += 1
        self.recipe.on_step_end(self.step, metrics)
        self._record(rollouts, metrics)

    def collect(self) -> tuple[Rollouts, dict[str, float]]:
        """Sample and score the groups of a step, dropping or redrawing those that cannot teach.

        Returns:
            The rollouts of this process and metrics of everything that was sampled.
        """
        chooses = self.recipe.objective.filter if self.recipe.uses_rewards else KeepAll()
        wanted = self.config.trainer.tasks_per_step // self.accelerator.num_processes
        refill = DynamicSamplingBuffer(wanted, max_tries=chooses.tries)
        sampled: list[Rollouts] = []
        done = False
        while not done:
            batch = self._sample(attempt=len(sampled))
            sampled.append(batch.replace(payload=None).to("cpu"))
            refill.add(batch, chooses.kept(batch))
            done = all_ranks(refill.full or refill.exhausted, self.accelerator)
        everywhere = merge_lists(sampled, self.accelerator)
        metrics = batch_metrics(everywhere, self.recipe.uses_rewards) | {"data/epoch": self.tasks.epoch}
        self.totals["samples"] += sum(part.num_rows for part in everywhere)
        self.totals["tokens"] += int(sum(float(part.mask.sum()) for part in everywhere))
        # with nothing kept, the last batch as it is keeps the KL and entropy terms and the log going, as in EasyR1
        return refill.take() if refill.counts.kept else batch, metrics

    def evaluate(self, tag: str) -> None:
        """Measure every held-out split and remember the best checkpoint's score.

        Args:
            tag: "before", "during" or "after".
        """
        if not self.recipe.eval_tasks:
            return
        self.policy.eval()
        with self.watch.stage("evaluate"), self.accelerator.autocast():
            for index, split in enumerate(self.recipe.eval_tasks):
                result = self.recipe.evaluate(self.policy, split, self.accelerator)
                metrics = result.metrics | {
                    "cost/samples": float(self.totals["samples"]),
                    "cost/seconds": self.totals["seconds"],
                }
                self.evaluations.append({"step": self.step, "tag": tag, "split": split, **metrics})
                if self.tracker is not None:
                    self.tracker.evaluation(self.step, tag, split, metrics)
                    if index == 0:
                        write_samples(self.run_dir, self.step, "eval", result.records)

    def save(self) -> None:
        """Write a checkpoint; a full disk is reported and training goes on with the older ones kept."""
        self.accelerator.wait_for_everyone()
        rng = merge_lists([capture_global_rng()], self.accelerator)
        if not self.accelerator.is_main_process:
            return
        state = {
            "step": self.step,
            "updater": self.updater.state_dict(),
            "tasks": self.tasks.state_dict(),
            "recipe": self.recipe.state_dict(),
            "totals": self.totals,
            "evaluations": self.evaluations,
            "rng": rng,
        }
        with self.watch.stage("checkpoint"):
            try:
                self.checkpoints.save(self.step, state, self._write_parts)
            except OSError as error:
                self._checkpoint_failed(error)

    def resume(self) -> None:
        """Continue from the newest checkpoint, bit for bit as if the run had never stopped.

        A run that was stopped before its first checkpoint starts again from the beginning.

        Raises:
            UserError: the checkpoint is damaged, or the data differs.
        """
        self.checkpoints.remove_partial()
        if not self.checkpoints.steps():
            LOGGER.warning("%s has no checkpoint yet; the run starts again from the beginning", self.run_dir)
            if self.tracker is not None:
                self.tracker.truncate_after(-1)
            return
        folder = self.checkpoints.latest()
        state = Checkpoints.load_state(folder)
        self.policy.load_weights(folder / "model")
        if self.reference.needs_saving:
            self.reference.load(folder / "reference")
        self.step = int(state["step"])
        self.updater.load_state_dict(state["updater"])
        self.tasks.load_state_dict(state["tasks"])
        self.recipe.load_state_dict(state["recipe"])
        self.totals = state["totals"]
        self.evaluations = state["evaluations"]
        restore_global_rng(state["rng"][min(self.accelerator.process_index, len(state["rng"]) - 1)])
        if self.tracker is not None:
            self.tracker.truncate_after(self.step)
        self._note_best()  # a run killed right after writing the checkpoint had no time to
        LOGGER.info("resumed at step %d from %s", self.step, folder)

    def _start(self) -> None:
        if self.accelerator.is_main_process:
            shutil.rmtree(self.run_dir / "reference", ignore_errors=True)  # of a run that was deleted or cut short
        if self.config.evaluation.at_start:
            self.evaluate("before")

    def _sample(self, attempt: int) -> Rollouts:
        rank = self.accelerator.process_index
        generator = make_generator(self.config.seed, "rollout", self.step, attempt, rank)
        self.policy.eval()
        for draws_left in reversed(range(MAX_DRAWS)):
            rollouts, failure = self._draw(generator)
            if all_ranks(rollouts is not None, self.accelerator):
                break
            if not draws_left:
                raise failure or RunError("another process found no usable task")
        assert rollouts is not None
        with stopwatch("score"):
            return self.recipe.score(rollouts)

    def _draw(self, generator: torch.Generator) -> tuple[Rollouts | None, NoUsableTasksError | None]:
        count = self.config.trainer.tasks_per_step
        tasks = self.tasks.next(count)[self.accelerator.process_index :: self.accelerator.num_processes]
        with stopwatch("rollout"), torch.no_grad(), self.accelerator.autocast():
            try:
                return self.recipe.rollout(self.policy, tasks, generator), None
            except NoUsableTasksError as error:
                return None, error

    def _record(self, rollouts: Rollouts, metrics: dict[str, float]) -> None:
        times = dict.fromkeys((*LOOP_STAGES, *STAGES_BETWEEN), 0.0) | self.watch.take()
        seconds = times["step"]
        self.totals["seconds"] += seconds
        metrics |= self.recipe.step_metrics(rollouts)
        tokens = self._sum_ranks(float(rollouts.mask.sum()))
        # evaluation and checkpoint times are those since the step before
        metrics |= {f"time/{stage}": value for stage, value in times.items()} | {
            "tokens/per_second": tokens / seconds,
            "tokens/total": float(self.totals["tokens"]),
            "samples/total": float(self.totals["samples"]),
            "checkpoint/failed": float(self.failed_checkpoints),
            "memory/peak_mb": peak_memory_mb(self.accelerator.device),
        }
        if self.tracker is not None:
            self.tracker.log(self.step, metrics)
            if self._keeps_samples():
                limit = self.config.evaluation.records
                write_samples(self.run_dir, self.step, "train", self.recipe.records(rollouts, limit))

    def _keeps_samples(self) -> bool:
        every = self.config.evaluation.every or self.config.trainer.steps
        return self.step == 1 or self.step % every == 0 or self.step == self.config.trainer.steps

    def _periodic_work(self) -> None:
        last = self.step >= self.config.trainer.steps
        every = self.config.evaluation.every
        if (every and self.step % every == 0 and not last) or (last and self.config.evaluation.at_end):
            self.evaluate("after" if last else "during")
        saving = self.config.checkpoint.every
        if (saving and self.step % saving == 0) or last:
            self.save()
            self._note_best()

    def _note_best(self) -> None:
        if not self.evaluations or self.evaluations[-1]["step"] != self.step or not self.accelerator.is_main_process:
            return
        split = next(iter(self.recipe.eval_tasks))
        latest = next(e for e in reversed(self.evaluations) if e["split"] == split)
        metric = self.config.checkpoint.best_metric or _first_score(latest)
        if metric not in latest:
            raise RunError(f"checkpoint.best_metric '{metric}' is not reported; there are: {', '.join(latest)}")
        best = self.checkpoints.best()
        if not self.checkpoints.path(self.step).is_dir() or not math.isfinite(latest[metric]):
            return
        if best is None or latest[metric] > best["value"]:
            try:
                self.checkpoints.mark_best(self.step, metric, latest[metric])
            except OSError as error:
                LOGGER.error("checkpoint at step %d is the best so far but cannot be noted: %s", self.step, error)

    def _write_parts(self, folder: Path) -> None:
        self.policy.save_pretrained(folder / "model")
        self.recipe.save_parts(folder)
        if not self.reference.needs_saving:
            return
        if self.reference.kind == "ema":
            self.reference.save(folder / "reference")
            return
        shared = self.run_dir / "reference"
        if not (shared / ".whole").is_file():
            self.reference.save(shared)
            (shared / ".whole").touch()
        link_or_copy(shared, folder / "reference")

    def _checkpoint_failed(self, error: OSError) -> None:
        kept = self.checkpoints.steps()
        message = (
            f"checkpoint at step {self.step} could not be written to {self.checkpoints.folder}: {error}; "
            f"nothing half-written was left, kept steps: {kept or 'none'}"
        )
        if self.step >= self.config.trainer.steps:
            raise RunError(message) from error
        LOGGER.error("%s; training goes on, free some space", message)
        self.failed_checkpoints += 1

    def _finish(self) -> dict[str, Any]:
        result = {
            "status": "done",
            "recipe": self.config.recipe,
            "objective": self.recipe.objective.name,
            "objective_formula": self.recipe.describe(),
            "steps": self.step,
            "samples": self.totals["samples"],
            "tokens": self.totals["tokens"],
            "seconds": self.totals["seconds"],
            "optimiser_steps": self.updater.optimiser_step,
            "optimiser_steps_skipped": self.updater.skipped,
            "best_checkpoint": self.checkpoints.best(),
            "first_evaluation": _per_split(self.evaluations),
            "last_evaluation": _per_split(self.evaluations[::-1]),
        }
        if self.accelerator.is_main_process:
            write_atomically(self.run_dir / "result.json", json.dumps(finite_or_none(result), indent=1))
        return result

    def _sum_ranks(self, value: float) -> float:
        return sum(merge_lists([value], self.accelerator))


def _per_split(evaluations: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    first: dict[str, dict[str, Any]] = {}
    for evaluation in evaluations:
        first.setdefault(evaluation["split"], evaluation)
    return first


def _first_score(evaluation: dict[str, Any]) -> str:
    return next((name for name in evaluation if name.startswith(HEADLINES)), "n")
