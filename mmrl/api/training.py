"""`mmrl.train`: from Python objects to a run."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, overload

from mmrl.api.inputs import Inputs, absolute, take_env, take_model, take_rewards, take_rows, take_settings
from mmrl.api.lent import undisturbed
from mmrl.api.methods import default_recipe, domain_of, resolve
from mmrl.api.result import Run, Table, evaluation_rows
from mmrl.api.rows import reusable, splits_of
from mmrl.entries import RecipeEntry
from mmrl.errors import UserError
from mmrl.files import write_atomically
from mmrl.runs.folder import has_begun
from mmrl.workers import given

LOGGER = logging.getLogger("mmrl")
RUNS = Path("runs")
"""Parent folder of runs without an `output_dir`."""
OBJECTS_FILE = "objects.json"
"""Source text and digest of the Python objects that a run was started with. It is for people and comparisons and is
never executed."""


@overload
def train(method: str, *, dry_run: Literal[True], **settings: Any) -> str: ...
@overload
def train(
    method: str,
    *,
    model: Any = None,
    data: Any = None,
    eval_data: Any = None,
    reward: Any = None,
    env: Any = None,
    steps: int | None = None,
    output_dir: str | Path | None = None,
    resume: bool = False,
    dry_run: Literal[False] = False,
    options: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Run: ...
def train(
    method: str,
    *,
    model: Any = None,
    data: Any = None,
    eval_data: Any = None,
    reward: Any = None,
    env: Any = None,
    steps: int | None = None,
    output_dir: str | Path | None = None,
    resume: bool = False,
    dry_run: bool = False,
    options: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Run | str:
    """Train a model from Python objects, with reinforcement learning or on reference answers.

        from mmrl import train

        run = train("grpo", model="smollm2", data=rows, reward=score, eval_data=held_out, steps=40)
        print(run.evaluation)

    It builds the configuration that a file would hold, with the same checks, and writes the same run folder.

    Args:
        method: a recipe, such as "papo", "awm" or "robot_ppo", or an objective, such as "grpo", "dr_grpo" or "gigpo",
            which is trained in the domain of what is given: questions, an agent in an `env`, images, a robot.
        model: folder, hub id, or name of a packaged model; (model, processor) of transformers, a pipeline of
            diffusers, or a robot policy that is a torch.nn.Module, which are trained as they are; or a dict with
            options of the section `model`.
        data: rows: a list of dicts or of prompts, a `datasets.Dataset`, or a path. A dict of sets, such as a
            DatasetDict, gives training rows as "train" and held-out ones under other names. For agents and robots
            also a number of seeds or layouts.
        eval_data: held-out rows, or a dict of sets of them.
        reward: function with TRL's signature, `score(prompts, completions, **columns) -> list of numbers`; name of a
            built-in reward; (either, weight); or a list or dict of these.
        env: environment of agents and robots: class, function that makes one, id of Gymnasium, or `module:name`; for
            agents also a program, a function of (task, endpoint).
        steps: training steps.
        output_dir: run folder; by default runs/METHOD, with a number if that is taken.
        resume: continue the run in `output_dir`; functions and loaded models are given again, and compared.
        dry_run: read the data and plan the memory without training.
        options: further options, by dotted names or nested.
        **settings: options by their last name, such as learning_rate, samples_per_task, max_new_tokens, seed, lora.
            `mmrl options METHOD` lists all.

    Returns:
        The finished `Run`; with `dry_run` the lines of the plan as one text.

    Raises:
        UserError: an argument is wrong, or what the method needs is missing.
        RunError: the run could not be finished; what it produced so far is kept.
        RunStopped: it was interrupted; a checkpoint is written, and `resume=True` continues.
    """
    if dry_run:
        return _planned(method, model, data, eval_data, reward, env, steps, options, settings)
    from mmrl.training.run import train as train_recipe

    folder = _folder(method, output_dir, resume)
    with _removed_unless_begun(folder):
        inputs = _inputs(method, folder, resume, model, data, eval_data, reward, env, steps, options, settings)
        config = _filled(inputs)
        objects = {name: value for name, value in inputs.objects.items() if name != given.MODEL}
        _compare_objects(folder, objects, resume)
        with undisturbed(inputs.lent, trains=True), given.having(inputs.objects, inputs.models):
            train_recipe(inputs.entry, config, resume=resume)
            owned = given.trained(inputs.owned)
    return Run(folder, inputs.objects, owned)


def evaluate(
    model: Any,
    data: Any = None,
    reward: Any = None,
    *,
    env: Any = None,
    method: str = "",
    output_dir: str | Path | None = None,
    options: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Table:
    """Measure a model or a `Run` on held-out tasks, in the same way as during training.

        evaluate("smollm2", data=held_out, reward=score)
        evaluate(run, data=other_rows)

    Args:
        model: a `Run`, whose best (else newest) checkpoint is measured with its rewards; or a model as for `train`.
        data: held-out rows, or a dict of sets of them; with a `Run` by default its own.
        reward: as for `train`.
        env: as for `train`.
        method: recipe whose evaluation is used; by default the general one of the model's domain.
        output_dir: folder for samples, answers and a report; by default that of the run, else runs/evaluate.
        options: further options, by dotted names or nested.
        **settings: options by their last name.

    Returns:
        A row for each metric with an interval: split, metric, value, low, high, n.

    Raises:
        UserError: an argument is wrong, or what the evaluation needs is missing.
        RunError: the evaluation failed.
    """
    _show_log()
    if isinstance(model, Run):
        with model.opened() as (entry, settled):
            inputs = _inputs_of(model, entry, settled, data, reward, env, output_dir, options, settings)
            return _measured(inputs, model.folder)
    name = method or default_recipe(domain_of(model, env))
    folder = absolute(output_dir) if output_dir is not None else _numbered("evaluate")
    data = reusable(data)
    # the recipe needs training rows too, which nothing reads
    first = None if data is None else next(iter(splits_of(data, "data").values()))
    with _removed_unless_begun(folder):
        inputs = _inputs(name, folder, False, model, first, data, reward, env, None, options, settings)
        if inputs.models:  # a measurement adds no adapters to the caller's model
            inputs.set("model.lora.enabled", False)
        return _measured(inputs, None)


def _measured(inputs: Inputs, run_dir: Path | None) -> Table:
    from mmrl.training.run import evaluate as evaluate_recipe

    config = _filled(inputs)
    with undisturbed(inputs.lent), given.having(inputs.objects, inputs.models):
        found = evaluate_recipe(inputs.entry, config, run_dir)
    return evaluation_rows([{"split": split, **values} for split, values in _by_split(found).items()])


def _by_split(found: Mapping[str, float]) -> dict[str, dict[str, float]]:
    by_split: dict[str, dict[str, float]] = {}
    for key, value in found.items():
        split, _, name = key.partition("/")
        by_split.setdefault(split, {})[name] = value
    return by_split


def _inputs_of(
    run: Run,
    entry: RecipeEntry,
    config: Any,
    data: Any,
    reward: Any,
    env: Any,
    output_dir: Any,
    options: Mapping[str, Any] | None,
    settings: Mapping[str, Any],
) -> Inputs:
    """The configuration of a run with other held-out rows, rewards or options."""
    from mmrl.config import to_container

    inputs = Inputs(entry, absolute(output_dir) if output_dir is not None else run.folder)
    inputs.values = to_container(config)
    inputs.set("output_dir", str(inputs.folder))
    inputs.objects.update(run.objects)
    if data is not None:
        inputs.values["eval_data"] = {}
        take_rows(inputs, None, data, {**settings, **(options or {})})
    take_rewards(inputs, reward)
    take_env(inputs, env)
    take_settings(inputs, settings)
    for key, value in (options or {}).items():
        inputs.set(key, value)
    return inputs


def _inputs(
    method: str,
    folder: Path,
    resume: bool,
    model: Any,
    data: Any,
    eval_data: Any,
    reward: Any,
    env: Any,
    steps: int | None,
    options: Mapping[str, Any] | None,
    settings: Mapping[str, Any],
) -> Inputs:
    entry, objective = resolve(method, model, env)
    _show_log()
    inputs = Inputs(entry, folder, resume)
    inputs.set("recipe", entry.name)
    inputs.set("output_dir", str(folder))
    if objective:
        inputs.set("objective.preset", objective)
    take_model(inputs, model)
    take_rows(inputs, data, eval_data, {**settings, **(options or {})})
    take_rewards(inputs, reward)
    take_env(inputs, env)
    take_settings(inputs, settings if steps is None else {"steps": steps, **settings})
    for key, value in (options or {}).items():
        inputs.set(key, value)
    return inputs


def _filled(inputs: Inputs) -> Any:
    from mmrl.config import run_from_values

    with given.having(inputs.objects):
        _, config = run_from_values(inputs.values, "train")
    if inputs.models and getattr(config.model, "free_text_encoders", False):
        raise UserError(
            "model.free_text_encoders is true, but the pipeline was passed loaded: your program would keep its text "
            "encoders in memory, and find them removed from the pipeline; pass its folder, or leave the option out"
        )
    # written last: a model of many gigabytes should not reach the disk for a run that is then refused
    for model in inputs.models.values():
        if hasattr(config.model, "check_loaded"):
            config.model.check_loaded(model)
    for save in inputs.saves:
        save()
    return config


def _planned(method: str, *arguments: Any) -> str:
    """The plan of a run, whose rows and model are written into a folder that is removed."""
    import tempfile

    from mmrl.training.run import dry_run

    with tempfile.TemporaryDirectory(prefix="mmrl-plan-") as folder:
        inputs = _inputs(method, Path(folder) / "run", False, *arguments)
        config = _filled(inputs)
        with undisturbed(inputs.lent), given.having(inputs.objects, inputs.models):
            # a folder that is gone would only confuse
            return "\n".join(dry_run(inputs.entry, config)).replace(f"{inputs.folder}/", "")


def _folder(method: str, output_dir: str | Path | None, resume: bool) -> Path:
    """The run folder, checked before anything is written into it."""
    if output_dir is not None:
        folder = absolute(output_dir)
        if has_begun(folder) and not resume:
            raise UserError(
                f"{folder} already contains a run; continue it with resume=True, or choose another output_dir"
            )
        return folder
    if resume or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        why = "resume=True" if resume else "a run in several processes"
        raise UserError(f"{why} needs output_dir, the run folder")
    return _numbered(method.replace(":", "-").replace("/", "-"))


def _numbered(name: str) -> Path:
    """A folder of runs that is not there yet."""
    folder, number = absolute(RUNS / name), 2
    while folder.exists():
        folder, number = absolute(RUNS / f"{name}-{number}"), number + 1
    return folder


def _compare_objects(folder: Path, objects: Mapping[str, Any], resume: bool) -> None:
    """Note the source of the objects; in a resumed run, warn of those that have changed."""
    found = {name: given.about(value) for name, value in objects.items()}
    file = folder / OBJECTS_FILE
    if resume and file.is_file():
        before = json.loads(file.read_text(encoding="utf-8"))
        changed = [name for name, about in found.items() if before.get(name, about)["digest"] != about["digest"]]
        if changed:
            LOGGER.warning("resuming with different code than before: %s", ", ".join(changed))
    if found and os.environ.get("RANK", "0") == "0":
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(found, indent=2) + "\n")


@contextlib.contextmanager
def _removed_unless_begun(folder: Path) -> Iterator[None]:
    """Remove a new folder, with rows and perhaps a copy of a loaded model, if what it is for is refused."""
    new = not folder.exists()
    try:
        yield
    except BaseException:
        begun = any((folder / name).exists() for name in ("config.yaml", "evaluations.jsonl"))
        if new and not begun and os.environ.get("RANK", "0") == "0":
            shutil.rmtree(folder, ignore_errors=True)
        raise


class _Shown(logging.Handler):
    """Print messages of the suite where the program shows none of them by itself."""

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers:  # it has set up the logging since
            return
        stream = sys.stdout if record.levelno < logging.WARNING else sys.stderr
        print(record.getMessage(), file=stream)


@functools.cache
def _show_log() -> None:
    """Show what a run says, unless the program has set up the logging itself."""
    if LOGGER.handlers or logging.getLogger().handlers:
        return
    LOGGER.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING)
    LOGGER.addHandler(_Shown())
