"""Saving and restoring a policy's weights, bit for bit, in folders that other tools read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mmrl.errors import UserError
from mmrl.files import replaced
from mmrl.hub.compat import quiet_transformers
from mmrl.hub.saved_files import base_entries, sort_header
from mmrl.vlm.network import BASE_FILE

VALUE_HEAD_FILE = "value_head.safetensors"
ADAPTER_FILE = "adapter_model.safetensors"


class PolicyParts(Protocol):
    """What of a policy is saved; `mmrl.vlm.policy.VlmPolicy` has these parts."""

    model: Any
    """The transformers model, or the peft model around it."""
    processor: Any
    value_head: nn.Module | None

    @property
    def network(self) -> Any:
        """The transformers model."""
        ...

    @property
    def has_adapter(self) -> bool:
        """Whether the model carries LoRA adapters."""
        ...


def save_policy(policy: PolicyParts, path: Path) -> None:
    """Write a policy to a folder.

    Without LoRA the folder is an ordinary model folder. With LoRA it holds the adapter, whose configuration
    names the base model; AutoModelForImageTextToText then loads the base model with the adapter. `save_merged`
    writes the two as one ordinary folder.
    """
    from safetensors.torch import save_file

    path.mkdir(parents=True, exist_ok=True)
    with quiet_transformers():
        policy.model.save_pretrained(path)
    if policy.has_adapter:
        _note_base(policy, path)
    policy.processor.save_pretrained(path)
    if policy.value_head is not None:
        state = {name: tensor.detach().cpu() for name, tensor in policy.value_head.state_dict().items()}
        save_file(state, path / VALUE_HEAD_FILE)


def _note_base(policy: PolicyParts, path: Path) -> None:
    """Make the adapter's bytes follow from its tensors, and say where the base lies from here."""
    sort_header(path / ADAPTER_FILE)
    base = str(policy.model.active_peft_config.base_model_name_or_path)
    (path / BASE_FILE).write_text(json.dumps(base_entries(base, path), indent=2) + "\n", encoding="utf-8")


def save_merged(policy: PolicyParts, path: Path) -> None:
    """Write a policy as an ordinary model folder, with LoRA adapters added into the weights."""
    if not policy.has_adapter:
        save_policy(policy, path)
        return
    with replaced(path) as draft:
        with quiet_transformers():
            policy.network.save_pretrained(draft, state_dict=_merged_state(policy))
        policy.processor.save_pretrained(draft)


def _merged_state(policy: PolicyParts) -> dict[str, Tensor]:
    """Weights with the adapters added; the model itself is not touched, merging and unmerging would round it."""
    state = {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in policy.network.state_dict().items()
        if ".lora_" not in name
    }
    layers: list[tuple[str, Any]] = list(policy.network.named_modules())
    with torch.no_grad():
        for name, layer in layers:
            if hasattr(layer, "get_delta_weight"):
                delta = layer.get_delta_weight(policy.model.active_adapter)
                weight = state[f"{name}.weight"]
                state[f"{name}.weight"] = (weight.float() + delta).to(weight.dtype)
    return state


def load_policy_weights(policy: PolicyParts, path: Path) -> None:
    """Read weights that `save_policy` wrote into the parameters that the policy has.

    Args:
        policy: a policy of the same shape.
        path: folder.
    """
    expected = path / (ADAPTER_FILE if policy.has_adapter else "config.json")
    if not expected.is_file():
        raise UserError(f"{path} is not a saved policy: it has no {expected.name}")
    try:
        state = _read_adapter(policy, path) if policy.has_adapter else _read_model(policy, path)
    except UserError:
        raise
    except Exception as error:  # safetensors, json and transformers each raise their own kinds
        raise UserError(f"the weights in {path} cannot be read: {type(error).__name__}: {error}") from error
    _copy_into(policy.model, state, path)
    if policy.value_head is not None:
        load_value_head(policy, path)


def load_value_head(policy: PolicyParts, path: Path) -> None:
    """Read the value head from a folder."""
    from safetensors.torch import load_file

    file = path / VALUE_HEAD_FILE
    if not file.is_file():
        raise UserError(f"{path} has no {VALUE_HEAD_FILE}; it was saved by a policy without value head")
    assert policy.value_head is not None
    try:
        state = load_file(file)
    except Exception as error:
        raise UserError(f"{file} cannot be read: {error}") from error
    _copy_into(policy.value_head, state, file)


def _read_model(policy: PolicyParts, path: Path) -> dict[str, Tensor]:
    """State of a model folder, through transformers, which knows sharded files and older key names."""
    network = policy.network
    with quiet_transformers():
        saved, report = type(network).from_pretrained(
            path, dtype=network.dtype, local_files_only=True, output_loading_info=True
        )
    wrong = {key: sorted(value) for key, value in report.items() if value}
    if wrong:
        raise UserError(f"the weights in {path} do not fit this model: {wrong}")
    return saved.state_dict()


def _read_adapter(policy: PolicyParts, path: Path) -> dict[str, Tensor]:
    """State of an adapter folder, under the names that the adapted model uses."""
    from safetensors.torch import load_file

    state = load_file(path / ADAPTER_FILE)
    adapted = policy.model
    name = adapted.active_adapter
    renamed = {_adapter_key(key, name): value for key, value in state.items()}
    own = {key for key in adapted.state_dict() if f".{name}." in key and "lora_" in key}
    if set(renamed) != own:
        different = sorted(set(renamed) ^ own)[:4]
        raise UserError(f"the adapter in {path} has other layers than this model, for example {different}")
    return renamed


def _adapter_key(key: str, adapter: str) -> str:
    """`...lora_A.weight` as saved is `...lora_A.<adapter>.weight` inside the model."""
    stem, _, last = key.rpartition(".")
    return f"{stem}.{adapter}.{last}"


def _copy_into(module: torch.nn.Module, state: dict[str, Tensor], path: Path) -> None:
    own = module.state_dict()
    unknown = sorted(set(state) - set(own))
    shapes = [key for key in state if key in own and own[key].shape != state[key].shape]
    if unknown or shapes:
        raise UserError(f"the weights in {path} do not fit this model; unknown {unknown[:4]}, shapes {shapes[:4]}")
    with torch.no_grad():
        for key, value in state.items():
            own[key].copy_(value)
