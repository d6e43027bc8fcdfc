"""The transformers model behind a policy: its folder, whether it is supported, and loading it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mmrl.errors import UserError
from mmrl.files import expanded, read_json_object
from mmrl.hub.compat import quiet_transformers
from mmrl.hub.saved_files import base_path
from mmrl.vlm.model_config import ModelConfig

BASE_FILE = "base.json"
"""File beside an adapter with the relative path of its base model."""
ARCHITECTURES = {
    "qwen2_5_vl": "Qwen2.5-VL (arXiv 2502.13923)",
    "qwen3_vl": "Qwen3-VL (arXiv 2511.21631)",
}


def resolve_model(path: str) -> tuple[str, Path | None]:
    """Find the base model and the adapter of a path."""
    folder = expanded(path).absolute()  # adapters record it as the place of their base model
    if (folder / "config.json").is_file():
        return str(folder), None
    adapter_file = folder / "adapter_config.json"
    if adapter_file.is_file():
        base = read_json_object(adapter_file).get("base_model_name_or_path")
        if not isinstance(base, str) or not base:
            raise UserError(f"{adapter_file} names no base model")
        moved = not Path(base).is_dir() and (folder / BASE_FILE).is_file()
        return base_path({"path": base, **read_json_object(folder / BASE_FILE)}, folder) if moved else base, folder
    if folder.is_dir():
        raise UserError(f"{folder} is not a model folder: it has no config.json; it holds {_listing(folder)}")
    # runs/model is also a well-formed hub id; next to an existing runs/ it is a folder that is missing
    if folder.is_file() or folder.parent.is_dir() or not re.fullmatch(r"[\w.-]+/[\w.-]+", path):
        raise UserError(f"there is no model folder {path}; give a folder with config.json or a hub id (owner/name)")
    return path, None


def _listing(folder: Path) -> str:
    names = sorted(entry.name for entry in folder.iterdir())
    return ", ".join(names[:6]) + (", ..." if len(names) > 6 else "") if names else "nothing"


def load_network(config: ModelConfig, base: str) -> Any:
    """Load a transformers model with its language model head."""
    import torch
    from transformers import AutoModelForImageTextToText

    model_type = _model_type(base)
    if model_type not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UserError(f"{base} is of architecture {model_type!r}; supported are: {known}")
    try:
        with quiet_transformers():
            loaded: Any = AutoModelForImageTextToText.from_pretrained(
                base,
                dtype=getattr(torch, config.dtype),
                attn_implementation=config.attention,
                output_loading_info=True,
            )
    except Exception as error:  # damaged files, missing kernels and memory each raise their own kinds
        raise UserError(f"the model in {base} cannot be loaded: {_first_line(error)}") from error
    network, report = loaded
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise UserError(f"the weight files in {base} lack {len(missing)} tensors, for example {missing[0]}")
    return network


def _model_type(base: str) -> str:
    from transformers import AutoConfig

    file = Path(base) / "config.json"
    if file.is_file():
        return str(read_json_object(file).get("model_type"))
    try:
        return str(AutoConfig.from_pretrained(base).model_type)
    except Exception as error:  # hub and network errors
        raise UserError(
            f"there is no local folder {base!r}, and it cannot be fetched from the hub: {_first_line(error)}"
        ) from error


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
