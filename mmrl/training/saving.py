"""Save a run, resume it bit for bit, and keep track of its best checkpoint."""

from __future__ import annotations

import contextlib
import logging
import math
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from mmrl.core.state import Stateful
from mmrl.errors import RunError, UserError
from mmrl.files import remove_drafts
from mmrl.runs.checkpoint import Checkpoints, link_or_copy
from mmrl.runs.fingerprint import weights_digest
from mmrl.runs.folder import set_aside
from mmrl.runs.run_log import RunLog
from mmrl.runs.statistics import HEADLINES
from mmrl.training.machines import in_first_process, on_every_machine
from mmrl.training.processes import all_ranks, capture_global_rng, merge_lists, restore_global_rng
from mmrl.training.recipe import Recipe, Reference
from mmrl.training.settings import BaseRunConfig
from mmrl.training.sharding import loading, saving
from mmrl.training.update import Updates
from mmrl.workers.interpreters import local_model

LOGGER = logging.getLogger("mmrl")
LARGEST_SHARE = 0.05
"""Maximum fraction of the run's time for timed checkpoints; slow checkpoints are written less often."""


class RunSaver:
    """Writes and reads the checkpoints of a run."""

    def __init__(
        self,
        recipe: Recipe[Any, Any],
        config: BaseRunConfig,
        run_dir: Path,
        accelerator: Accelerator,
        *,
        reference: Reference,
        updater: Updates,
        tasks: Stateful,
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
        self.evaluation_pending = False
        """Whether the run was stopped after a step, before the evaluation due at that step."""
        self._saved_at: int | None = None
        """Step of the last checkpoint that was written or attempted."""
        self._waits_since = time.monotonic()
        self._write_s = 0.0
        self._start_digest: str | None = None
        """Digest of the frozen reference, if resuming loads its weights again from `model.path`."""

    def start(self) -> None:
        """Remove leftovers of a run that was deleted or stopped before its first checkpoint."""
        # one process writes; the others wait at the next collective call
        if self.accelerator.is_main_process:
            remove_drafts(self.run_dir)
            shutil.rmtree(self.run_dir / "reference", ignore_errors=True)

    def scheduled(self, step: int) -> bool:
        """Whether a checkpoint is due after a step, regardless of time."""
        every = self.config.checkpoint.every
        return step >= self.config.trainer.steps or bool(every and step and step % every == 0)

    def overdue(self) -> bool:
        """Whether a checkpoint is due because of the time since the last one; the same in every process."""
        seconds = 60 * self.config.checkpoint.minutes
        waited = time.monotonic() - self._waits_since
        # a checkpoint that takes longer than 5% of the interval makes the interval longer
        soon = not seconds or waited < max(seconds, self._write_s / LARGEST_SHARE)
        # the first process decides, since clocks of machines differ
        return not all_ranks(soon or not self.accelerator.is_main_process, self.accelerator)

    def save(self, step: int) -> None:
        """Write a checkpoint; if the disk is full, report it, continue training and keep the older ones."""
        # a slower process may still be in its last optimiser step
        self.accelerator.wait_for_everyone()
        # the generators of every process, which differ
        rng = merge_lists([capture_global_rng()], self.accelerator)
        self._waits_since = began = time.monotonic()
        # also if writing fails: a second attempt at the same step would fail too
        self._saved_at = step
        main = self.accelerator.is_main_process
        # sharded weights are gathered here, which every process has to take part in
        with saving(self.recipe.policy, keep=main), self._reference_for_saving(keep=main):
            # collective as well, so it comes before the branch
            updater = self.updater.state_dict()
            if main:
                self._write(step, updater, rng)
        # from the end: a slow disk must not leave less time for training
        self._waits_since = time.monotonic()
        self._write_s = self._waits_since - began

    def _write(self, step: int, updater: dict[str, Any], rng: list[Any]) -> None:
        """Write a checkpoint, in the first process."""
        state = {
            "step": step,
            "evaluation_pending": self.evaluation_pending,
            "updater": updater,
            "tasks": self.tasks.state_dict(),
            "recipe": self.recipe.state_dict(),
            "reference": self._digest_of_start(),
            "rng": rng,
            **self.log.state_dict(),
        }
        with self.log.watch.stage("checkpoint"):
            try:
                # written under a temporary name, with the state last, so that a kill leaves the older checkpoints
                self.checkpoints.save(step, state, self.write_parts)
            except OSError as error:
                self._failed(step, error)

    def save_before_stop(self, step: int) -> None:
        """Write a checkpoint before the run stops, unless this step already has one."""
        # a checkpoint by schedule has been written just now, but it does not know of a pending evaluation
        if self._saved_at != step or self.evaluation_pending:
            self.save(step)

    def resume(self, *, from_last_good: bool = False) -> int | None:
        """Restore the newest checkpoint."""
        main = self.accelerator.is_main_process
        if main:
            remove_drafts(self.run_dir)
            self.checkpoints.remove_partial()
            if from_last_good and self.checkpoints.steps():
                self.checkpoints.set_damaged_aside()
        # the path only: each process reads the files itself
        folder = in_first_process(self.accelerator, self._newest)
        if folder is None:
            self._start_again()
            return None
        # a machine without the folder would otherwise fail in one process and hang the rest
        with on_every_machine(folder, self.accelerator):
            step = self._restore_from(folder)
        self._saved_at = step
        # steps after the checkpoint are repeated, and would appear twice
        self.log.truncate_after(step)
        if main:
            self._restore_best(step)
            # after the best one is known, which is never forgotten
            self.checkpoints.forget_old()
        LOGGER.info("resumed at step %d from %s", step, folder)
        return step

    def _newest(self) -> Path | None:
        """The newest checkpoint, verified, or None; called in the process that writes them."""
        if not self.checkpoints.steps():
            return None
        self.checkpoints.best()  # a damaged best.json is refused before anything is changed
        return self.checkpoints.latest()

    def _restore_from(self, folder: Path) -> int:
        state = Checkpoints.load_state(folder)
        try:
            # the state of another recipe or library version fails somewhere inside; the user needs the file and the
            # cause
            return self._restore(state, folder)
        except (KeyError, ValueError, TypeError, IndexError, RuntimeError) as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise UserError(f"the state in {folder} does not match this configuration: {reason}") from error

    def note_best(self, step: int) -> None:
        """Mark this step's checkpoint if its evaluation is the best so far."""
        evaluations = [evaluation for evaluation in self.log.evaluations if evaluation["step"] == step]
        if not evaluations or not self.accelerator.is_main_process:
            return
        if not self.scheduled(step):  # which one is the best must not hang on when a checkpoint was written by time
            return
        # the first split is the main result
        split = next(iter(self.recipe.eval_tasks))
        latest = next((e for e in reversed(evaluations) if e["split"] == split), evaluations[-1])
        # without a setting, the first score that the recipe calls a headline
        metric = self.config.checkpoint.best_metric or _first_score(latest)
        if metric not in latest:
            raise RunError(f"checkpoint.best_metric '{metric}' is not reported; available: {', '.join(latest)}")
        best = self.checkpoints.best()
        # the checkpoint of this step may have failed to be written
        if not self.checkpoints.path(step).is_dir() or not math.isfinite(latest[metric]):
            return
        if best is None or latest[metric] > best["value"]:
            # a failed note is no reason to stop: the checkpoint itself is there
            try:
                self.checkpoints.mark_best(step, metric, latest[metric])
            except OSError as error:
                LOGGER.error("checkpoint at step %d is the best so far but could not be marked: %s", step, error)

    def _restore(self, state: dict[str, Any], folder: Path) -> int:
        # first: other data, or another model at the start, is refused before anything is changed
        self.tasks.load_state_dict(state["tasks"])
        self._check_start(state.get("reference"), folder)
        with loading(self.recipe.policy):
            # from the checkpoint and not from model.path, which may have moved
            self.recipe.policy.load_weights(folder / "model")
        copied = self.reference.copy
        if copied is not None and (folder / "reference").is_dir():  # else no step needed it yet: the start's
            with self.reference.whole(), loading(copied):
                self.reference.load(folder / "reference")
        # after the policy: moments belong to these weights
        self.updater.load_state_dict(state["updater"])
        self.recipe.load_state_dict(state["recipe"])
        self.recipe.load_parts(folder)
        self.log.load_state_dict(state)
        # a run that is resumed with more processes has no states for the last ones
        restore_global_rng(state["rng"][min(self.accelerator.process_index, len(state["rng"]) - 1)])
        self.evaluation_pending = bool(state.get("evaluation_pending"))
        return int(state["step"])

    def _restore_best(self, step: int) -> None:
        """Name the best of the checkpoints that are there, as it was when this step's was written."""
        best = self.checkpoints.best()
        if best is None:  # of a later step that is gone, if there was one
            self.checkpoints.forget_best()
            for earlier in self.checkpoints.steps():
                # evaluations are in the log, so that marks can be made again
                self.note_best(earlier)
        else:
            self.note_best(step)  # a run killed right after writing the checkpoint had no time to

    def _start_again(self) -> None:
        if self.accelerator.is_main_process:
            aside = set_aside(self.run_dir)
            kept = f"; its files were moved to {aside}" if aside else ""
            LOGGER.warning("%s has no checkpoint yet; the run restarts from the beginning%s", self.run_dir, kept)
        # -1: everything that the log holds
        self.log.truncate_after(-1)

    @property
    def _start_path(self) -> str:
        """`model.path`, empty if the configuration has none."""
        path = getattr(getattr(self.config, "model", None), "path", "")
        return path if isinstance(path, str) else ""

    @property
    def _starts_from_folder(self) -> bool:
        """Whether the frozen reference is a model in a folder, from which a resume makes it again."""
        here = bool(self._start_path) and local_model(self._start_path).is_dir()
        # an adapter is small, and the digest would be that of the whole model
        return self.reference.kind == "frozen" and here and not getattr(self.recipe.policy, "has_adapter", False)

    def _digest_of_start(self) -> str | None:
        """Digest that stands for the weights of the reference in a checkpoint; None if it holds them, or has none."""
        if self._start_digest is None and not self._has_reference and self._starts_from_folder:
            assert self.reference.copy is not None
            self._start_digest = weights_digest(self.reference.copy)
        return self._start_digest

    def _check_start(self, saved: str | None, folder: Path) -> None:
        """Refuse a reference that is not that of the checkpoint; raises UserError."""
        copied = self.reference.copy
        if saved is None or copied is None:
            return
        with self.reference.whole():
            found = weights_digest(copied)
        if found != saved:
            raise UserError(
                f"{self._start_path} is no longer the model that this run started from and compares with (digest "
                f"{saved[:12]}, now {found[:12]}): the folder or a setting such as model.dtype has changed; "
                f"restore it, or continue from {folder}/model in a run with another output_dir"
            )
        self._start_digest = saved

    @contextlib.contextmanager
    def _reference_for_saving(self, *, keep: bool) -> Iterator[None]:
        """Gather the weights of the reference if this checkpoint writes it; every process calls it."""
        # a frozen reference is written once for all checkpoints of a run
        known = self._start_digest is not None or self._has_reference
        written = self.reference.needs_saving and (self.reference.kind == "ema" or not known)
        if not all_ranks(not (keep and written), self.accelerator):  # the first process knows what is on disk
            assert self.reference.copy is not None
            with self.reference.whole(), saving(self.reference.copy, keep=keep):
                yield
        else:
            yield

    @property
    def _has_reference(self) -> bool:
        return (self.run_dir / "reference" / ".whole").is_file()

    def write_parts(self, folder: Path) -> None:
        """Write the policy, the recipe's additional weights and the reference into a checkpoint folder."""
        # in the format of its library, so that the folder can be used without the suite
        self.recipe.policy.save_pretrained(folder / "model")
        self.recipe.save_parts(folder)
        if not self.reference.needs_saving:
            return
        # it changes with every step, so each checkpoint has a copy
        if self.reference.kind == "ema":
            self.reference.save(folder / "reference")
            return
        if self._start_digest is not None:
            return
        shared = self.run_dir / "reference"  # a frozen reference never changes: written once, linked afterwards
        if not self._has_reference:
            self.reference.save(shared)
            # only now: a kill in between leaves a folder that counts as missing
            (shared / ".whole").touch()
        # hard links where the file system has them
        link_or_copy(shared, folder / "reference")

    def _failed(self, step: int, error: OSError) -> None:
        kept = self.checkpoints.steps()
        message = (
            f"checkpoint at step {step} could not be written to {self.checkpoints.folder}: {error}; no partial "
            f"files were left; kept steps: {kept or 'none'}"
        )
        # the last checkpoint is the result of the run
        if step >= self.config.trainer.steps:
            raise RunError(message) from error
        LOGGER.error("%s; training continues; free some disk space", message)
        self.log.failed_checkpoints += 1


def _first_score(evaluation: dict[str, Any]) -> str:
    return next((name for name in evaluation if name.startswith(HEADLINES)), "n")
