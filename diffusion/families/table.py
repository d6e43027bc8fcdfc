"""Finds the family of a pipeline: a file of this folder, or a user-defined class."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import diffusion.families
from diffusion.families.base import Family
from mmrl.errors import UserError
from mmrl.rewards.reward_loading import load_function

ADDING = "to add a family, write one class (docs/adding.md) and set model.family=module:Class"


def _found() -> dict[str, type[Family]]:
    """The families of this folder's files, in the order of their names."""
    found: dict[str, type[Family]] = {}
    for file in sorted(entry.name for entry in pkgutil.iter_modules(diffusion.families.__path__)):
        if f"{diffusion.families.__name__}.{file}" == __name__:
            continue
        module = importlib.import_module(f"{diffusion.families.__name__}.{file}")
        for kind in vars(module).values():
            own = isinstance(kind, type) and kind.__module__ == module.__name__
            if own and issubclass(kind, Family) and "pipeline_class" in vars(kind):
                found[kind.pipeline_class] = kind
    return found


FAMILIES = _found()
"""Families of the suite by the class name of their pipeline."""


def find_family(pipeline_class: str, spec: str | None = None, where: str = "the pipeline") -> type[Family]:
    """The family of a pipeline class, or the class given by `spec`; raises UserError for others."""
    if spec is not None:
        kind: Any = load_function(spec, what="model.family")
        if not (isinstance(kind, type) and issubclass(kind, Family)):
            raise UserError(f"model.family {spec!r} is not a subclass of diffusion.families.base.Family")
        if kind.pipeline_class != pipeline_class:
            raise UserError(f"model.family {spec!r} is for {kind.pipeline_class}, but {where} is a {pipeline_class}")
        return kind
    if pipeline_class not in FAMILIES:
        raise UserError(
            f"{where} is a {pipeline_class}, which is not supported; supported classes: {', '.join(FAMILIES)}; {ADDING}"
        )
    return FAMILIES[pipeline_class]


def family_of(pipeline: Any, **options: Any) -> Family:
    """The family of a pipeline, with options of its `options_class`; raises UserError for others."""
    known = [base.__name__ for base in type(pipeline).__mro__ if base.__name__ in FAMILIES]
    name = known[0] if known else type(pipeline).__name__
    kind = find_family(name)
    return kind(pipeline, kind.options_class(**options))
