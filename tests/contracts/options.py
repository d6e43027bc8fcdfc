"""Options of a filled configuration: every one with its place, its other values, and whether a run reads it."""

import copy
import dataclasses
import inspect
import shutil
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mmrl.core.blocks import BLOCKS, PREFERENCE_BLOCKS
from mmrl.errors import RunError, UserError
from mmrl.fields import Bounds, bounds_of, check_fields
from mmrl.recipes import RECIPES
from mmrl.runs.tracking import Tracker
from mmrl.training.objectives import ObjectiveConfig, PreferenceConfig, make_objective, make_preference
from mmrl.training.processes import make_accelerator
from mmrl.training.trainer import Trainer
from tests.contracts.domains import domain_of, weights

CHECKS = ("validate", "formula", "describe", "to_container", "options_of", "check_fields", "check_config")
"""Functions that read options without using them: they check, print or save a configuration."""
MOST = 5
"""Other values of an option that are tried until one has an effect."""
VALUES: dict[str, list[Any]] = {
    "FrozenModelConfig.min_pixels": [6272],
    "ConversationConfig.max_result_tokens": [8],
    "SamplerConfig.stop": [["a", "e", "i", "o", "u", "n", "t"], ["s", "r"]],
    "AnswerSampling.stop": [["a", "e", "i", "o", "u", "n", "t"], ["s", "r"]],
    "DataConfig.max_prompt_chars": [3],
    "DataConfig.max_image_pixels": [10],
    "TaskSetConfig.instruction": ["Say something."],
    "LoraSettings.targets": [["q_proj"]],
    "FrozenModelConfig.max_prompt_tokens": [3],
    "PpoClip.dual": [1.0001],
    "AgentRewardConfig.invalid_turn": [-0.1],
    "OverflowConfig.reward": [-0.1],
    "SequenceProductRatio.limit": [1e-4],
    "DropGroups.low": [0.5],
    "ObjectiveConfig.filter": ["drop"],
    "Divergence.aggregation": [{"kind": "sequence_sum"}],
    "PapoSettings.annealing_ratio": [1.0],
    "ImagePairConfig.max_image_pixels": [10],
    "PromptConfig.max_image_pixels": [10],
    "ImageDataConfig.max_image_pixels": [10],
    "BaseTrainerConfig.max_grad_norm": [1e-6],
    "HistoryConfig.min_count": [1, 64],
    "AugmentationSettings.hint_max": [0.01],
    "AugmentationSettings.noise_max": [0.001],
    "AugmentationSettings.window": [3],
    "AugmentationSettings.max_hinted": [1],
}
"""Values of options, as class and name, where those that follow from type and bounds have no effect in tiny runs."""


@dataclasses.dataclass(frozen=True)
class Leaf:
    """An option in a filled configuration."""

    key: str
    path: tuple[str | int, ...]
    """Attributes, keys of dictionaries and places in lists that lead to it."""
    owner: tuple[type[Any], str]
    """The dataclass that defines it, and its name there."""
    value: Any
    hint: Any
    bounds: Bounds | None

    @property
    def name(self) -> str:
        """Class and name, as lists have them."""
        return f"{self.owner[0].__name__}.{self.owner[1]}"


def walk_config(name: str, folder: Path) -> Any:
    """A tiny run of a recipe: two steps, then an evaluation of two tasks and a checkpoint."""
    config = domain_of(name).make_config(name, folder)
    config.trainer.steps = 2
    config.eval_data = {"held": _held_out(name, config)}
    config.evaluation.at_start, config.evaluation.max_tasks = False, 2
    config.evaluation.records = 2
    if hasattr(config, "features"):
        config.features.cache = str(folder / "run" / "features")  # each run counts the videos that it reads
    return config


def _held_out(name: str, config: Any) -> Any:
    kind = typing.get_args(typing.get_type_hints(type(config))["eval_data"])[1]
    data = copy.deepcopy(getattr(config, "data", None))
    if RECIPES[name].target.startswith("diffusion."):
        path = Path(config.output_dir).parent / "held.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("a red circle\na blue square\n", encoding="utf-8")
        data = kind(path=str(path))
    elif name == "robot_clone":
        data = kind(tasks=["right"], layouts=2)
    if hasattr(data, "layouts"):
        data.layouts, data.first = 2, 0
    if hasattr(data, "first_seed"):
        data.seeds, data.first_seed = 2, 1000
    if hasattr(config, "grounding"):
        data.path = str(shutil.copy(data.path, Path(data.path).with_stem("held")))
    assert type(data) is kind
    return data


def leaves(config: Any, key: str = "", path: tuple[str | int, ...] = ()) -> Iterator[Leaf]:
    """Options of a filled configuration; of kinds and blocks, those of the kind that it names."""
    if isinstance(config, (ObjectiveConfig, PreferenceConfig)):
        yield from _leaves_of_blocks(config, key, path)
    hints = typing.get_type_hints(type(config))
    for item in dataclasses.fields(config):
        value, here, way = getattr(config, item.name), f"{key}{item.name}", (*path, item.name)
        kinds = item.metadata.get("kinds")
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{here}.", way)
        elif isinstance(value, list) and value and dataclasses.is_dataclass(value[0]):
            yield from leaves(value[0], f"{here}[].", (*way, 0))
        elif isinstance(value, dict) and value and dataclasses.is_dataclass(next(iter(value.values()))):
            name, part = next(iter(value.items()))
            yield from leaves(part, f"{here}.<name>.", (*way, name))
        elif kinds is None:
            yield Leaf(
                here, way, (defined_in(type(config), item.name), item.name), value, hints[item.name], bounds_of(item)
            )
        elif not kinds.named and getattr(config, "kind", None) in kinds.table():
            schema = kinds.table()[config.kind]
            yield from _leaves_of_dict(schema, value, f"{here}.", way, kinds.without)


def _leaves_of_dict(
    schema: type[Any], given: Any, key: str, path: tuple[str | int, ...], without: Any
) -> Iterator[Leaf]:
    """Options that a dictionary gives to a dataclass; those of nested dataclasses too."""
    hints = typing.get_type_hints(schema)
    for item in dataclasses.fields(schema):
        if item.name in without:
            continue
        default = item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
        value = given.get(item.name, default)
        if dataclasses.is_dataclass(default) and not isinstance(default, type):
            value = value if isinstance(value, dict) else {}
            yield from _leaves_of_dict(type(default), value, f"{key}{item.name}.", (*path, item.name), ())
        else:
            owner = (defined_in(schema, item.name), item.name)
            yield Leaf(f"{key}{item.name}", (*path, item.name), owner, value, hints[item.name], bounds_of(item))


def _leaves_of_blocks(config: Any, key: str, path: tuple[str | int, ...]) -> Iterator[Leaf]:
    pairs = isinstance(config, PreferenceConfig)
    objective: Any = make_preference(config) if pairs else make_objective(config)
    for part, table in (PREFERENCE_BLOCKS if pairs else BLOCKS).items():
        block = getattr(objective, part)
        kinds = Bounds(choices=lambda table=table: table)  # type: ignore[misc]
        value = "none" if block is None else block.kind
        yield Leaf(f"{key}{part}.kind", (*path, part, "kind"), (type(config), part), value, str, kinds)
        if block is None:
            continue
        hints = typing.get_type_hints(type(block))
        for item in dataclasses.fields(block):
            owner = (defined_in(type(block), item.name), item.name)
            found = getattr(block, item.name)
            way = (*path, part, item.name)
            yield Leaf(f"{key}{part}.{item.name}", way, owner, found, hints[item.name], bounds_of(item))


def defined_in(schema: type[Any], name: str) -> type[Any]:
    """The class in which a field of a dataclass first appears."""
    return next(c for c in reversed(schema.__mro__) if name in getattr(c, "__dataclass_fields__", ()))


def other_values(leaf: Leaf) -> list[Any]:
    """Other values of an option, the nearest first; a text that names nothing for names, paths and templates."""
    if leaf.name in VALUES:
        return VALUES[leaf.name]
    value, bounds = leaf.value, leaf.bounds
    options = typing.get_args(leaf.hint) or (leaf.hint,)
    if bounds is not None and bounds.choices is not None:
        choices = [choice for choice in bounds.allowed if choice != value]
        return [[choice] for choice in choices] if "list" in str(leaf.hint) else choices
    if isinstance(value, bool) or (value is None and bool in options):
        return [not value]
    if isinstance(value, (int, float)) or (value is None and {int, float} & set(options)):
        whole = isinstance(value, int) or (value is None and int in options)
        tried = _whole(value or 0) if whole else _real(value or 0.0)
        tried += [3136] if value is None else []
        fits = [one for one in tried if bounds is None or bounds.problem(leaf.key, one) is None]
        return [one for one in dict.fromkeys(fits) if one != value]
    if isinstance(value, (list, tuple)) and value and all(isinstance(one, (int, float)) for one in value):
        return [[one * 0.9 if isinstance(one, float) else one + 1 for one in value]]
    if isinstance(value, dict):
        return [{"nowhere": 1}]
    parts = [option for option in options if dataclasses.is_dataclass(option)]
    if value is None and parts:
        return [parts[0]()]
    if isinstance(value, (list, tuple)) and int in options:
        return [[8]]
    if isinstance(value, list) and parts:
        return [[parts[0](name="nowhere")]]
    texts = isinstance(value, (list, tuple)) or (value is None and str not in options)
    return [["nowhere"]] if texts else ["nowhere"]


def _whole(start: int) -> list[int]:
    return [start + 1, start * 2, start // 2, start - 1, start + 2, start + 4]


def _real(start: float) -> list[float]:
    return [start * 1.5, start / 2, 0.5, start + 1.0, 0.25, 3.0]


def changed(config: Any, path: tuple[str | int, ...], value: Any) -> Any:
    """A copy of a configuration with another value at a place."""
    copied = copy.deepcopy(config)
    holder = copied
    for step in path[:-1]:
        if isinstance(holder, dict):
            holder = holder.setdefault(step, {})
        else:
            holder = holder[step] if isinstance(step, int) else getattr(holder, step)
    if isinstance(holder, dict):
        holder[path[-1]] = value
    else:
        getattr(holder, str(path[-1]))  # raises where there is no such option
        object.__setattr__(holder, path[-1], value)  # some parts are frozen
    return copied


def with_changes(config: Any, changes: dict[str, Any]) -> Any:
    """A copy with further values by dotted key."""
    for key, value in changes.items():
        path = tuple(int(step) if step.isdigit() else step for step in key.split("."))
        config = changed(config, path, value)
    return config


def outcome(config: Any, folder: Path) -> Any:
    """All that a run measures: metrics, evaluations, samples, checkpoints and weights; or why there is no run.

    The text begins with "refused" where the configuration is not valid, with "stopped" where data, model or run say so.
    """
    shutil.rmtree(folder, ignore_errors=True)
    config = copy.deepcopy(config)
    config.output_dir = str(folder)
    try:
        check_fields(config)
        config.validate()
    except (UserError, ValueError) as error:
        return f"refused: {error}"
    try:
        recipe = RECIPES[config.recipe].load_recipe_class()(config)
        try:
            return _measure(recipe, config, folder)
        finally:
            recipe.close()
    except (UserError, RunError, ValueError) as error:
        return f"stopped: {error}"


def effect(config: Any, expected: Any, leaf: Leaf, folder: Path) -> str:
    """Effect of an option on a run: "changed", "stopped", "refused" (all values) or "unchanged"."""
    found = set()
    for value in other_values(leaf)[:MOST]:
        result = outcome(changed(config, leaf.path, value), folder)
        found.add(result.partition(":")[0] if isinstance(result, str) else "unchanged")
        if not isinstance(result, str) and result != expected:
            return "changed"
    return next((kind for kind in ("stopped", "unchanged", "refused") if kind in found), "unchanged")


def _measure(recipe: Any, config: Any, folder: Path) -> Any:
    trainer = Trainer(recipe, config, folder, make_accelerator(), Tracker(folder))
    found: list[Any] = []
    log = trainer.log
    step, evaluation, samples = log.step, log.evaluation, log.samples

    def steps(number: int, metrics: Any, tokens: float) -> None:
        kept = {name: repr(value) for name, value in metrics.items() if not name.startswith(("time/", "memory"))}
        found.append(("step", number, sorted(kept.items()), tokens))
        step(number, metrics, tokens)

    def evaluations(number: int, tag: str, split: str, metrics: Any) -> None:
        kept = {name: repr(value) for name, value in metrics.items() if "time" not in name and "_s" not in name[-2:]}
        found.append(("evaluation", number, tag, split, sorted(kept.items())))
        evaluation(number, tag, split, metrics)

    def records(number: int, split: str, given: Any) -> None:
        found.append(("samples", number, split, [(one.prompt, one.response, one.reward) for one in given]))
        samples(number, split, given)

    log.step, log.evaluation, log.samples = steps, evaluations, records  # type: ignore[method-assign,assignment]
    trainer.run()
    kept = sorted(path.name for path in (folder / "checkpoints").glob("*"))
    return found, kept, weights(trainer).tolist()


def is_refused(config: Any, leaf: Leaf) -> bool:
    """Whether a configuration refuses every other value of an option."""
    for value in other_values(leaf):
        copied = changed(config, leaf.path, value)
        try:
            check_fields(copied)
            copied.validate()
        except (UserError, ValueError):
            continue
        return False
    return True


class Reads:
    """Notes which options are read while it is patched into their dataclasses, except to check or save them."""

    def __init__(self) -> None:
        self.found: set[tuple[type[Any], str]] = set()

    def patch(self, schema: type[Any], monkeypatch: Any) -> None:
        """Watch a dataclass."""
        reads = self

        def watched(self: Any, name: str) -> Any:
            reads.note(type(self), name)
            return object.__getattribute__(self, name)

        monkeypatch.setattr(schema, "__getattribute__", watched, raising=False)

    def note(self, schema: type[Any], name: str) -> None:
        """Record a read, unless it only checks or copies."""
        fields = schema.__dataclass_fields__ if name == "__dict__" else (name,)
        new = {(defined_in(schema, one), one) for one in fields if one in schema.__dataclass_fields__} - self.found
        if new and used(sys._getframe(2)):
            self.found |= new


def used(frame: Any) -> bool:
    """Whether a read is more than a check or a copy, by the functions that lead to it."""
    code = frame.f_code
    if code.co_filename.endswith(("/copy.py", "/copyreg.py", "/mmrl/fields.py", "/contracts/options.py")):
        return False
    if code.co_filename.endswith("/dataclasses.py") and code.co_name not in ("asdict", "_asdict_inner"):
        return False
    while frame is not None:
        if frame.f_code.co_name in CHECKS:
            return False
        frame = frame.f_back
    return True


def schemas(config: Any) -> set[type[Any]]:
    """Dataclasses of a configuration, of its kinds and of its blocks."""
    found = {leaf.owner[0] for leaf in leaves(config)}
    todo = [type(config)]
    while todo:
        schema = todo.pop()
        found.add(schema)
        for hint in typing.get_type_hints(schema).values():
            parts = [part for part in (hint, *typing.get_args(hint)) if inspect.isclass(part)]
            todo += [part for part in parts if dataclasses.is_dataclass(part) and part not in found]
    return found


def reads_of(config: Any, folder: Path, monkeypatch: Any) -> set[tuple[type[Any], str]]:
    """Options that a tiny run reads, as the class that defines one and its name there."""
    reads = Reads()
    with monkeypatch.context() as patched:
        for schema in schemas(config):
            reads.patch(schema, patched)
        found = outcome(config, folder / "run")
    assert not isinstance(found, str), found
    return reads.found
