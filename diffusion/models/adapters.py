"""Adapter files for other programs, in the formats of diffusers, peft and kohya-ss (also read by ComfyUI)."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffusion.families.base import KohyaNames
from diffusion.models.diffusion_policy import DiffusionPolicy
from diffusion.models.saved import LORA_FILE, adapter_of, save_adapter
from mmrl.errors import UserError
from mmrl.hub.building import sort_header
from mmrl.hub.cards import hub_id_of

PEFT_FILE = "adapter_model.safetensors"


def save_formatted(policy: DiffusionPolicy, folder: Path, form: str) -> None:
    """Write the adapters of a policy in one of `FORMATS`; a second network gets a subfolder with its name.

    Raises:
        UserError: the policy has no adapter, or no program reads adapters of its family in this format.
    """
    if not policy.has_adapter:
        raise UserError("--lora-format is for adapters, but this run trained whole weights; leave it out")
    for name, network in policy.trained.items():
        place = folder if name == policy.family.networks[0] else folder / name
        place.mkdir(parents=True, exist_ok=True)
        FORMATS[form](policy, network, name, place)


def read_by_diffusers(policy: DiffusionPolicy, form: str) -> bool:
    """Whether diffusers or peft can read the files written by `save_formatted`."""
    return form != "kohya" or (policy.family.kohya is not None and policy.family.kohya.by_diffusers)


def loading_lines(policy: DiffusionPolicy, form: str, options: str = "") -> list[str]:
    """Python code that loads the adapters in `folder` into the pipeline they were trained for."""
    own = hub_id_of(policy.base_path) or Path(policy.base_path).name
    lines = [f'pipeline = DiffusionPipeline.from_pretrained("{own}"{options})  # the one the adapter was trained for']
    if form == "peft":
        lines.insert(0, "from peft import PeftModel")
    if not read_by_diffusers(policy, form):
        return [*lines, "# diffusers does not read these files; ComfyUI does, in its folder models/loras"]
    for name in policy.trained:
        place = "folder" if name == policy.family.networks[0] else f'f"{{folder}}/{name}"'
        second = "" if name == policy.family.networks[0] else f", load_into_{name}=True"
        if form == "peft":
            lines.append(f"pipeline.{name} = PeftModel.from_pretrained(pipeline.{name}, {place})")
        elif hasattr(policy.pipeline, "load_lora_weights"):
            lines.append(f"pipeline.load_lora_weights({place}{second})")
        else:
            lines.append(f'pipeline.{name}.load_lora_adapter({place}, prefix=None, weight_name="{LORA_FILE}")')
    return lines


def _save_diffusers(policy: DiffusionPolicy, network: Any, name: str, folder: Path) -> None:
    save_adapter(network, name, policy.pipeline, folder)


def _save_peft(policy: DiffusionPolicy, network: Any, name: str, folder: Path) -> None:
    """Write peft's files; alpha is in adapter_config.json."""
    from peft import LoraConfig
    from safetensors.torch import save_file

    weights, settings = adapter_of(network)
    config = LoraConfig(**{key: settings[key] for key in ("r", "lora_alpha", "lora_dropout", "target_modules")})
    config.target_modules = settings["target_modules"]  # a list: a set has another order in each process
    config.inference_mode = True
    config.save_pretrained(str(folder))
    layers = {f"base_model.model.{key}": weight for key, weight in weights.items()}
    save_file(layers, folder / PEFT_FILE, metadata={"format": "pt"})


def _save_kohya(policy: DiffusionPolicy, network: Any, name: str, folder: Path) -> None:
    """Write kohya-ss's file; each layer has its alpha as a tensor."""
    from safetensors.torch import save_file

    names = policy.family.kohya
    if names is None:
        raise UserError(
            f"no program reads {policy.family.pipeline_class} adapters in kohya-ss format; use --lora-format "
            "diffusers or peft"
        )
    weights, settings = adapter_of(network)
    layers = kohya_layers(weights, settings["lora_alpha"] / settings["r"], names, network)
    about = {
        "ss_network_module": "networks.lora",
        "ss_network_dim": settings["r"],
        "ss_network_alpha": settings["lora_alpha"],
    }
    save_file(layers, folder / LORA_FILE, metadata={"format": "pt"} | {key: str(value) for key, value in about.items()})
    sort_header(folder / LORA_FILE)


def kohya_layers(weights: dict[str, Tensor], scale: float, names: KohyaNames, network: Any) -> dict[str, Tensor]:
    """Rename an adapter from peft's layout to that of kohya-ss: `lora_down`, `lora_up` and `alpha` per layer.

    Layers that are fused in the original network are fused here: their down halves are stacked and their up halves form
    a block-diagonal matrix.
    """
    stems = [key.removesuffix(".lora_A.weight") for key in weights if key.endswith(".lora_A.weight")]
    found, done = {}, set()
    for stem in stems:
        if stem in done:
            continue
        parts = _fused_with(stem, names)
        done.update(parts)
        pairs = [(weights.get(f"{part}.lora_A.weight"), weights.get(f"{part}.lora_B.weight")) for part in parts]
        # The fused layer has the sum of the ranks. Block-diagonal up halves keep each part's output to its own rows, so
        # the product equals the separate adapters; a part without an adapter contributes rows of zeros.
        down = torch.cat([first for first, _ in pairs if first is not None])
        widths = [network.get_submodule(part).out_features for part in parts]
        up = torch.block_diag(
            *(torch.zeros(width, 0) if half is None else half for (_, half), width in zip(pairs, widths, strict=True))
        )
        name = _kohya_name(parts[0], names)
        found[f"{name}.lora_down.weight"] = down
        found[f"{name}.lora_up.weight"] = up.to(down.dtype).contiguous()
        # readers scale by alpha / rank, and the rank of a fused layer is larger than the adapter's
        found[f"{name}.alpha"] = torch.tensor(scale * len(down), dtype=down.dtype)
    return found


def _fused_with(stem: str, names: KohyaNames) -> list[str]:
    """Names of the layers fused with a layer, including itself, in order."""
    for group in names.fused:
        for end in group:
            if f".{stem}".endswith(f".{end}"):
                return [stem.removesuffix(end) + other for other in group]
    return [stem]


def _kohya_name(stem: str, names: KohyaNames) -> str:
    name = stem
    for pattern, new in names.renamed:
        name = re.sub(pattern, new, name)
    if names.renamed and name == stem:
        raise UserError(f"the layer {stem} has no name in kohya-ss format; use --lora-format diffusers or peft")
    return names.prefix + (name if names.dotted else name.replace(".", "_"))


FORMATS: dict[str, Callable[[DiffusionPolicy, Any, str, Path], None]] = {
    "diffusers": _save_diffusers,
    "peft": _save_peft,
    "kohya": _save_kohya,
}
"""Writers of adapter files by format name."""
