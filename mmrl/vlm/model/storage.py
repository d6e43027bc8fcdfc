"""Saving and restoring weights bit for bit, in folders that other tools read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.errors import UserError
from mmrl.hub.building import base_entries, sort_header
from mmrl.hub.compat import quiet_transformers
from mmrl.vlm.model.network import BASE_FILE

VALUE_HEAD_FILE = "value_head.safetensors"
ADAPTER_FILE = "adapter_model.safetensors"


def save_model(model: Any, path: Path) -> None:
    """Write a transformers model; of a peft model its adapter, with where the base model is from here."""
    path.mkdir(parents=True, exist_ok=True)
    with quiet_transformers():
        model.save_pretrained(path)
    if hasattr(model, "peft_config"):
        sort_header(path / ADAPTER_FILE)  # so that the adapter's bytes follow from its tensors
        base = str(model.active_peft_config.base_model_name_or_path)
        (path / BASE_FILE).write_text(json.dumps(base_entries(base, path), indent=2) + "\n", encoding="utf-8")


def save_value_head(head: nn.Module, path: Path) -> None:
    """Write a value head into a folder."""
    from safetensors.torch import save_file

    save_file({name: tensor.detach().cpu() for name, tensor in head.state_dict().items()}, path / VALUE_HEAD_FILE)


def merged_state(model: Any) -> dict[str, Tensor]:
    """Weights of a peft model with its adapters added; the model stays, since merging and unmerging would round it."""
    network = model.base_model.model
    state = {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in network.state_dict().items()
        if ".lora_" not in name
    }
    with torch.no_grad():
        for name, layer in network.named_modules():
            if hasattr(layer, "get_delta_weight"):
                weight = state[f"{name}.weight"]
                delta = layer.get_delta_weight(model.active_adapter)
                state[f"{name}.weight"] = (weight.float() + delta).to(weight.dtype)
    return state


def load_model_weights(model: Any, path: Path) -> None:
    """Read weights that `save_model` wrote of a model of the same shape; raises UserError."""
    adapted = hasattr(model, "peft_config")
    expected = path / (ADAPTER_FILE if adapted else "config.json")
    if not expected.is_file():
        raise UserError(f"{path} is not a saved policy: it has no {expected.name}")
    try:
        state = _read_adapter(model, path) if adapted else _read_model(model, path)
    except UserError:
        raise
    except Exception as error:  # safetensors, json and transformers each raise their own kinds
        raise UserError(f"the weights in {path} cannot be read: {type(error).__name__}: {error}") from error
    _copy_into(model, state, path)


def load_value_head(head: nn.Module, path: Path) -> None:
    """Read a value head from a folder; raises UserError."""
    from safetensors.torch import load_file

    file = path / VALUE_HEAD_FILE
    if not file.is_file():
        raise UserError(f"{path} has no {VALUE_HEAD_FILE}; it was saved by a policy without value head")
    try:
        state = load_file(file)
    except Exception as error:
        raise UserError(f"{file} cannot be read: {error}") from error
    _copy_into(head, state, file)


def _read_model(network: Any, path: Path) -> dict[str, Tensor]:
    """State of a model folder, through transformers, which knows sharded files and older key names."""
    with quiet_transformers():
        saved, report = type(network).from_pretrained(
            path, dtype=network.dtype, local_files_only=True, output_loading_info=True
        )
    wrong = {key: sorted(value) for key, value in report.items() if value}
    if wrong:
        raise UserError(f"the weights in {path} do not fit this model: {wrong}")
    return saved.state_dict()  # type: ignore[no-any-return]


def _read_adapter(model: Any, path: Path) -> dict[str, Tensor]:
    """State of an adapter folder, by the names inside the model: `...lora_A.weight` is `...lora_A.<adapter>.weight`."""
    from safetensors.torch import load_file

    adapter = model.active_adapter
    state = {}
    for key, value in load_file(path / ADAPTER_FILE).items():
        stem, _, last = key.rpartition(".")
        state[f"{stem}.{adapter}.{last}"] = value
    own = {key for key in model.state_dict() if f".{adapter}." in key and "lora_" in key}
    if set(state) != own:
        different = sorted(set(state) ^ own)[:4]
        raise UserError(f"the adapter in {path} has other layers than this model, for example {different}")
    return state


def _copy_into(module: nn.Module, state: dict[str, Tensor], path: Path) -> None:
    own = module.state_dict()
    unknown = sorted(set(state) - set(own))
    shapes = [key for key in state if key in own and own[key].shape != state[key].shape]
    if unknown or shapes:
        raise UserError(f"the weights in {path} do not fit this model; unknown {unknown[:4]}, shapes {shapes[:4]}")
    with torch.no_grad():
        for key, value in state.items():
            own[key].copy_(value)
