"""Convert the arguments of `mmrl.train` to the values of a configuration and the objects it refers to."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import shutil
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from mmrl.api.methods import is_module, is_network, is_pipeline
from mmrl.api.rows import HELD_OUT, MEDIA, place, splits_of
from mmrl.config import escaped
from mmrl.entries import RecipeEntry
from mmrl.errors import UserError, did_you_mean
from mmrl.fields import hints_of
from mmrl.files import expanded
from mmrl.workers import given
from mmrl.workers.loading import GIVEN, names_function

LOGGER = logging.getLogger("mmrl")
START = "start"
"""Folder in a run with the initial weights of a model that was passed as an object."""
OTHER_NAMES = {
    "num_generations": "samples_per_task",
    "max_completion_length": "max_new_tokens",
    "max_steps": "steps",
    "beta": "objective.kl.coef",
}
"""Option names of TRL's GRPOConfig, and the names of the same options here."""
ROWS = ("data", "demonstrations", "images", "pairs")
"""Sections with training rows, of which a recipe has one."""
SECTIONS = ("trainer", "sampler")
"""Sections whose options need no section, even if another section has an option of the same name."""


@dataclass
class Inputs:
    """A configuration being built, the objects it refers to, and what else a run needs to know about them."""

    entry: RecipeEntry
    folder: Path
    """Run folder."""
    resumes: bool = False
    """Whether to continue the run in that folder."""
    values: dict[str, Any] = field(default_factory=dict)
    """Nested values as in a configuration file."""
    objects: dict[str, Any] = field(default_factory=dict)
    """Objects by their names in the configuration."""
    models: dict[str, Any] = field(default_factory=dict)
    """Loaded models by the folder of their weights."""
    owned: Any = None
    """The loaded model that is trained."""
    lent: list[Any] = field(default_factory=list)
    """Loaded modules, of a pipeline its parts."""
    saves: list[Callable[[], None]] = field(default_factory=list)
    """Writes the loaded model as the start of the run; called once the configuration is known to be valid."""

    def set(self, key: str, value: Any) -> None:
        """Set an option by its dotted name; a mapping sets each of its entries."""
        if isinstance(value, Mapping) and value:
            for name, each in value.items():
                self.set(f"{key}.{name}", each)
            return
        *parents, last = key.split(".")
        section = self.values
        for parent in parents:
            section = section.setdefault(parent, {})
            if not isinstance(section, dict):
                raise UserError(f"option {key} is inside '{parent}', which has a value itself")
        section[last] = escaped(self._named(value, last))

    def _named(self, value: Any, kind: str) -> Any:
        """A value in which functions and classes, which options name, are named."""
        if inspect.isroutine(value) or inspect.isclass(value) or isinstance(value, functools.partial):
            return self.name_of(value, kind)
        if isinstance(value, Mapping):
            return {key: self._named(each, str(key)) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self._named(each, kind) for each in value]
        return str(value) if isinstance(value, Path) else value

    def name_of(self, value: Any, kind: str) -> str:
        """Name of a callable in a configuration: by its module, or as an object of this program."""
        if spec := _importable(value):
            return spec
        name = str(getattr(value, "__name__", "") or type(value).__name__)
        name = name if name.isidentifier() else kind  # <lambda>
        taken = [given.MODEL, *(other for other, known in self.objects.items() if known is not value)]
        unique, number = name, 2
        while unique in taken:
            unique, number = f"{name}_{number}", number + 1
        self.objects[unique] = value
        return f"{GIVEN}:{unique}"


def _importable(value: Any) -> str | None:
    """`module:name` of a function or class that every process can import; None for others."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if not module or module == "__main__" or not (inspect.isfunction(value) or inspect.isclass(value)):
        return None
    home: Any = sys.modules.get(module)
    if home is None or not getattr(home, "__file__", None):  # such as a module typed into an interpreter
        return None
    for part in name.split("."):
        home = getattr(home, part, None)
    return f"{module}:{name}" if home is value else None


def _config_class(entry: RecipeEntry) -> Any:
    return entry.load_config_class()


def _section(entry: RecipeEntry, name: str) -> Any:
    """Class of a section of a recipe's configuration; None if it has none."""
    return hints_of(_config_class(entry)).get(name)


def take_model(inputs: Inputs, model: Any) -> None:
    """Set the model; a model that is already loaded is saved once and used as it is."""
    if model is None:
        return
    if isinstance(model, str | Path):
        inputs.set("model.path", str(model))
    elif isinstance(model, Mapping):
        inputs.set("model", model)
    elif is_pipeline(model):
        _take_pipeline(inputs, model)
    elif is_network(model) or (isinstance(model, tuple) and model and is_network(model[0])):
        _take_network(inputs, *(model if isinstance(model, tuple) else (model,)))
    elif is_module(model):
        section = _section(inputs.entry, "model")
        if "kind" not in {item.name for item in fields(section)}:
            raise UserError(
                f"model is a {type(model).__name__}, which '{inputs.entry.name}' cannot train; pass a folder, a "
                "hub id, or a loaded transformers or diffusers model"
            )
        name = given.MODEL
        inputs.objects[name] = lambda: model
        inputs.owned = model
        inputs.set("model.kind", f"{GIVEN}:{name}")
        inputs.lent.append(model)
        # a plain module chooses one action at a time and only samples, unless it says otherwise
        inputs.set("model.chunk", int(getattr(model, "chunk", 1)))
        act = getattr(getattr(model, "module", model), "act", None)  # of what a ModuleAdapter wraps
        if callable(act) and not {"greedy", "kwargs"} & set(inspect.signature(act).parameters):
            inputs.set("evaluation", {"greedy": False, "samples": 1})
    else:
        raise UserError(
            f"model is a {type(model).__name__}; pass a folder, a hub id, the name of a packaged model, a "
            "transformers (model, processor) pair, a diffusers pipeline, or a robot policy that is a "
            "torch.nn.Module"
        )


def _take_network(inputs: Inputs, network: Any, processor: Any = None) -> None:
    """Take a model of transformers; its processor is read from where the model came from, unless it is given."""
    _refuse_adapters(network)
    if processor is None:
        processor = _processor_of(network)

    def save(folder: Path) -> None:
        network.save_pretrained(str(folder))
        processor.save_pretrained(str(folder))

    def restore(folder: Path) -> None:
        network.load_state_dict(type(network).from_pretrained(str(folder), dtype=network.dtype).state_dict())

    _take_saved(inputs, network, save, restore, [network])
    inputs.owned = network
    dtype = str(network.dtype).removeprefix("torch.")
    inputs.set("model.dtype", dtype)


def _refuse_adapters(network: Any) -> None:
    if getattr(network, "peft_config", None):
        raise UserError(
            "model already has adapters; if a run has added them, pass that run's folder, which trains them further, "
            "or what its export writes; otherwise load it again, without adapters"
        )


def _take_pipeline(inputs: Inputs, pipeline: Any) -> None:
    parts = {name: part for name, part in pipeline.components.items() if is_module(part)}
    for part in parts.values():
        _refuse_adapters(part)

    def restore(folder: Path) -> None:
        for name, part in parts.items():
            saved = type(part).from_pretrained(str(folder), subfolder=name, torch_dtype=part.dtype)
            part.load_state_dict(saved.state_dict())

    _take_saved(inputs, pipeline, lambda folder: pipeline.save_pretrained(str(folder)), restore, parts.values())
    inputs.owned = pipeline
    # of what is trained: others keep their decoder in float32
    network = next((parts[name] for name in ("transformer", "unet") if name in parts), pipeline)
    inputs.set("model.dtype", str(network.dtype).removeprefix("torch."))


def _processor_of(network: Any) -> Any:
    from mmrl.hub.compat import quiet_transformers
    from mmrl.vlm.model.processor import load_processor

    origin = getattr(network.config, "_name_or_path", "") or getattr(network, "name_or_path", "")
    if not origin:
        raise UserError(
            "model was passed without its processor and does not record where it was loaded from; pass (model, "
            "processor)"
        )
    with quiet_transformers():
        return load_processor(origin)


def _take_saved(
    inputs: Inputs, model: Any, save: Callable[[Path], None], restore: Callable[[Path], None], parts: Any
) -> None:
    """Lend a loaded model to the run, which will save it as its start.

    In a run that is resumed it becomes that start again, from which the run takes its reference.
    """
    folder = inputs.folder / START

    def write() -> None:
        if inputs.resumes and folder.is_dir():
            restore(folder)
        elif os.environ.get("RANK", "0") == "0":
            shutil.rmtree(folder, ignore_errors=True)
            partial = folder.with_name(f".partial-{START}")
            shutil.rmtree(partial, ignore_errors=True)
            save(partial)
            partial.rename(folder)

    inputs.saves.append(write)
    # the other processes train the model that was passed, and read the folder only after all have joined
    inputs.models[str(folder)] = model
    inputs.set("model.path", str(folder))
    inputs.lent += parts


def take_rows(inputs: Inputs, data: Any, eval_data: Any, settings: Mapping[str, Any]) -> None:
    """Set the training rows and the held-out rows; the settings may name columns with images and videos."""
    media = {*MEDIA, *_media_columns(inputs.values), *_media_columns(settings)}
    sets = splits_of(data, "data") if data is not None else {}
    if "" not in sets and sets:  # such as a DatasetDict
        if "train" not in sets:
            raise UserError(f"data has the splits {', '.join(sets)}; none of them is called train")
        held_out = {name: rows for name, rows in sets.items() if name != "train"}
        sets = {"": sets["train"]}
        eval_data = held_out if eval_data is None and held_out else eval_data
    if sets:
        key = next((name for name in ROWS if is_dataclass(_section(inputs.entry, name))), "")
        if not key:
            raise UserError(f"'{inputs.entry.name}' has no data; leave data out")
        inputs.values[key] = _set_of(inputs, sets[""], _section(inputs.entry, key), key, "train", media)
    if eval_data is not None:
        kinds = typing.get_args(_section(inputs.entry, "eval_data"))
        if len(kinds) != 2:
            raise UserError(f"'{inputs.entry.name}' has no held-out data; leave eval_data out")
        for name, rows in splits_of(eval_data, "eval_data").items():
            name = name or HELD_OUT
            values = _set_of(inputs, rows, kinds[1], f"eval_data.{name}", name, media)
            inputs.values.setdefault("eval_data", {})[name] = values  # a name may contain dots
    _keep_apart(inputs)


def _media_columns(values: Mapping[str, Any]) -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _media_columns(value)
        elif isinstance(value, str) and key.rpartition(".")[2] in ("image_key", "video_key"):
            yield value


def _set_of(inputs: Inputs, rows: Any, section: Any, key: str, name: str, media: set[str]) -> dict[str, Any]:
    """Values of a section of rows, which messages call by its key."""
    found = Inputs(inputs.entry, inputs.folder, objects=inputs.objects)
    known = {item.name for item in fields(section)}
    count = next((option for option in ("layouts", "seeds") if option in known), None)
    if isinstance(rows, Mapping):
        for option, value in rows.items():
            found.set(option, value)
    elif isinstance(rows, int) and not isinstance(rows, bool):
        if count is None:
            raise UserError(f"{key} is {rows}; '{inputs.entry.name}' takes rows: a list of dicts, a Dataset or a path")
        found.set(count, rows)
    else:
        option = next((option for option in ("path", "file") if option in known), None)
        if option is None:
            raise UserError(f"{key}: '{inputs.entry.name}' takes no rows; pass the number of {count or 'tasks'}")
        # of pairs of images; those of texts are in the section data
        media = media | {"chosen", "rejected"} if key == "pairs" else media
        found.set(option, place(rows, inputs.folder / "data", name, media))
    return found.values


def _keep_apart(inputs: Inputs) -> None:
    """Give held-out seeds and layouts that were given as numbers other values than those of training."""
    trained = inputs.values.get("data", {})
    for chosen in inputs.values.get("eval_data", {}).values():
        if "layouts" in chosen:
            chosen.setdefault("split", "held_out")
        if "seeds" in chosen and "seeds" in trained:
            chosen.setdefault("first_seed", trained.get("first_seed", 0) + trained["seeds"])


def take_rewards(inputs: Inputs, reward: Any) -> None:
    """Set the reward terms: functions with TRL's signature, names, and either with a weight."""
    if reward is None:
        return
    if _section(inputs.entry, "rewards") is None:
        if isinstance(reward, str | Mapping) and _section(inputs.entry, "reward") is not None:
            inputs.set("reward", reward)  # the environment's, such as return or sparse, or weights of its parts
            return
        raise UserError(
            f"'{inputs.entry.name}' takes its reward from elsewhere (`mmrl options {inputs.entry.name} reward`); leave "
            "reward out"
        )
    given_terms = list(_terms(reward))
    terms: list[dict[str, Any]] = []
    for label, function, weight in given_terms:
        term: dict[str, Any]
        if isinstance(function, Mapping):
            term = dict(function)
            name = str(label or term.get("name", "reward"))
            if callable(own := term.get("function")):
                term["function"] = spec = inputs.name_of(own, "reward")
                term |= _isolation(inputs, spec, name)
        elif isinstance(function, str):
            name, term = label or function, {"function": function if label and names_function(function) else None}
        elif callable(function):
            spec = inputs.name_of(function, "reward")
            name = label or spec.rpartition(":")[2].rpartition(".")[2]
            term = {"function": spec} | _isolation(inputs, spec, name)
        else:
            raise UserError(
                f"reward contains a {type(function).__name__}; pass functions or names, or (function or name, "
                "weight) pairs"
            )
        taken = [other["name"] for other in terms]
        unique, number = name, 2
        while unique in taken:
            unique, number = f"{name}_{number}", number + 1
        terms.append({**{key: value for key, value in term.items() if value is not None}, "name": unique})
        if weight is not None:
            terms[-1]["weight"] = float(weight)
    inputs.values["rewards"] = escaped(terms)


def _terms(reward: Any) -> Iterator[tuple[str, Any, float | None]]:
    """Label, function or name, and weight of each term."""
    if isinstance(reward, Mapping):
        named: Sequence[tuple[str, Any]] = list(reward.items())
    elif isinstance(reward, list) or (isinstance(reward, tuple) and not _is_weighted(reward)):
        named = [("", each) for each in reward]
    else:
        named = [("", reward)]
    for label, each in named:
        yield (label, *each) if _is_weighted(each) else (label, each, None)


def _is_weighted(value: Any) -> bool:
    return (
        isinstance(value, tuple)
        and len(value) == 2
        and isinstance(value[1], int | float)
        and not isinstance(value[1], bool)
    )


def _isolation(inputs: Inputs, spec: str, name: str) -> dict[str, Any]:
    """Run a function in this process if it cannot be sent to another one."""
    if not spec.startswith(f"{GIVEN}:"):
        return {}
    with given.having(inputs.objects):
        reason = given.unportable(spec.partition(":")[2])
    if reason is None:
        return {}
    LOGGER.info("reward %s runs in the training process because it cannot be sent to another: %s", name, reason)
    return {"isolate": False}


def take_env(inputs: Inputs, env: Any) -> None:
    """Set the environment: a class or a function that makes it, an id of Gymnasium, or `module:name`."""
    if env is None:
        return
    if hasattr(env, "step") and not isinstance(env, type | str):
        raise UserError(
            f"env is a single environment, a {type(env).__name__}, but each worker needs its own; pass its class, "
            "or a function that creates it"
        )
    if not isinstance(env, str) and not callable(env):
        raise UserError(f"env is a {type(env).__name__}; pass a class, a function, a Gymnasium id or module:name")
    spec = env if isinstance(env, str) else inputs.name_of(env, "env")
    if spec.startswith(f"{GIVEN}:"):
        with given.having(inputs.objects):
            if reason := given.unportable(spec.partition(":")[2]):
                raise UserError(f"env cannot be sent to the worker processes: {reason}")
    if _section(inputs.entry, "environment") is not None:
        if names_function(spec):
            inputs.set("environment.factory", spec)
        else:
            inputs.set("environment", {"factory": "gymnasium:make", "kwargs": {"id": spec}})
    elif _section(inputs.entry, "sim") is not None:
        from robotics.scenes import MjcfTask
        from robotics.sim.opening import SIMULATORS

        if spec in SIMULATORS:
            inputs.set("sim.kind", spec)
        elif isinstance(env, type) and issubclass(env, MjcfTask):
            inputs.set("sim", {"kind": "tabletop", "tasks": [spec]})
        else:
            inputs.set("sim", {"kind": "gymnasium", "env": spec})
    else:
        raise UserError(f"'{inputs.entry.name}' has no environment; leave env out")


def take_settings(inputs: Inputs, settings: Mapping[str, Any]) -> None:
    """Set options by their dotted names, or by their last part if that is unambiguous."""
    if not settings:
        return
    from mmrl.cli.options import options_of

    known = {option.key for option in options_of(inputs.entry.load_defaults())}
    for name, value in settings.items():
        if name == "lora":
            _take_lora(inputs, value)
            continue
        key = OTHER_NAMES.get(name, name)
        inputs.set(key if "." in key else _found(key, known, inputs.entry.name), value)


def _found(name: str, known: set[str], recipe: str) -> str:
    for key in (name, *(f"{section}.{name}" for section in SECTIONS)):
        if key in known:
            return key
    deep = sorted(key for key in known if key.endswith(f".{name}"))
    others = [key for key in deep if key.count(".") == 1] or deep
    if len(others) == 1:
        return others[0]
    if others:
        raise UserError(f"{name} is ambiguous: {', '.join(others)}; pass one of them in options={{...}}")
    leaves = {key.rpartition(".")[2] for key in known} | OTHER_NAMES.keys()
    raise UserError(
        f"'{recipe}' has no option {name}; {did_you_mean(name, leaves)}`mmrl options {recipe}` lists all options"
    )


def _take_lora(inputs: Inputs, value: Any) -> None:
    if isinstance(value, bool):
        inputs.set("model.lora.enabled", value)
    elif isinstance(value, int):
        inputs.set("model.lora", {"enabled": True, "rank": value})
    elif isinstance(value, Mapping):
        inputs.set("model.lora", {"enabled": True, **value})
    else:
        raise UserError(f"lora is {value!r}; pass true, a rank, or a dict of the options of model.lora")


def absolute(path: str | Path) -> Path:
    """Absolute path of a folder."""
    return expanded(str(path)).absolute()
