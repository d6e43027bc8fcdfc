"""Saving a run and resuming it bit for bit, and remembering its best checkpoint."""

from __future__ import annotations

import logging
import math
import shutil
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from mmrl.errors import RunError
from mmrl.training.loop.distributed import merge_lists
from mmrl.training.loop.recipe import Recipe
from mmrl.training.loop.reference import Reference
from mmrl.training.loop.seeds import capture_global_rng, restore_global_rng
from mmrl.training.loop.settings import RunConfig
from mmrl.training.loop.tasks import TaskStream
from mmrl.training.loop.update import Updater
from mmrl.training.record.checkpoint import Checkpoints, link_or_copy
from mmrl.training.record.run_log import RunLog
from mmrl.training.record.statistics import HEADLINES

__all__ = ["RunSaver"]

LOGGER = logging.getLogger("mmrl")


class RunSaver:
    """Writes and reads the checkpoints of a run.

    Args:
        recipe: the method, whose policy and state are saved.
        config: the run's options.
        run_dir: folder of the run.
        accelerator: the processes; the first one writes.
        reference: the reference policy.
        updater: the optimiser.
        tasks: the order of the tasks.
        log: totals and evaluations.
    """

    def __init__(
        self,
        recipe: Recipe[Any, Any],
        config: RunConfig,
        run_dir: Path,
        accelerator: Accelerator,
        *,
        reference: Reference,
        updater: Updater,
        tasks: TaskStream[Any],
        log: RunLog,
    ) -> None:
        self.recipe = recipe
        self.config = config
        self.run_dir = run_dir
        self.accelerator = accelerator
        self.reference = reference
        self.updater = updater
        self.tasks = tasks
        self.log = log
        self.checkpoints = Checkpoints(run_dir / "checkpoints", config.checkpoint.keep)

    def start(self) -> None:
        """Remove the reference weights of a run that was deleted or cut short before its first checkpoint."""
        if self.accelerator.is_main_process:
            shutil.rmtree(self.run_dir / "reference", ignore_errors=True)

    def save(self, step: int) -> None:
        """Write a checkpoint; a full disk is reported and training goes on with the older ones kept."""
        self.accelerator.wait_for_everyone()
        rng = merge_lists([capture_global_rng()], self.accelerator)
        if not self.accelerator.is_main_process:
            return
        state = {
            "step": step,
            "updater": self.updater.state_dict(),
            "tasks": self.tasks.state_dict(),
            "recipe": self.recipe.state_dict(),
            "rng": rng,
            **self.log.state_dict(),
        }
        with self.log.watch.stage("checkpoint"):
            try:
                self.checkpoints.save(step, state, self.write_parts)
            except OSError as error:
                self._failed(step, error)

    def resume(self) -> int:
        """Restore the newest checkpoint.

        Returns:
            Steps done; 0 for a run that was stopped before its first checkpoint and starts again.

        Raises:
            UserError: the checkpoint is damaged, or the data differs.
        """
        self.checkpoints.remove_partial()
        if not self.checkpoints.steps():
            LOGGER.warning("%s has no checkpoint yet; the run starts again from the beginning", self.run_dir)
            self.log.truncate_after(-1)
            return 0
        folder = self.checkpoints.latest()
        state = Checkpoints.load_state(folder)
        self.recipe.policy.load_weights(folder / "model")
        if self.reference.needs_saving:
            self.reference.load(folder / "reference")
        step = int(state["step"])
        self.updater.load_state_dict(state["updater"])
        self.tasks.load_state_dict(state["tasks"])
        self.recipe.load_state_dict(state["recipe"])
        self.log.load_state_dict(state)
        restore_global_rng(state["rng"][min(self.accelerator.process_index, len(state["rng"]) - 1)])
        self.log.truncate_after(step)
        self.note_best(step)  # a run killed right after writing the checkpoint had no time to
        LOGGER.info("resumed at step %d from %s", step, folder)
        return step

    def note_best(self, step: int) -> None:
        """Mark this step's checkpoint if its evaluation is the best so far.

        Raises:
            RunError: the evaluation does not report `checkpoint.best_metric`.
        """
        evaluations = self.log.evaluations
        if not evaluations or evaluations[-1]["step"] != step or not self.accelerator.is_main_process:
            return
        split = next(iter(self.recipe.eval_tasks))
        latest = next(e for e in reversed(evaluations) if e["split"] == split)
        metric = self.config.checkpoint.best_metric or _first_score(latest)
        if metric not in latest:
            raise RunError(f"checkpoint.best_metric '{metric}' is not reported; there are: {', '.join(latest)}")
        best = self.checkpoints.best()
        if not self.checkpoints.path(step).is_dir() or not math.isfinite(latest[metric]):
            return
        if best is None or latest[metric] > best["value"]:
            try:
                self.checkpoints.mark_best(step, metric, latest[metric])
            except OSError as error:
                LOGGER.error("checkpoint at step %d is the best so far but cannot be noted: %s", step, error)

    def write_parts(self, folder: Path) -> None:
        """Write the policy, the recipe's further weights and the reference into a checkpoint's folder."""
        self.recipe.policy.save_pretrained(folder / "model")
        self.recipe.save_parts(folder)
        if not self.reference.needs_saving:
            return
        if self.reference.kind == "ema":
            self.reference.save(folder / "reference")
            return
        shared = self.run_dir / "reference"  # a frozen reference never changes: written once, linked afterwards
        if not (shared / ".whole").is_file():
            self.reference.save(shared)
            (shared / ".whole").touch()
        link_or_copy(shared, folder / "reference")

    def _failed(self, step: int, error: OSError) -> None:
        kept = self.checkpoints.steps()
        message = (
            f"checkpoint at step {step} could not be written to {self.checkpoints.folder}: {error}; "
            f"nothing half-written was left, kept steps: {kept or 'none'}"
        )
        if step >= self.config.trainer.steps:
            raise RunError(message) from error
        LOGGER.error("%s; training goes on, free some space", message)
        self.log.failed_checkpoints += 1


def _first_score(evaluation: dict[str, Any]) -> str:
    return next((name for name in evaluation if name.startswith(HEADLINES)), "n")
