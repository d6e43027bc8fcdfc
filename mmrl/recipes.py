"""The recipes of all packages by name; each package lists its own in its module `entries`."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

from mmrl.entries import RecipeEntry, load_target
from mmrl.errors import NoPlan, UserError
from mmrl.workers.loading import LoadError, check_allowed

PACKAGES = ("mmrl.vlm", "mmrl.masked", "mmrl.agents", "mmrl.gui", "diffusion", "robotics")
"""Packages with recipes, in the order in which they are listed; each builds only on earlier ones."""
CONTRIB = ("mmrl.contrib.language", "mmrl.contrib.agents", "diffusion.contrib", "robotics.contrib")
"""Packages whose recipes have fewer guarantees than those of the library. Their `entries` are read if the library has
no recipe of a given name. EXTENDS in it is the package whose plan, preview, reader and metrics they share. BUILDS_ON of
a package is the package whose metrics its recipes also report."""
WORLDS = ("toy", "scenes")
"""Folders of the packages with toy tasks. Only the tables of these folders refer to their modules."""


def find_recipe(name: str, where: str = "configuration") -> RecipeEntry:
    """Look up a recipe by name, first in the library and then in contrib, or by `module:RecipeClass:ConfigClass`."""
    found = RECIPES.get(name) or EVALUATIONS.get(name) or contrib_recipes().get(name)
    if found is not None:
        return found
    if name.count(":") == 2:
        return _user_recipe(name, where)
    raise UserError(
        f"{where}: unknown recipe '{name}'; {_hint(name)}available: "
        f"{', '.join((*RECIPES, *EVALUATIONS, *contrib_recipes()))}, or module:Recipe:Config"
    )


@functools.cache
def contrib_recipes() -> dict[str, RecipeEntry]:
    """The recipes of contrib by name."""
    modules = [importlib.import_module(f"{package}.entries") for package in CONTRIB]
    return {entry.name: entry for module in modules for entry in module.RECIPES}


def shown_name(recipe: str, objective: str) -> str:
    """Human-readable name of a run's method: `vlm` trains language models too, so only its objective is named."""
    return objective if recipe == "vlm" and objective else recipe


def all_recipes() -> dict[str, RecipeEntry]:
    """The recipes of the library, then those of contrib."""
    return RECIPES | contrib_recipes()


def _hint(name: str) -> str:
    """The closest recipe, or where the closest objective of the catalogue belongs."""
    from mmrl.core.catalogue import all_objectives  # loads torch, which listing the recipes must not

    recipes = RECIPES | EVALUATIONS | contrib_recipes()
    close = difflib.get_close_matches(name, [*recipes, *all_objectives()], n=1)
    if not close:
        return ""
    if close[0] in recipes:
        return f"did you mean '{close[0]}'? "
    meant = "" if close[0] == name else f"did you mean '{close[0]}'? "
    return (
        f"{meant}{close[0]} is an objective: use recipe: vlm (robot_grpo for robots) with "
        f"objective: {{preset: {close[0]}}}; "
    )


def _user_recipe(name: str, where: str) -> RecipeEntry:
    entry = RecipeEntry(name, name, "user recipe", "-")
    try:
        check_allowed(name, "recipe")
        supervised = entry.load_recipe_class().supervised
        entry.load_config_class()
    except (ImportError, AttributeError, TypeError, ValueError, LoadError) as error:
        raise UserError(f"{where}: recipe '{name}' cannot be loaded: {error}") from error
    return dataclasses.replace(entry, supervised=supervised)


def package_tables(name: str, packages: Sequence[str] = PACKAGES) -> list[Any]:
    """Collect a table from the `entries` of each package that has it: RECIPES, EVALUATIONS, METRICS or others."""
    modules = [importlib.import_module(f"{package}.entries") for package in packages]
    return [getattr(module, name) for module in modules if hasattr(module, name)]


def world_table(name: str) -> dict[str, Any]:
    """Merge a table that toy tasks define in their `__init__`: DEMOS, IMAGE_REWARDS, SIMULATORS, ..."""
    found: dict[str, Any] = {}
    for world in (f"{package}.{folder}" for package in PACKAGES for folder in WORLDS):
        if importlib.util.find_spec(world):
            found |= getattr(importlib.import_module(world), name, {})
    return found


def metric_tables(recipe: str, name: str = "METRICS") -> list[dict[str, str]]:
    """The METRICS (or TITLES of charts) of the packages that a recipe's package builds on, followed by its own.

    Of all packages for an unknown recipe.
    """
    entry = RECIPES.get(recipe) or EVALUATIONS.get(recipe) or contrib_recipes().get(recipe)
    if entry is None:
        return package_tables(name, (*PACKAGES, *CONTRIB))
    found: list[dict[str, str]] = []
    own = _entries_of(entry)
    while own is not None:
        found.insert(0, getattr(own, name, {}))
        base = getattr(own, "EXTENDS", None) or getattr(own, "BUILDS_ON", None)
        own = importlib.import_module(f"{base}.entries") if base else None
    return found


def plan_of(entry: RecipeEntry) -> Any:
    """The function that maps a recipe's configuration to a `mmrl.training.plan.Plan`; NoPlan if there is none."""
    target = _own_entries(entry, "PLAN")
    if target is None:
        raise NoPlan(f"there is no plan for the recipe '{entry.name}'")
    return load_target(target)


def preview_of(entry: RecipeEntry) -> Any:
    """The function of a configuration and a recipe without a model that describes a run's data in lines, or None."""
    target = _own_entries(entry, "PREVIEW")
    return load_target(target) if target else None


def reader_of(entry: RecipeEntry) -> Any:
    """The function that reads one dataset of a recipe separately; None if there is none."""
    target = _own_entries(entry, "READER")
    return load_target(target) if target else None


def _own_entries(entry: RecipeEntry, name: str) -> Any:
    """A value of the `entries` of a recipe's package, or of the package that it extends; None without one."""
    own = _entries_of(entry)
    if hasattr(own, name) or not hasattr(own, "EXTENDS"):
        return getattr(own, name, None)
    return getattr(importlib.import_module(f"{own.EXTENDS}.entries"), name, None)


def _entries_of(entry: RecipeEntry) -> Any:
    """The module `entries` of the package that a recipe is in; None for a user's own."""
    own = [package for package in (*PACKAGES, *CONTRIB) if entry.target.startswith(f"{package}.")]
    return importlib.import_module(f"{max(own, key=len)}.entries") if own else None


RECIPES: dict[str, RecipeEntry] = {entry.name: entry for table in package_tables("RECIPES") for entry in table}
EVALUATIONS: dict[str, RecipeEntry] = {entry.name: entry for table in package_tables("EVALUATIONS") for entry in table}
"""Recipes that can only be evaluated, not trained."""
