"""A rollout worker: a copy of a recipe, the weights that it is given, and what it sends back besides rows."""

from __future__ import annotations

import logging
import os
import pickle
import socket
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, MutableSequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from mmrl.core.loss import Metric, merge_metrics
from mmrl.errors import RunError, UserError
from mmrl.training.processes import HeapTrimmer, limit_primitive_cache, make_accelerator, seed_everything, versions
from mmrl.training.recipe import Recipe
from mmrl.training.rollers import Hello, NotStarted, TrialUnit, Unit, UnitOutcome, measured, sampled
from mmrl.workers import given

LOGGER = logging.getLogger("mmrl")
OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
SENT = ("failures", "videos")
"""Subfolders of a run that workers write to."""
Weights = Mapping[str, tuple[np.ndarray, torch.dtype]]
"""Bytes (uint8) and type of trained parameters by name."""


def trained_weights(policy: nn.Module) -> Weights:
    """Copy the trained parameters as bytes."""
    # the types too: with bfloat16 whole weights, what is sent is not what the worker was built with
    return {name: (_as_bytes(weight), weight.dtype) for name, weight in _trained(policy).items()}


def _trained(policy: nn.Module) -> dict[str, nn.Parameter]:
    return {name: weight for name, weight in policy.named_parameters() if weight.requires_grad}


def _as_bytes(weight: Tensor) -> np.ndarray:
    # through uint8, since NumPy has no bfloat16
    return weight.detach().to("cpu", copy=True).contiguous().reshape(-1).view(torch.uint8).numpy()


@torch.no_grad()
def load_weights(policy: nn.Module, weights: Weights) -> None:
    """Copy weights into a policy, which adopts their types; raises RunError if the names of the weights differ."""
    own = _trained(policy)
    # names that only one side has: another LoRA rank or another frozen layer would go unnoticed
    if different := sorted(own.keys() ^ weights.keys()):
        raise RunError(f"a worker trains different weights from the training process: {', '.join(different[:4])}")
    for name, (content, kind) in weights.items():
        if own[name].dtype != kind:  # such as whole weights in bfloat16 of parts in float32
            own[name].data = own[name].data.to(kind)
        # a copy, because arrays from Ray's store are read-only
        own[name].copy_(torch.from_numpy(np.array(content)).view(kind).view(own[name].shape))


def checksum(policy: nn.Module, *, trained: bool) -> int:
    """Sum of the bits of the trained or the frozen parameters; fast, but not secure against manipulation."""
    total = 0
    for number, weight in enumerate(policy.parameters()):
        # trained weights change every step, frozen ones are compared once
        if weight.requires_grad == trained:
            raw = weight.detach().contiguous().reshape(-1).view(torch.uint8)
            # whole int32 numbers, so that the sum runs over 4 bytes at a time
            raw = torch.nn.functional.pad(raw, (0, -len(raw) % 4)).view(torch.int32)
            # weighed by position: two swapped weights change the sum
            total += (number + 1) * int(raw.sum(dtype=torch.int64))
    return total % 2**63


def begin_notes(recipe: Recipe[Any, Any]) -> dict[str, Counter[str]]:
    """Counts before a unit; lists are emptied."""
    # what is noted after this belongs to the next unit
    recipe.noted.clear()
    recipe.extra_samples = 0
    for each in recipe.added.values():
        if isinstance(each, MutableSequence):
            each.clear()
    return {name: Counter(each) for name, each in recipe.added.items() if isinstance(each, Mapping)}


def notes_since(recipe: Recipe[Any, Any], before: Mapping[str, Counter[str]]) -> dict[str, Any]:
    """Counts and list entries that a unit added to the recipe."""
    found: dict[str, Any] = {}
    for name, each in recipe.added.items():
        if isinstance(each, Mapping):
            # only the increase: the training process already has the counts of before
            found[name] = {key: each[key] - before[name][key] for key in each}
        else:
            found[name] = list(each)
    return found | {"noted": dict(recipe.noted), "extra_samples": recipe.extra_samples}


def add_notes(recipe: Recipe[Any, Any], found: Mapping[str, Any]) -> None:
    """Add what a unit has recorded in a worker."""
    for name, each in recipe.added.items():
        if isinstance(each, MutableSequence):
            each.extend(found[name])
        else:
            each.update(found[name])
    # shares of several units are merged, plain numbers are replaced by the newest
    shares = {name: value for name, value in found["noted"].items() if isinstance(value, Metric)}
    before = {name: value for name, value in recipe.noted.items() if name in shares and isinstance(value, Metric)}
    recipe.noted |= found["noted"] | merge_metrics([before, shares])
    recipe.extra_samples += found["extra_samples"]


@dataclass(frozen=True)
class WorkerJob:
    """A worker's recipe, and the state that must match the training process."""

    entry: Any
    """Row of `mmrl.recipes.RECIPES`."""
    config: Any
    folder: str
    """Working directory to which paths of the configuration are relative."""
    versions: Mapping[str, str]
    frozen: int
    """Checksum of the weights that are not trained."""
    objects: Mapping[str, bytes] = field(default_factory=dict)
    """Objects of the program that started the run; see `mmrl.workers.given`."""


class RolloutWorker:
    """A copy of a recipe that samples and scores, without optimiser or run folder."""

    def __init__(self) -> None:
        self._recipe: Recipe[Any, Any] | None = None
        self._accelerator: Accelerator | None = None
        self._output: tempfile.TemporaryDirectory[str] | None = None
        self._heap = HeapTrimmer(enabled=False)

    def open(self, job: bytes) -> Hello | NotStarted:
        """Build the recipe.

        Args:
            job: a pickled `WorkerJob`.
        """
        host = socket.gethostname()
        try:
            return self._open(job, host)
        except ModuleNotFoundError as error:
            return NotStarted(
                f"the worker on {host} has no module '{error.name}'; install it on every node, or put its folder on "
                "PYTHONPATH there"
            )
        except UserError as error:
            return NotStarted(f"the worker on {host} cannot start: {error}")
        except Exception as error:
            # for whoever runs with debug output; users get one line
            LOGGER.debug("%s", traceback.format_exc())
            return NotStarted(f"the worker on {host} cannot start: {type(error).__name__}: {error}")

    def _open(self, pickled: bytes, host: str) -> Hello | NotStarted:
        # or accelerate would try to join the training processes
        for name in [name for name in os.environ if name in OF_A_RANK or name.startswith("TORCHELASTIC")]:
            del os.environ[name]  # inherited from a training process that has started Ray
        job: WorkerJob = pickle.loads(pickled)
        here = versions()
        for name, version in job.versions.items():
            # other versions may compute other numbers, and nothing else would show it
            if here.get(name) != version:
                own = here.get(name, "none")
                return NotStarted(
                    f"the worker on {host} has {name} {own}, but the training process has {version}; install the "
                    "same version"
                )
        if not Path(job.folder).is_dir():
            return NotStarted(
                f"the worker on {host} does not have the folder {job.folder}, in which the run was started"
            )
        # paths of the configuration are relative to where the run was started
        os.chdir(job.folder)
        given.receive(job.objects)
        config = job.config
        # the recipe writes tracebacks and videos somewhere; they are sent back and removed
        self._output = tempfile.TemporaryDirectory(prefix="mmrl-worker-")
        config.output_dir = self._output.name
        config.tracking.quiet = True
        if config.trainer.threads:
            # as the training process does: the number of threads changes the rounding of sums
            torch.set_num_threads(config.trainer.threads)
        if config.trainer.release_memory:
            limit_primitive_cache()
        # models draw initial weights (LoRA, heads) from the global generators
        seed_everything(config.seed)
        self._accelerator = make_accelerator(config.trainer.mixed_precision)
        device = self._accelerator.device
        self._heap = HeapTrimmer(enabled=config.trainer.release_memory and device.type == "cpu")
        self._recipe = job.entry.load_recipe_class()(config)
        policy = self._recipe.policy
        # rows from a base model that differs would be trained on without anyone noticing
        if checksum(policy, trained=False) != job.frozen:
            return NotStarted(
                f"the model on {host} has different frozen weights from the model of the training process, "
                "although it was built from the same configuration; check whether its folder contains a "
                "different model"
            )
        policy.to(device)
        # no dropout while sampling
        policy.eval()
        return self.answer()

    def answer(self) -> Hello:
        """Reply that the worker is ready."""
        assert self._accelerator is not None
        return Hello(socket.gethostname(), str(self._accelerator.device))

    def load(self, weights: Weights, expected: int) -> None:
        """Load the weights of a step and verify their checksum."""
        assert self._recipe is not None
        load_weights(self._recipe.policy, weights)
        # weights travel through shared memory and over the network
        if checksum(self._recipe.policy, trained=True) != expected:
            raise RunError(f"the weights of a step were damaged on the way to the worker on {socket.gethostname()}")

    def load_state(self, state: Any, stages: Mapping[str, Any]) -> None:
        """Load what sampling needs besides weights: the recipe's own state and that of its stages."""
        assert self._recipe is not None
        if state is not None:
            self._recipe.load_rollout_state(state)
        for stage in self._recipe.stages:
            stage.load_state_dict(stages[stage.name])

    def work(self, unit: Unit | TrialUnit) -> UnitOutcome:
        """Sample and score a unit, or run its trials."""
        assert self._recipe is not None
        assert self._accelerator is not None
        began, before = time.perf_counter(), begin_notes(self._recipe)
        with _captured() as logs:
            # trials are scored by their measure
            if isinstance(unit, TrialUnit):
                found = measured(self._recipe, unit, self._accelerator)
            else:
                found = sampled(self._recipe, unit, self._accelerator)
        if found.rollouts is not None:
            # the training process may have no GPU of that number
            found.rollouts = found.rollouts.to("cpu")
        # before the next unit: what this unit has noted is not to be sent twice
        found.added = notes_since(self._recipe, before)
        found.logs = logs
        found.files = self._taken_files()
        self._heap.trim()
        found.seconds = time.perf_counter() - began
        return found

    def close(self) -> None:
        """End environments and reward workers."""
        if self._recipe is not None:
            self._recipe.close()
        if self._output is not None:
            self._output.cleanup()

    def _taken_files(self) -> dict[str, bytes]:
        """Files that the recipe has written for the run's folder, which are removed from its own."""
        assert self._output is not None
        root = Path(self._output.name)
        # sorted: the order of a directory differs between machines
        paths = [path for name in SENT for path in sorted((root / name).rglob("*")) if path.is_file()]
        found = {str(path.relative_to(root)): path.read_bytes() for path in paths}
        for path in paths:
            path.unlink()
        return found


@contextmanager
def _captured() -> Iterator[list[tuple[int, str]]]:
    """Level and text of what the suite logs meanwhile."""
    # INFO and above, as the training process shows
    found: list[tuple[int, str]] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append((record.levelno, record.getMessage()))

    handler = Kept(logging.INFO)
    LOGGER.addHandler(handler)
    try:
        yield found
    finally:
        LOGGER.removeHandler(handler)
