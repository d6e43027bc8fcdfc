"""Model folders that a function of the user builds where there is none yet."""

from __future__ import annotations

import inspect
import json
import logging
import os
import shutil

from mmrl.errors import UserError
from mmrl.files import expanded
from mmrl.rewards.loading import load_function
from mmrl.vlm.model_config import FrozenModelConfig

BUILD_FILE = "build.json"
"""File in a model that `model.build` made, with the function and its options."""


def build_model_if_missing(config: FrozenModelConfig) -> None:
    """Make a missing model folder with the user's function, under another name until it is complete."""
    if config.build is None:
        return
    folder = expanded(config.path)
    recipe = json.dumps({"build": config.build, "options": config.build_options}, sort_keys=True, default=str)
    if (folder / "config.json").is_file():
        file = folder / BUILD_FILE
        if file.is_file() and (built := file.read_text(encoding="utf-8")) != recipe:
            raise UserError(
                f"{folder} was built with {built}, the settings are {recipe}; remove the folder or set another "
                "model.path"
            )
        return
    build = load_function(config.build, what="model.build")
    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}.unfinished")
    try:
        inspect.signature(build).bind(unfinished, **config.build_options)
    except TypeError as error:
        raise UserError(f"model.build_options do not fit {config.build}: {error}") from error
    logging.getLogger("mmrl").info("building %s with %s", folder, config.build)
    try:
        build(unfinished, **config.build_options)
        (unfinished / BUILD_FILE).write_text(recipe, encoding="utf-8")
        if not (folder / "config.json").is_file():  # another process may have been quicker
            folder.parent.mkdir(parents=True, exist_ok=True)
            os.replace(unfinished, folder)
    except (TypeError, ValueError, KeyError, ImportError) as error:  # options that do not fit, a missing package
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"model.build {config.build!r} with model.build_options failed: {reason}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
