"""The folder of a world model: config.json, vocabulary.json and model.safetensors.

Frozen CLIP towers are referenced by their folders, also relatively, so that both can be moved together; an exported
model contains copies.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmrl.errors import UserError
from mmrl.files import read_json_object, replaced, write_atomically
from mmrl.hub.saved_files import base_entries, base_path, sort_header
from mmrl.training.record.manifest import check_model
from robotics.flow3d.encoding import FlowEncoding
from robotics.flow3d.model.context import ClipContext
from robotics.flow3d.model.settings import BodyConfig, ConditionConfig, FlowModelConfig, ProcessConfig, UnetConfig

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
FOLDERS = ("text", "vision")
"""Options of the context that name folders of frozen models."""


def write_config(config: FlowModelConfig, folder: Path) -> None:
    """Write config.json to a folder, created with its parents."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = dataclasses.asdict(config)
    if config.condition.kind == "clip":
        entries["condition"] |= {name: base_entries(getattr(config.condition, name), folder) for name in FOLDERS}
    write_atomically(folder / CONFIG_FILE, json.dumps(entries, indent=2) + "\n")


def read_config(folder: Path) -> FlowModelConfig:
    """Read what `write_config` wrote; raises UserError where there is none or it is damaged."""
    file = folder / CONFIG_FILE
    if not file.is_file():
        raise UserError(f"{folder} is not a saved world model: it has no {CONFIG_FILE}")
    entries = read_json_object(file)
    try:
        parts = {name: dict(entries[name]) for name in ("encoding", "body", "condition", "process")}
        for name in FOLDERS:
            if isinstance(parts["condition"].get(name), dict):
                parts["condition"][name] = base_path(parts["condition"][name], folder)
        parts["body"]["unet"] = UnetConfig(**parts["body"]["unet"])
        return FlowModelConfig(
            FlowEncoding(**parts["encoding"]),
            BodyConfig(**parts["body"]),
            ConditionConfig(**parts["condition"]),
            ProcessConfig(**parts["process"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{file} is not that of a world model: {error!r}") from error


def write_weights(weights: dict[str, Tensor], folder: Path) -> None:
    """Write weights by name to a folder's model.safetensors."""
    from safetensors.torch import save_file

    with replaced(folder / WEIGHTS_FILE) as draft:
        save_file({name: value.detach().cpu().contiguous() for name, value in weights.items()}, str(draft))
        sort_header(draft)


def read_weights(weights: dict[str, Tensor], folder: Path) -> None:
    """Copy a folder's weights into those of a model, bit for bit."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    check_model(folder)
    if not (folder / WEIGHTS_FILE).is_file():
        raise UserError(f"{folder} is not a saved world model: it has no {WEIGHTS_FILE}")
    try:
        saved = load_file(folder / WEIGHTS_FILE)
    except (SafetensorError, OSError) as error:
        raise UserError(f"the weights in {folder} are damaged: {error}") from error
    different = sorted(set(weights) ^ set(saved))
    different += [name for name, own in weights.items() if name in saved and own.shape != saved[name].shape]
    if different:
        raise UserError(f"the weights in {folder} are those of another model; {', '.join(different[:4])} do not fit")
    with torch.no_grad():
        for name, value in saved.items():
            weights[name].copy_(value)


def copy_towers(context: ClipContext, folder: Path) -> None:
    """Copy the frozen models of a context into a model's folder."""
    towers: Any = context.towers
    towers["text"].save_pretrained(folder / "text" / "text_encoder")
    context.tokenizer.save_pretrained(folder / "text" / "tokenizer")
    towers["vision"].save_pretrained(folder / "vision")
    entries = read_json_object(folder / CONFIG_FILE)
    entries["condition"] |= {name: {"path": str(folder / name), "relative": name} for name in FOLDERS}
    write_atomically(folder / CONFIG_FILE, json.dumps(entries, indent=2) + "\n")
