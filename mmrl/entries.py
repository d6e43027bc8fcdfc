"""Rows of a package's table of recipes as strings, and names that are loaded when they are asked for."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

MOVED = Path(__file__).resolve().with_name("workers") / "moved.json"
"""Old names of modules and classes, and the new ones."""


def lazy_names(
    package: str, homes: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Build `__getattr__`, `__dir__` and `__all__` of a package that exports names without importing their modules.

    __getattr__, __dir__, __all__ = lazy_names(__name__, {"package.module": ("Name", "function")})
    """
    home = {name: module for module, names in homes.items() for name in names}
    public = sorted(home)

    def get(name: str) -> Any:
        if name not in home:
            # ImportError, since `from package import name` would drop the message of an AttributeError
            if new := json.loads(MOVED.read_text(encoding="utf-8")).get(f"{package}.{name}"):
                raise ImportError(f"{package}.{name} is {new} now")
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(home[name]), name)

    return get, lambda: public, public


class _Later(ModuleType):
    """A module that is imported when it is first asked for something."""

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        # the attributes as well, so that this is called once
        vars(self).update(vars(importlib.import_module(self.__name__)))
        return vars(self)[name]


def import_later(name: str) -> None:
    """Make `import name` lazy: the module is imported on first attribute access."""
    if name not in sys.modules:
        sys.modules[name] = later = _Later(name)
        later.__spec__ = PathFinder.find_spec(name)


def renamed(stored: str) -> str:
    """A stored configuration in which `module:function` uses the module's current name."""
    for old, new in json.loads(MOVED.read_text(encoding="utf-8")).items():
        if old in stored:
            stored = re.sub(rf"(?<![\w./]){re.escape(old)}(?=:[A-Za-z_])", new, stored)
    return stored


class Paper(NamedTuple):
    """A paper that the suite implements at least in part."""

    name: str
    """Its usual name."""
    found: tuple[str, ...] = ()
    """Rows and recipes, the one that `mmrl explain` shows first."""
    names: tuple[str, ...] = ()
    """Other names."""
    code: str = ""
    """`module:name` of a paper without its own row or recipe."""
    source: str = ""
    """Citation of a paper given by `code`; other papers use the citation of their row or recipe."""
    page: str = ""
    """Page in docs/ that describes the paper, if `found` does not determine it."""
    lacking: str = ""
    """Parts of the paper that the suite lacks; empty if it is complete."""


class Omitted(NamedTuple):
    """A paper that the suite does not implement."""

    name: str
    about: str
    """Topic."""
    reason: str
    """Why it is left out."""
    names: tuple[str, ...] = ()
    """Other names."""


@dataclass(frozen=True)
class RecipeEntry:
    """Name, description and location of a recipe."""

    name: str
    """Name used in `recipe:`."""
    target: str
    """`module:Recipe:Config`."""
    summary: str
    """One line for `mmrl list`."""
    citation: str
    """Paper or source."""
    supervised: bool = False
    """Whether it learns from reference answers (`mmrl sft`) instead of rewards."""
    trains: bool = True
    """False for a row of EVALUATIONS, which only `mmrl evaluate` takes."""
    preset: str = ""
    """`module:function` that returns a configuration whose defaults differ from the dataclass's."""

    def load_recipe_class(self) -> type[Any]:
        """Import the module and return the recipe class."""
        module, recipe, _ = self.target.split(":")
        return load_target(f"{module}:{recipe}")

    def load_config_class(self) -> type[Any]:
        """Import the module and return the configuration dataclass."""
        module, _, config = self.target.split(":")
        return load_target(f"{module}:{config}")

    def load_defaults(self) -> Any:
        """Return the configuration dataclass, or for a preset the instance with its values."""
        return load_target(self.preset)() if self.preset else self.load_config_class()

    def default_config(self) -> Any:
        """Return a configuration in which every value is the default."""
        defaults = self.load_defaults()
        return defaults() if isinstance(defaults, type) else defaults


def load_target(target: str) -> Any:
    """Import `module:name`."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)
