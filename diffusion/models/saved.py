"""Files of a trained network: an adapter or all weights, written for diffusers and read back bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffusion.models.pipelines import quiet_diffusers
from mmrl.errors import UserError
from mmrl.files import read_json_object
from mmrl.hub.building import base_path, check_finite, first_line, merged_weights, sort_header

BASE_FILE = "base.json"
LORA_FILE = "pytorch_lora_weights.safetensors"
ADAPTER = "default"


def read_base(file: Path) -> dict[str, Any]:
    """Read which base pipeline the saved weights of a folder belong to; raises UserError where the file is damaged."""
    saved = read_json_object(file)
    if not isinstance(saved.get("path"), str):
        raise UserError(f"{file} names no base pipeline: it has {', '.join(saved) or 'nothing'}")
    return saved | {"path": base_path(saved, file.parent)}


def guarded(folder: Path, read: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Load a folder's weights; turn reader errors into a UserError."""
    try:
        return read()
    except UserError:
        raise
    except Exception as error:  # safetensors, json and diffusers each raise their own kinds
        raise UserError(f"the weights in {folder} cannot be read: {first_line(error)}") from error


def save_adapter(network: Any, name: str, pipeline: Any, folder: Path) -> None:
    """Write a network's adapter as a file for its pipeline's `load_lora_weights`."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    weights = get_peft_model_state_dict(network, adapter_name=ADAPTER)
    # rank and alpha go into the file's header; without them diffusers takes alpha = rank
    settings = network.peft_config[ADAPTER].to_dict()
    settings = {key: sorted(value) if isinstance(value, set) else value for key, value in settings.items()}
    layers = {key: weight.detach().cpu() for key, weight in weights.items()}
    if hasattr(pipeline, "save_lora_weights"):
        role = "unet" if name == "unet" else "transformer"  # a second transformer has a file of its own
        options = {f"{role}_lora_layers": layers, f"{role}_lora_adapter_metadata": settings}
        type(pipeline).save_lora_weights(folder, **options)
    else:  # for the network's own `load_lora_adapter`
        metadata = {"format": "pt", "lora_adapter_metadata": json.dumps(settings, indent=2, sort_keys=True)}
        save_file(layers, folder / LORA_FILE, metadata=metadata)
    sort_header(folder / LORA_FILE)


def merged(network: Any) -> Any:
    """A network with the adapters merged; weights without an adapter are shared."""
    with torch.device("meta"):
        merged = type(network).from_config(network.config)
    merged.load_state_dict(merged_weights(network, ADAPTER), assign=True)
    return merged


def read_adapter(network: Any, folder: Path) -> dict[str, Tensor]:
    """Weights of an adapter file, under the names that they have in the network."""
    from safetensors.torch import load_file

    state = {}
    for key, weight in load_file(folder / LORA_FILE).items():
        stem, _, last = key.removeprefix("transformer.").removeprefix("unet.").rpartition(".")
        state[f"{stem}.{ADAPTER}.{last}"] = weight
    return state


def read_network(network: Any, folder: Path) -> dict[str, Tensor]:
    """Weights of a network's folder, through diffusers, which reads sharded files."""
    with quiet_diffusers():
        saved, report = type(network).from_pretrained(
            folder, torch_dtype=network.dtype, local_files_only=True, output_loading_info=True
        )
    wrong = {key: sorted(map(str, value))[:4] for key, value in report.items() if value}
    if wrong:
        raise UserError(f"the weights in {folder} do not fit this model: {wrong}")
    return dict(saved.state_dict())


def copy_into(network: Any, state: dict[str, Tensor], folder: Path, *, adapter_only: bool) -> None:
    """Copy saved weights into a network bit for bit; raises UserError where they do not fit."""
    own = {key: value for key, value in network.state_dict().items() if not adapter_only or ".lora_" in key}
    different = sorted(set(state) ^ set(own))
    different += [key for key in own if key in state and own[key].shape != state[key].shape]
    if different:
        raise UserError(f"the weights in {folder} do not fit this model; they differ in {', '.join(different[:4])}")
    inexact = [key for key in own if own[key].dtype != state[key].dtype]
    if inexact:
        key = inexact[0]
        raise UserError(f"{key} in {folder} is {state[key].dtype}, here it is {own[key].dtype}; set model.dtype to fit")
    check_finite(state, folder)
    with torch.no_grad():
        for key, value in state.items():
            own[key].copy_(value)
