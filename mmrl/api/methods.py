"""Map the name of a method to a recipe and an objective, depending on the model and the environment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmrl.entries import RecipeEntry
from mmrl.errors import UserError, did_you_mean
from mmrl.files import expanded, read_json_object, read_yaml
from mmrl.recipes import EVALUATIONS, all_recipes, find_recipe

PACKAGES = {"diffusion": "images", "robotics": "robots"}
"""Packages whose recipes train something other than language models."""


def resolve(method: str, model: Any, env: Any) -> tuple[RecipeEntry, str]:
    """The recipe of a method, and the objective's name if the method is an objective; raises UserError."""
    if not isinstance(method, str):
        raise UserError(f"method is a {type(method).__name__}; pass a name such as 'grpo', 'papo' or 'robot_ppo'")
    if method in all_recipes() or method.count(":") == 2:
        return find_recipe(method, where="method"), ""
    if method in EVALUATIONS:
        raise UserError(f"method '{method}' does not train; run it with `mmrl evaluate`")
    from mmrl.cli.explain import DOMAINS, ROWS, places

    if method not in ROWS:
        names = [*all_recipes(), *ROWS]
        hint = did_you_mean(method, names)
        raise UserError(
            f"unknown method '{method}'; {hint}`mmrl list recipes` and `mmrl list objectives` list all methods"
        )
    domain = domain_of(model, env)
    fitting = {place.domain: place for place in places(ROWS[method])}
    place = fitting[domain]
    if not place.recipe:
        words = {known.name: known.trains for known in DOMAINS}
        others = "; ".join(words[name] for name, other in fitting.items() if other.recipe) or "nothing"
        raise UserError(f"method '{method}' does not work for {words[domain]}: {place.lacks}; it works for: {others}")
    return find_recipe(place.recipe), method


def default_recipe(domain: str) -> str:
    """Recipe whose evaluation measures a model that no run has trained."""
    from mmrl.cli.explain import DOMAINS

    return next(next(iter(known.recipes)) for known in DOMAINS if known.name == domain)


def domain_of(model: Any, env: Any) -> str:
    """Domain that a model and an environment belong to."""
    said = _domain_of_model(model)
    if said in ("images", "robots"):
        return said
    if env is None:
        return "language"
    if said == "agents":
        return "agents"
    raise UserError(
        "env was passed with a model that is neither a language model nor a robot policy; pass the recipe as the "
        "method, such as 'agent', 'robot_grpo' or 'robot_ppo'"
    )


def _domain_of_model(model: Any) -> str:
    """What a model says of itself: images, robots, or agents for a language model; empty if it does not say."""
    if isinstance(model, tuple):
        model = model[0]
    if isinstance(model, str | Path):
        return _domain_of_folder(str(model))
    if isinstance(model, Mapping):
        path = model.get("path")
        return _domain_of_folder(path) if isinstance(path, str) else "robots" if "kind" in model else ""
    if is_pipeline(model):
        return "images"
    if is_network(model):
        return "agents"
    return "robots" if is_module(model) else ""


def _domain_of_folder(path: str) -> str:
    folder = expanded(path)
    if (folder / "config.yaml").is_file():  # of a run
        # looked up, not loaded: a run of somebody else may name a recipe of its own
        known = all_recipes().get(str(read_yaml(folder / "config.yaml").get("recipe")))
        if known is None:
            return ""
        return PACKAGES.get(known.target.partition(".")[0], "agents")
    if (folder / "model_index.json").is_file():
        return "images"
    if (folder / "config.json").is_file():
        return "agents" if "model_type" in read_json_object(folder / "config.json") else "robots"
    return "agents" if not folder.exists() else ""  # a hub id, or a packaged model


def is_pipeline(model: Any) -> bool:
    """Whether a loaded model is a diffusers pipeline."""
    return any(base.__name__ == "DiffusionPipeline" for base in type(model).__mro__)


def is_network(model: Any) -> bool:
    """Whether a loaded model is a transformers model, or the peft model around one."""
    return any(base.__name__ in ("PreTrainedModel", "PeftModel") for base in type(model).__mro__)


def is_module(model: Any) -> bool:
    """Whether a loaded model is a torch module."""
    return any(base.__module__.startswith("torch.nn") and base.__name__ == "Module" for base in type(model).__mro__)
