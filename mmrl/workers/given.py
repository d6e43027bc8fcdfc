"""Objects of the user's program, written as `given:NAME` in the configuration of a run of that program.

They are looked up in this process. A worker process gets those that cloudpickle can write, through its pipe and never
through a file: what a run writes only names them, with their source text and its digest.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from mmrl.workers.loading import GIVEN, GIVEN_ELSEWHERE, LoadError

_OBJECTS: dict[str, Any] = {}
_PICKLED: dict[str, bytes] = {}
MODEL = "model"
"""Name of an object that contains a model; workers of rewards and environments do not get it."""
_MODELS: dict[str, Any] = {}
"""Loaded models by the folder with their weights at the start of the run."""
_TRAINED: dict[int, Any] = {}
"""Loaded models that are trained, or the peft models around them, by the identity of the loaded ones."""
_ALL: tuple[dict[Any, Any], ...] = (_OBJECTS, _PICKLED, _MODELS, _TRAINED)


@contextlib.contextmanager
def having(objects: Mapping[str, Any], models: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Register these objects by name, in this process and in worker processes started meanwhile.

    `models` are loaded models by the folder that they are saved in, each used once instead of reading the folder.
    """
    before = [dict(known) for known in _ALL]
    _OBJECTS.update(objects)
    _MODELS.update(models or {})
    for name in objects:
        _PICKLED.pop(name, None)
    try:
        yield
    finally:
        for known, saved in zip(_ALL, before, strict=True):
            known.clear()
            known.update(saved)


def frozen_weights(folder: str) -> list[Any]:
    """Weights that the program has frozen in the loaded pipeline of a folder; empty without one."""
    parts = getattr(_MODELS.get(folder), "components", {}).values()
    weights = [weight for part in parts if hasattr(part, "parameters") for weight in part.parameters()]
    return [weight for weight in weights if not weight.requires_grad]


def take_model(folder: str) -> Any:
    """The loaded model of a folder on the first request; None otherwise."""
    if (model := _MODELS.pop(folder, None)) is not None:
        _TRAINED[id(model)] = model
    return model


def wrap(model: Any, adapted: Any) -> None:
    """Note the peft model around a model, if the user's program has loaded that."""
    if id(model) in _TRAINED:
        _TRAINED[id(model)] = adapted


def trained(model: Any) -> Any:
    """The peft model around a loaded model, in which alone its adapters can be saved, or else the model itself."""
    return _TRAINED.get(id(model), model)


def find(name: str, what: str) -> Any:
    """The object with a name; raises LoadError if this program has none."""
    if name not in _OBJECTS and name in _PICKLED:
        _OBJECTS[name] = _unpickled(name, what)
    if name not in _OBJECTS:
        raise LoadError(f"{what} is {GIVEN}:{name}, {GIVEN_ELSEWHERE}")
    return _OBJECTS[name]


def _unpickled(name: str, what: str) -> Any:
    import cloudpickle

    try:
        return cloudpickle.loads(_PICKLED[name])
    except BaseException as error:
        raise LoadError(
            f"{what}: {name} cannot be rebuilt in a worker process ({type(error).__name__}: {error}); import what "
            "it needs inside the function, or run it in the training process (isolate: false)"
        ) from error


def portable(*, weights: bool = False) -> dict[str, bytes]:
    """The objects that can be sent to a worker process, pickled; objects with a model only if `weights` is set."""
    found = [name for name in _OBJECTS if weights or name != MODEL]
    return {name: _PICKLED[name] for name in found if unportable(name) is None}


def unportable(name: str) -> str | None:
    """Reason why an object cannot be sent to a worker process; None if it can."""
    if name in _PICKLED:
        return None
    try:
        _PICKLED[name] = _pickle(_OBJECTS[name])
    except Exception as error:  # locks, open files, GPUs: each raises its own kind
        return f"{type(error).__name__}: {error}"
    return None


def _pickle(value: Any) -> bytes:
    import cloudpickle

    return cloudpickle.dumps(value)


def receive(pickled: Mapping[str, Any]) -> None:
    """Load what `portable` returned in the process that started this one."""
    _PICKLED.update({name: bytes(content) for name, content in pickled.items()})


def about(value: Any) -> dict[str, Any]:
    """Source text of an object, its location, and a digest of the text, used to detect changes."""
    plain = inspect.unwrap(value.func if isinstance(value, functools.partial) else value)
    plain = getattr(plain, "__func__", plain)
    if not (inspect.isclass(plain) or inspect.isroutine(plain)):
        plain = type(plain)
    try:
        source, file = inspect.getsource(plain), inspect.getsourcefile(plain)
        line = inspect.getsourcelines(plain)[1]
    except (OSError, TypeError):  # typed into an interpreter, or written in C
        code = getattr(plain, "__code__", None)
        content = repr((code.co_code, code.co_names, code.co_consts)) if code else getattr(plain, "__qualname__", "")
        return {"source": "", "digest": _digest(content)}
    return {"source": source, "file": str(file), "line": line, "digest": _digest(source)}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def about_name(name: str) -> dict[str, Any]:
    """`about` for an object given by name; empty if this program has none."""
    return about(_OBJECTS[name]) if name in _OBJECTS else {}
