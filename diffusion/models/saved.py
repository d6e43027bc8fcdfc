"""Files of a trained network (an adapter or all weights), written for diffusers and restored bit for bit."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Sequence
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
EXACT_FILE = "exact.safetensors"
"""The adapter's exact weights, written if those of `LORA_FILE` cannot be divided by the scale without rounding."""
ADAPTER = "default"


def read_base(file: Path) -> dict[str, Any]:
    """Read which base pipeline the saved weights of a folder belong to; raises UserError if the file is damaged."""
    saved = read_json_object(file)
    if not isinstance(saved.get("path"), str):
        raise UserError(
            f"{file} does not say which base pipeline it belongs to: it has {', '.join(saved) or 'nothing'}"
        )
    return saved | {"path": base_path(saved, file.parent)}


def guarded(folder: Path, read: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Load a folder's weights; turn reader errors into a UserError."""
    try:
        return read()
    except UserError:
        raise
    except Exception as error:  # safetensors, json and diffusers each raise their own kinds
        raise UserError(f"the weights in {folder} cannot be read: {first_line(error)}") from error


def adapter_of(network: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights of a network's adapter on the CPU under peft's names, and its settings."""
    from peft import get_peft_model_state_dict

    weights = get_peft_model_state_dict(network, adapter_name=ADAPTER)
    settings = network.peft_config[ADAPTER].to_dict()
    settings = {key: sorted(value) if isinstance(value, set) else value for key, value in settings.items()}
    return {key: weight.detach().cpu() for key, weight in weights.items()}, settings


def save_adapter(network: Any, name: str, pipeline: Any, folder: Path) -> None:
    """Write a network's adapter as a file for its pipeline's `load_lora_weights`.

    This format only stores alpha in the header, which ComfyUI and older diffusers ignore: they assume alpha = rank. The
    file therefore has alpha = rank and weights multiplied by alpha / rank. If dividing does not restore the weights bit
    for bit (it does for powers of two), the exact weights are written as well.
    """
    from safetensors.torch import save_file

    weights, settings = adapter_of(network)
    scale = settings["lora_alpha"] / settings["r"]
    settings["lora_alpha"] = settings["r"]
    layers = {key: weight * scale if ".lora_B." in key else weight for key, weight in weights.items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / EXACT_FILE).unlink(missing_ok=True)
    if any(".lora_B." in key and not torch.equal(layers[key] / scale, weight) for key, weight in weights.items()):
        save_file(weights, folder / EXACT_FILE, metadata={"format": "pt"})
    if hasattr(pipeline, "save_lora_weights"):
        role = "unet" if name == "unet" else "transformer"  # a second transformer is written to a separate file
        options = {f"{role}_lora_layers": layers, f"{role}_lora_adapter_metadata": settings}
        type(pipeline).save_lora_weights(folder, **options)
    else:  # for the network's own `load_lora_adapter`
        metadata = {"format": "pt", "lora_adapter_metadata": json.dumps(settings, indent=2, sort_keys=True)}
        save_file(layers, folder / LORA_FILE, metadata=metadata)
    sort_header(folder / LORA_FILE)


def merged(network: Any) -> Any:
    """A copy of a network with merged adapters; weights without an adapter are shared."""
    with torch.device("meta"):
        merged = type(network).from_config(network.config)
    merged.load_state_dict(merged_weights(network, ADAPTER), assign=True)
    return merged


def merged_pipeline(pipeline: Any, settings: Sequence[str]) -> Any:
    """A pipeline with merged adapters, which can be used and saved; it shares all weights without an adapter.

    Args:
        pipeline: a pipeline, returned as it is if nothing in it has adapters.
        settings: names of its arguments that are not parts, see `Family.settings`.
    """
    adapted = {name: part for name, part in pipeline.components.items() if getattr(part, "peft_config", None)}
    if not adapted:
        return pipeline
    parts = {name: _without_adapters(part) for name, part in adapted.items()}
    given = {name: pipeline.config[name] for name in settings if name in pipeline.config}
    return type(pipeline)(**{**pipeline.components, **parts}, **given)


def _without_adapters(network: Any) -> Any:
    weights = (*network.named_parameters(), *network.named_buffers())
    shared = {id(weight): weight for key, weight in weights if ".base_layer." not in key and ".lora_" not in key}
    copied = copy.deepcopy(network, shared)
    copied.unload_lora()
    copied.load_state_dict(merged_weights(network, ADAPTER))
    return copied


def read_adapter(network: Any, folder: Path) -> dict[str, Tensor]:
    """Weights of an adapter file, renamed to match the network."""
    from safetensors.torch import load_file

    config = network.peft_config[ADAPTER]
    scale = config.lora_alpha / config.r / _scale_of(folder / LORA_FILE)
    layers = load_file(folder / LORA_FILE)
    layers = {key.removeprefix("transformer.").removeprefix("unet."): weight for key, weight in layers.items()}
    found = {key: weight / scale if ".lora_B." in key else weight for key, weight in layers.items()}
    if (folder / EXACT_FILE).is_file():
        exact = load_file(folder / EXACT_FILE)
        scaled = {key: weight * scale if ".lora_B." in key else weight for key, weight in exact.items()}
        if scaled.keys() == layers.keys() and all(torch.equal(scaled[key], layers[key]) for key in scaled):
            found = exact  # they belong together; otherwise someone replaced the adapter file, which then counts
    return {f"{stem}.{ADAPTER}.{last}": w for key, w in found.items() for stem, _, last in [key.rpartition(".")]}


def _scale_of(file: Path) -> float:
    """Scale of the layers from the header of an adapter file.

    A file without a header has alpha = rank: all readers of the format take it so. Raises UserError for a header with
    different scales, which some other trainers write.
    """
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        settings = json.loads((opened.metadata() or {}).get("lora_adapter_metadata", "{}"))
    found = {key.rpartition(".")[2]: value for key, value in settings.items()}
    if found.get("alpha_pattern"):
        layer = next(iter(found["alpha_pattern"]))
        raise UserError(
            f"{file} gives some layers a lora_alpha of their own, such as {layer} (alpha_pattern); only one for all "
            "layers is supported. Multiply the lora_B of each by its own alpha divided by lora_alpha, and save the "
            "file without alpha_pattern"
        )
    if "lora_alpha" not in found:
        return 1.0
    return float(found["lora_alpha"] / (math.sqrt(found["r"]) if found.get("use_rslora") else found["r"]))


def read_network(network: Any, folder: Path) -> dict[str, Tensor]:
    """Weights of a network's folder, read with diffusers because files may be sharded."""
    with quiet_diffusers():
        saved, report = type(network).from_pretrained(
            folder, torch_dtype=network.dtype, local_files_only=True, output_loading_info=True
        )
    wrong = {key: sorted(map(str, value))[:4] for key, value in report.items() if value}
    if wrong:
        raise UserError(f"the weights in {folder} do not fit this model: {wrong}")
    return dict(saved.state_dict())


def copy_into(network: Any, state: dict[str, Tensor], folder: Path, *, adapter_only: bool) -> None:
    """Copy saved weights into a network bit for bit; raises UserError if they do not fit."""
    own = {key: value for key, value in network.state_dict().items() if not adapter_only or ".lora_" in key}
    different = sorted(set(state) ^ set(own))
    different += [key for key in own if key in state and own[key].shape != state[key].shape]
    if different:
        raise UserError(f"the weights in {folder} do not fit this model; they differ in {', '.join(different[:4])}")
    inexact = [key for key in own if own[key].dtype != state[key].dtype]
    if inexact:
        key = inexact[0]
        raise UserError(
            f"{key} in {folder} is {state[key].dtype}, but the model has {own[key].dtype}; change model.dtype to match"
        )
    check_finite(state, folder)
    with torch.no_grad():
        for key, value in state.items():
            own[key].copy_(value)
