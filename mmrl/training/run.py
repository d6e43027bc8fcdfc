"""Runs from configuration to report: train one, evaluate one, or finish several that build on each other."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import logging
import os
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mmrl.config import as_override, escaped, load_run
from mmrl.entries import load_target
from mmrl.errors import RunError, UserError
from mmrl.files import output_folder, read_json_object, read_text, write_atomically
from mmrl.recipes import plan_of, preview_of, reader_of
from mmrl.runs.dry_run import DataRead, NotReadError, data_only
from mmrl.runs.export import chosen_checkpoint
from mmrl.runs.fingerprint import weights_digest
from mmrl.runs.folder import FINISHED, RunLock, has_begun
from mmrl.runs.ledger import protocol_of, write_answers, write_ledger
from mmrl.runs.records import LoggedWarnings, finite_or_none
from mmrl.trust import remember
from mmrl.workers.interpreters import local_model

if TYPE_CHECKING:
    from accelerate import Accelerator

    from mmrl.runs.tracking import Tracker
    from mmrl.training.evaluation import Evaluation
    from mmrl.training.machines import Watch
    from mmrl.training.recipe import Recipe, Step


LOGGER = logging.getLogger("mmrl")
NAMED_FILES = "named_files.json"
"""Digests of the files and functions that the configuration of a run folder names."""
WRITE_REPORT = "mmrl.report.page:write_report"
"""Given by name and not imported, because the report is in a layer above training."""


def train(entry: Any, config: Any, *, resume: bool = False, from_last_good: bool = False) -> Path:
    """Train a recipe and write its run folder.

    SIGTERM, SIGHUP and the first Ctrl-C end the run after the step, with a checkpoint.

    Args:
        entry: the recipe's row of `mmrl.recipes.RECIPES`.
        config: its filled configuration.
        resume: continue the run in `config.output_dir`.
        from_last_good: where its newest checkpoint is damaged, continue from the newest whole one.

    Returns:
        The run folder, holding checkpoints, metrics.jsonl, result.json and report.html.

    Raises:
        UserError: the folder is taken, there is nothing to resume, or an input is wrong.
        RunError: the run could not be finished; what it produced so far is kept.
        RunStopped: a signal asked for the end; the state is saved.
    """
    run_dir = Path(config.output_dir)
    with ExitStack() as stack:
        # in several processes one of them claims the folder, so they have to be joined before
        several = int(os.environ.get("WORLD_SIZE", "1")) > 1
        joined = _start(config, trains=True) if several else None

        def claim() -> dict[str, tuple[Any, Any]]:
            # the lock first: two runs that start at once must not both find the folder free
            stack.enter_context(RunLock(run_dir))
            _check_folder(run_dir, resume)
            # read before the run overwrites the configuration
            return changed_settings(run_dir, config) if resume else {}

        from mmrl.training.machines import describe, in_first_process, watched
        from mmrl.training.processes import machine

        # a hang is reported with the stage that each process is in
        watch = None if joined is None else stack.enter_context(watched(joined))
        # one process looks, and all of them raise what it finds
        changed = in_first_process(joined, claim)
        # from here on: data and models warn, too
        logged = stack.enter_context(LoggedWarnings())
        accelerator = joined or _start(config, trains=True)
        # refused before models are loaded, which takes minutes
        _check_processes(config, accelerator)
        _check_memory(entry, config, accelerator)
        recipe = _build(entry, config, accelerator)
        # environments and reward workers end, however the run ends
        stack.callback(recipe.close)
        about = [f"{name} {value}" for name, value in machine(accelerator).items()]
        LOGGER.info("%s", ", ".join([*filter(None, [recipe.model_kind]), *about]))
        if found := describe(accelerator, run_dir):
            LOGGER.info("%s", found)
        if accelerator.is_main_process and changed:
            LOGGER.warning("resuming with different settings than before: %s", listed_changes(changed))
        try:
            _train(entry, recipe, config, accelerator, watch, logged, resume=resume, from_last_good=from_last_good)
        except OSError as error:
            saved = any((run_dir / "checkpoints").glob("step-*"))
            hint = (
                "`--resume` continues from the last checkpoint" if saved else "there is no checkpoint to continue from"
            )
            raise RunError(f"run in {run_dir} failed: {error}; {hint}") from error
    return run_dir


def evaluate(entry: Any, config: Any, run_dir: Path | None = None) -> dict[str, float]:
    """Evaluate a model on the configuration's held-out splits; the results are added to `config.output_dir`."""
    from mmrl.training.ray_rollers import open_rollers

    # before the model is loaded: a read-only folder would only fail at the end
    output_folder(config.output_dir, "output_dir")
    folder = None if run_dir is None else chosen_checkpoint(run_dir)
    with ExitStack() as stack:
        logged = stack.enter_context(LoggedWarnings())
        recipe, accelerator, position = stack.enter_context(open_evaluation(entry, config, folder))
        step = position.number
        if accelerator.is_main_process:
            logged.write_to(Path(config.output_dir), lambda: step, keep=has_begun(Path(config.output_dir)))
        about = evaluation_of(recipe, config, folder, accelerator, position) if accelerator.is_main_process else {}
        rollers = open_rollers(recipe, config, accelerator, Path(config.output_dir), entry)
        stack.callback(rollers.close)
        results: dict[str, Evaluation] = {}
        for split in recipe.eval_tasks:
            # as in training, so that numbers agree with those of the run
            with accelerator.autocast():
                results[split] = found = rollers.evaluate(split, position)
            if found.failure:
                raise RunError(found.failure)
            if accelerator.is_main_process:
                _append_evaluation(Path(config.output_dir), step, split, found.metrics)
        if accelerator.is_main_process:
            # the split is a column, since all splits are in one file
            rows = [{"split": split, **row} for split, found in results.items() for row in found.entries]
            LOGGER.info("ledger: %s", write_ledger(Path(config.output_dir), rows, about))
            if answers := write_answers(Path(config.output_dir), rows, step):
                LOGGER.info("answers: %s", answers)
        if accelerator.is_main_process:
            if not has_begun(Path(config.output_dir)):
                _report_evaluation(Path(config.output_dir), results)
            else:
                # not rewritten here: it may have been written with the run's earlier stages
                command = shlex.join(["mmrl", "report", config.output_dir])
                LOGGER.info("`%s` adds this evaluation to the run's report", command)
        accelerator.wait_for_everyone()  # a process that leaves early takes the others' connections with it
        return {f"{split}/{name}": value for split, found in results.items() for name, value in found.metrics.items()}


def dry_run(entry: Any, config: Any, gpu_memory_gb: float | None = None, processes: int = 1) -> Iterator[str]:
    """Lines of `mmrl train --dry-run`: the run's data, read by its own code, and its memory.

    Args:
        entry: the recipe's row of `mmrl.recipes.RECIPES`.
        config: its filled configuration.
        gpu_memory_gb: memory of each GPU; None plans for this machine.
        processes: number of processes, each on a GPU.

    Raises:
        UserError: what the run would refuse, after the plan, which may not depend on it.
    """
    from mmrl.training.plan import certain, described, machine_of

    machine = machine_of(gpu_memory_gb, processes)
    refused: UserError | None = None
    recipe = None
    try:
        lines, recipe = _read(entry, config)
        yield from lines
    except UserError as error:
        # kept until the plan is shown, which may need no data
        refused = error
    try:
        footprint = plan_of(entry)
        # what was read, or without it what is certain
        footprint = functools.partial(footprint, recipe=recipe) if recipe else functools.partial(certain, footprint)
        yield from described(config, footprint, machine, processes)
    except UserError as error:
        refused = refused or error
    if refused is not None:
        raise refused


def read_data(entry: Any, config: Any) -> list[str]:
    """Lines on a run's data; see `_read`."""
    return _read(entry, config)[0]


def _read(entry: Any, config: Any) -> tuple[list[str], Any]:
    """Read and check a run's data with the run's own code, up to where it would load its model.

    Returns:
        Lines on the data, and the recipe without its model; sets that the run itself builds or downloads are named and
        not read, and without training data there is no recipe.

    Raises:
        UserError: what the run would raise.
    """
    # sets that are downloaded are left out one after the other, until the rest can be read
    held_out, left = dict(getattr(config, "eval_data", None) or {}), list[str]()
    recipe = None
    while recipe is None:
        try:
            # leaves the recipe at the point where it would load the model
            with data_only():
                # tried again without the set that cannot be read
                _open_recipe(entry, config if not left else dataclasses.replace(config, eval_data=held_out))
            raise RuntimeError(f"the recipe '{entry.name}' never calls model_follows")
        except DataRead as read:
            recipe = read.recipe
        except NotReadError as missing:
            name = next((name for name, data in held_out.items() if missing.path in _places(data)), None)
            left.append(f"{f'eval_data.{name}' if name else 'data'}: {missing.path}: {missing.reason}")
            # without training data there is no recipe; held-out sets are read by themselves
            if name is None:
                return [*left, *_read_alone(entry, held_out)], None
            del held_out[name]
    preview = preview_of(entry)
    return [*(count_lines(config, recipe) if preview is None else preview(config, recipe)), *left], recipe


def count_lines(config: Any, recipe: Any) -> list[str]:
    """Number of tasks of each set."""
    sets = {"data": (getattr(config, "data", None), recipe.train_tasks)}
    sets |= {f"eval_data.{name}": (config.eval_data[name], tasks) for name, tasks in recipe.eval_tasks.items()}
    return [": ".join([key, *_places(data), f"{len(tasks)} tasks"]) for key, (data, tasks) in sets.items()]


def _places(data: Any) -> list[str]:
    """Path of a set, if it has one."""
    return [path for name in ("path", "file") if isinstance(path := getattr(data, name, None), str) and path]


def _read_alone(entry: Any, held_out: Mapping[str, Any]) -> list[str]:
    """Read the held-out sets of a recipe whose training data are not here."""
    found, read = list[str](), reader_of(entry)
    for name, data in held_out.items() if read is not None else ():
        try:
            with data_only():
                loaded = read(data)
            count = len(getattr(loaded, "tasks", loaded))
            found.append(": ".join([f"eval_data.{name}", *_places(data), f"{count} tasks"]))
        except NotReadError as missing:
            found.append(f"eval_data.{name}: {missing.path}: {missing.reason}")
        except UserError as error:
            raise UserError(f"eval_data.{name}: {error}") from error
    return found


@contextmanager
def open_evaluation(entry: Any, config: Any, folder: Path | None) -> Iterator[tuple[Any, Accelerator, Step]]:
    """The recipe of an evaluation with the policy of a checkpoint or of the configuration, and its step."""
    from mmrl.runs.checkpoint import Checkpoints
    from mmrl.runs.tracking import bars_hidden
    from mmrl.training.machines import watched
    from mmrl.training.recipe import Step

    # the base model of a run may be gone, its own weights are in the checkpoint
    if folder is not None:
        _start_from_checkpoint(config, folder / "model")
    accelerator = _start(config, trains=False)
    # an evaluation without training has no `tracking`, and shows its progress
    quiet = hasattr(config, "tracking") and config.tracking.quiet
    # the others would wait for a lost process for as long as collective operations may take
    with watched(accelerator) as watch, bars_hidden(quiet), closing(_build(entry, config, accelerator)) as recipe:
        if watch is not None:
            watch.stage = lambda: "the evaluation"
        if not recipe.eval_tasks:
            raise UserError("this configuration has no evaluation data; set eval_data")
        step = 0
        if folder is not None:
            recipe.policy.load_weights(folder / "model")
            recipe.load_state_dict(Checkpoints.load_state(folder)["recipe"])  # averages that evaluations use
            LOGGER.info("evaluating %s", folder)
            # the checkpoint's name is the step it was written after
            step = int(folder.name.removeprefix("step-"))
        recipe.policy.to(accelerator.device).eval()
        yield recipe, accelerator, Step(step, getattr(config.trainer, "steps", 1))  # other things have no steps


def evaluation_of(
    recipe: Any, config: Any, folder: Path | None, accelerator: Accelerator, step: Step
) -> dict[str, Any]:
    """Content of protocol.json: the protocol, and the policy, machine and configuration that it was used with."""
    from mmrl.config import to_container
    from mmrl.training.processes import machine, versions

    # a host name is not part of what makes results comparable
    device = {name: value for name, value in machine(accelerator).items() if name != "host"}
    # averages of weights, where evaluations use them, are what is hashed
    with recipe.evaluating(recipe.policy):
        policy = {"sha256": weights_digest(recipe.policy), "step": step.number}
        protocol = protocol_of(recipe, config, step)
    place, checkpoint = Path(config.output_dir).absolute(), None if folder is None else folder.absolute()
    if checkpoint is not None and checkpoint.is_relative_to(place):  # the run's folder may be moved
        checkpoint = checkpoint.relative_to(place)
    about = {"protocol": protocol, "policy": {**policy, "checkpoint": checkpoint and str(checkpoint)}}
    return about | {"machine": {**device, "versions": versions()}, "config": to_container(config)}


def finish_run(config: Path, run_dir: Path, overrides: Sequence[str] = ()) -> Path:
    """Train a configuration: start it, continue it if it was interrupted, or return at once if it is finished."""
    entry, options = load_run(config, [*overrides, as_override("output_dir", escaped(str(run_dir)))])
    # a finished run is not repeated, even if its settings have changed since
    if read_result(run_dir).get("status") in FINISHED:
        if changed := changed_settings(run_dir, options):
            LOGGER.warning(
                "%s has already finished with different settings and is kept: %s", run_dir, listed_changes(changed)
            )
        return run_dir
    return train(entry, options, resume=has_begun(run_dir))


def read_result(run_dir: Path) -> dict[str, Any]:
    """Content of a run's result.json; empty if missing."""
    path = run_dir / "result.json"
    try:
        return read_json_object(path) if path.is_file() else {}
    except UserError as error:
        raise UserError(f"{error}; delete it and resume the run to create it again") from error


def last_model(run_dir: Path) -> Path:
    """Folder of the model in a run's newest checkpoint."""
    from mmrl.runs.checkpoint import Checkpoints

    checkpoints = Checkpoints(run_dir / "checkpoints", 0)
    return checkpoints.path(checkpoints.steps()[-1]) / "model"


def _train(
    entry: Any,
    recipe: Recipe[Any, Any],
    config: Any,
    accelerator: Accelerator,
    watch: Watch | None,
    logged: LoggedWarnings,
    *,
    resume: bool,
    **options: Any,
) -> None:
    """Run the loop in a folder that is this run's own; `options` are those of `Trainer.resume`."""
    from mmrl.training.machines import check_same_tasks
    from mmrl.training.trainer import StopSignals, Trainer

    main, run_dir = accelerator.is_main_process, Path(config.output_dir)
    with ExitStack() as stack:
        # from here on signals end the run after the step
        stop = stack.enter_context(StopSignals())
        # one process writes metrics and events
        tracker = _tracker(run_dir, config) if main else None
        if tracker is not None:
            stack.callback(tracker.close)
        trainer = Trainer(recipe, config, run_dir, accelerator, tracker, stop, entry=entry)
        # closed before the tracker, since workers may still report
        stack.callback(trainer.rollers.close)
        if watch is not None:
            watch.stage = lambda: trainer.stage
        # refused if the processes have read different data
        check_same_tasks(accelerator, recipe.data_digest)
        if resume:
            trainer.resume(**options)
        if main:  # only now: a resume that is refused leaves the configuration as it was
            _save_config(run_dir, config)
            logged.write_to(run_dir, lambda: trainer.step, keep=resume)
        # the others wait until the configuration is written
        accelerator.wait_for_everyone()
        trainer.run()
        if main:
            # by name: the report reads runs and is in a layer above training
            load_target(WRITE_REPORT)(run_dir)
        accelerator.wait_for_everyone()  # a process that leaves early takes the others' connections with it


def _start_from_checkpoint(config: Any, folder: Path) -> None:
    """Use a run's own weights as `model.path` if the model that it started from is gone, as after a move."""
    model = getattr(config, "model", None)
    path = getattr(model, "path", None)
    # a hub id is not a path, and is left to transformers
    missing = isinstance(path, str) and path and not local_model(path).exists()
    if missing and getattr(model, "build", None) is None and folder.is_dir():
        LOGGER.info("model.path %s does not exist; starting from %s", path, folder)
        model.path = str(folder)  # type: ignore[union-attr]


def _start(config: Any, *, trains: bool) -> Accelerator:
    """Join the processes of the run."""
    from mmrl.training.processes import limit_primitive_cache, make_accelerator, seed_everything

    if trains and config.trainer.release_memory:  # recipes that only measure have no such setting
        limit_primitive_cache()
    if config.trainer.threads:
        torch.set_num_threads(config.trainer.threads)
    # models draw initial weights from the global generators
    seed_everything(config.seed)
    timeout = {"timeout_minutes": config.trainer.timeout_minutes} if trains else {}
    return make_accelerator(config.trainer.mixed_precision, **timeout)


def _check_processes(config: Any, accelerator: Accelerator) -> None:
    """Refuse a number of processes that does not work with the configuration."""
    from mmrl.training.processes import check_shares

    # each process gets the same number of tasks, so that steps have no empty process
    check_shares("trainer.tasks_per_step", config.trainer.tasks_per_step)
    if config.trainer.sharding != "none":
        from mmrl.training.sharding import check_processes

        check_processes(accelerator)
    if (rollers := getattr(config, "rollers", None)) is not None:
        from mmrl.training import ray_rollers

        ray_rollers.check_processes(rollers, accelerator)


def _check_memory(entry: Any, config: Any, accelerator: Accelerator) -> None:
    """Refuse a run that is larger than its GPU before it loads weights."""
    # on a CPU there is no fixed limit
    if accelerator.device.type != "cuda":
        return
    from mmrl.training.plan import GB, check_state

    try:
        # a recipe without a footprint cannot be checked
        footprint = plan_of(entry)
    except UserError:
        return
    memory = torch.cuda.get_device_properties(accelerator.device).total_memory
    check_state(config, footprint, memory / GB, accelerator.num_processes)


def _build(entry: Any, config: Any, accelerator: Accelerator) -> Recipe:
    """The recipe, with its data and models."""
    from mmrl.training.machines import in_turns

    # one after the other on a machine, so that they do not all download or convert at once
    return in_turns(accelerator, lambda: _open_recipe(entry, config))


def _open_recipe(entry: Any, config: Any) -> Recipe:
    recipe_class = entry.load_recipe_class()
    try:
        # a missing file of the user, in contrast to a fault in the suite
        recipe: Recipe = recipe_class(config)
    except OSError as error:
        if error.filename is None:  # no file, no socket and no memory for another: not what was asked for
            raise RunError(f"the run cannot be started: {error}") from error
        raise UserError(f"an input cannot be read: {error}") from error
    return recipe


def _check_folder(run_dir: Path, resume: bool) -> None:
    if has_begun(run_dir) and not resume:
        # a run that was stopped before its first checkpoint has nothing to lose
        saved = any((run_dir / "checkpoints").glob("step-*"))
        hint = "add --resume to continue it" if saved else "it has no checkpoint yet: --resume restarts it"
        raise UserError(
            f"{run_dir} already contains a run; {hint}, choose another output_dir=..., or delete the folder"
        )
    if not has_begun(run_dir) and not (run_dir / NAMED_FILES).exists():
        # what a run writes or removes; an evaluation alone writes a report
        for name in (
            "config.yaml",
            "reference",
            *(() if (run_dir / "evaluations.jsonl").exists() else ("report.html",)),
        ):
            if (run_dir / name).exists():
                raise UserError(
                    f"output_dir {run_dir} has a {name} that no run wrote; choose another output_dir=..., or move it"
                )
    if resume and not has_begun(run_dir) and not (run_dir / "config.yaml").is_file():
        raise UserError(f"nothing to resume: {run_dir} does not contain a run")


def changed_settings(run_dir: Path, config: Any) -> dict[str, tuple[Any, Any]]:
    """Old and new value of each setting that differs from the run's; another recipe cannot continue it."""
    from omegaconf import OmegaConf

    from mmrl.config import load_omega, to_container, without_fixed

    path = run_dir / "config.yaml"
    if not path.is_file():
        return {}
    try:
        stored = load_omega(path)
        old = flat_settings(OmegaConf.to_container(stored))
    except Exception as error:
        raise UserError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    new = flat_settings(to_container(config))
    if old.get("recipe") != new["recipe"]:
        raise UserError(
            f"{run_dir} is a run of recipe '{old.get('recipe')}' and cannot be continued with '{new['recipe']}'"
        )
    try:
        without_fixed(config, stored)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    # where results go does not change them
    keys = [key for key in new if not key.startswith(("output_dir", "tracking."))]
    # keys of the new configuration: an option that went away changes nothing
    changed = {key: (old.get(key), new[key]) for key in keys if old.get(key) != new[key]}
    # files and code are named by settings that may be equal while their contents differ
    before = read_json_object(run_dir / NAMED_FILES) if (run_dir / NAMED_FILES).is_file() else {}
    now = _named_digests(config)
    same = [key for key in now if key in before and key not in changed]
    return changed | {f"contents of {key}": (before[key], now[key]) for key in same if before[key] != now[key]}


def _named_digests(config: Any) -> dict[str, str]:
    """Digest of each file and function that a configuration names as an input."""
    from mmrl.config import to_container
    from mmrl.rewards.reward_loading import named_digests

    values = to_container(config)
    return named_digests({key: value for key, value in values.items() if key not in ("output_dir", "tracking")})


def listed_changes(changed: Mapping[str, tuple[Any, Any]]) -> str:
    """Changed settings for a message."""
    return ", ".join(f"{key} {old} -> {new}" for key, (old, new) in changed.items())


def flat_settings(values: Any, prefix: str = "") -> dict[str, Any]:
    """Values of nested mappings by dotted name; an empty mapping is a value."""
    found: dict[str, Any] = {}
    for key, value in values.items() if isinstance(values, Mapping) else ():
        nested = isinstance(value, Mapping) and value
        found |= flat_settings(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return found


def _save_config(run_dir: Path, config: Any) -> None:
    from mmrl.config import save, to_container

    file = run_dir / "config.yaml"
    try:
        save(config, file)
        remember(to_container(config), read_text(file, errors="surrogateescape"))
        write_atomically(run_dir / NAMED_FILES, json.dumps(_named_digests(config), indent=1) + "\n")
    except OSError as error:
        raise UserError(f"output_dir {run_dir} cannot be written: {error}") from error


def _tracker(run_dir: Path, config: Any) -> Tracker:
    from mmrl.config import to_container
    from mmrl.runs.tracking import build_tracker

    return build_tracker(
        config.tracking,
        run_dir,
        total_steps=config.trainer.steps,
        run_config=to_container(config),
        recipe=config.recipe,
    )


def _append_evaluation(folder: Path, step: int, split: str, metrics: dict[str, float]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    row = {"step": step, "time": time.time(), "tag": "evaluate", "split": split, **metrics}
    with (folder / "evaluations.jsonl").open("a", encoding="utf-8") as handle:
        handle.write(json.dumps(finite_or_none(row), allow_nan=False) + "\n")


def _report_evaluation(folder: Path, results: Mapping[str, Evaluation]) -> None:
    """Write samples of all splits and a report into a folder in which nothing was trained."""
    from mmrl.runs.records import write_samples

    # one sample of each split in turn, so that the report shows all of them
    in_turns = itertools.zip_longest(*(found.records for found in results.values()))
    write_samples(folder, 0, "eval", [record for turn in in_turns for record in turn if record is not None])
    LOGGER.info("report: %s", load_target(WRITE_REPORT)(folder))
