"""`mmrl export`: a run's model as a folder that its own library loads without this suite, with a card."""

from __future__ import annotations

import argparse
import json
import pydoc
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mmrl.config import foreign_run
from mmrl.errors import UserError
from mmrl.files import follow_umask
from mmrl.hub.cards import CARD, hub_id_of
from mmrl.hub.compat import quiet_transformers
from mmrl.report.card import model_card
from mmrl.runs.export import ABOUT_FILE, Exported, chosen_checkpoint

SOURCE_KEYS = ("_name_or_path", "name_or_path")
"""Keys of transformers' and diffusers' files that tell where a model was loaded from."""


def export(args: argparse.Namespace, run_dir: Path, say: Callable[[str], None]) -> int:
    """Export as the command line asks, and say how the folder is loaded or uploaded."""
    output = args.output or run_dir / "export"
    with foreign_run(run_dir / "config.yaml", allow=args.allow) as (entry, config):
        call = export_run(entry, config, run_dir, output, args.step, args.to_hub, args.lora_format)
    say(f"exported: {output}")
    say(f"load it as {output / CARD} shows" if args.lora_format else f"load it with: {call}")
    if args.to_hub:
        say(f"checked; upload it with: {shlex.join(['hf', 'upload', args.to_hub, str(output)])}")
    return 0


def export_run(
    entry: Any, config: Any, run_dir: Path, output: Path, step: int | None = None, repository: str = "", form: str = ""
) -> str:
    """Write the model of a run's best (else newest) checkpoint as one ordinary folder, adapters merged, with its card.

    With `form`, the format of adapter files, it is the adapters alone. `repository` is the id on the Hugging Face hub
    of a folder that is to be uploaded, which is then also checked.
    """
    _check_id(repository)
    checkpoint = chosen_checkpoint(run_dir, step)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"{output} exists; choose another --output, or delete it")
    partial = output.with_name(f".partial-{output.name}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        exported = _export(entry, config, checkpoint, partial, form)
        number = int(checkpoint.name.removeprefix("step-"))
        about = {"recipe": entry.name, "step": number, "load": exported.call} | _prompt_format(config)
        (partial / ABOUT_FILE).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        card = model_card(entry, config, run_dir, number, exported, repository)
        (partial / CARD).write_text(card, encoding="utf-8", errors="backslashreplace")
        for file in partial.rglob("*.json"):
            _forget_sources(file)
        if repository:
            _check_upload(partial, exported.call)
        follow_umask(partial)
        if output.exists():
            output.rmdir()
        partial.rename(output)
    except OSError as error:
        raise UserError(f"{output} cannot be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    if not exported.call.endswith(")"):
        return f"{exported.call}({str(output)!r})"
    function, _, options = exported.call.partition("(")
    return f"{function}({str(output)!r}, {options}"


def _export(entry: Any, config: Any, checkpoint: Path, folder: Path, form: str) -> Exported:
    """Have the recipe write the model, or its adapters in a format."""
    recipe = entry.load_recipe_class()
    if not form:
        return recipe.export(config, checkpoint, folder)  # type: ignore[no-any-return]
    if not hasattr(recipe, "export_adapter"):
        raise UserError(
            f"--lora-format is for image and video models, not for the recipe {entry.name}; language models have their "
            f"adapters in the format of peft already: {checkpoint}/model"
        )
    return recipe.export_adapter(config, checkpoint, folder, form)  # type: ignore[no-any-return]


def _check_id(repository: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repository)
        sound = repository.count("/") == 1
    except HFValidationError:
        sound = False
    if repository and not sound:
        raise UserError(f"--to-hub is {repository!r}; it takes the id of a repository, such as your-name/your-model")


def _forget_sources(file: Path) -> None:
    """Take the folder that a model was loaded from out of a library's file; a hub id stays."""
    text = file.read_text(encoding="utf-8")
    if not any(f'"{key}"' in text for key in SOURCE_KEYS):
        return
    content = json.loads(text)
    for key in SOURCE_KEYS:
        if isinstance(content, dict) and not hub_id_of(str(content.get(key, ""))):
            content.pop(key, None)
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _check_upload(folder: Path, call: str) -> None:
    """Read the card's head and load the model as others will; raises UserError where something is wrong or private."""
    from huggingface_hub import ModelCard

    try:
        ModelCard.load(folder / CARD)
        load = None if ":" in call else pydoc.locate(call.partition("(")[0])
        if load is not None:
            with quiet_transformers():
                load(str(folder), **dict.fromkeys(re.findall(r"(\w+)=None", call)))  # type: ignore[operator]
    except Exception as error:
        raise UserError(f"the exported folder does not load: {' '.join(str(error).split())}") from error
    for file in folder.rglob("*.json"):
        found = re.findall(r'"((?:/[^"/\\\s]+){2,})"', file.read_text(encoding="utf-8"))
        private = next((path for path in found if Path(path).exists()), None)
        if private is not None:
            raise UserError(f"{file.relative_to(folder)} names {private} of this machine; nothing was written")


def _prompt_format(config: Any) -> dict[str, str]:
    """Prompt format of training, which later questions have to follow."""
    data = getattr(config, "data", None)
    found = {name: getattr(data, name, None) for name in ("system_prompt", "format_prompt")}
    return {name: value for name, value in found.items() if value}
