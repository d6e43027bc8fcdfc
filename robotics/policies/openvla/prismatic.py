"""The model of OpenVLA folders: one or two vision transformers, a projector and Llama, with their weight names.

Shapes: B rows, H x W pixels, N patches, L positions, P prompt tokens, T action tokens, C hidden units, V ids.

A row is <s>, the patches of one or several images, further embeddings such as that of the robot's state, the rest of
the prompt, T empty embeddings and </s>. Llama attends in both directions, as in OpenVLA-OFT's fork of transformers. The
last prompt token and the first T - 1 empty ones predict the T tokens in parallel.

Source: OpenVLA, arXiv 2406.09246; OpenVLA-OFT, arXiv 2502.19645; moojink/openvla-oft
    prismatic/extern/hf/modeling_prismatic.py; moojink/transformers-openvla-oft modeling_llama.py (attention);
    PRIME-RL/SimpleVLA-RL verl/utils/vla_utils/openvla_oft/modeling_prismatic.py (rows of several lengths).
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from mmrl.errors import UserError
from mmrl.files import read_json_object
from mmrl.hub.compat import ensure_torchvision

STOP_ID = 2
"""Llama 2's </s>, which ended every row of the training data."""
EXPECTED = ("timm_model_ids", "image_sizes", "use_fused_vision_backbone", "text_config", "pad_to_multiple_of")
FUSED = 2
"""Number of backbones whose features OpenVLA concatenates."""


class Prismatic(nn.Module):
    """Vision backbones, projector and language model, from the entries of the folder's config.json."""

    def __init__(self, entries: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        from transformers import LlamaConfig

        text = dict(entries["text_config"])
        if text.get("model_type", "llama") != "llama":
            raise UserError(
                f"the language model is of type {text['model_type']!r}; supported: llama; docs/adding.md explains "
                "how to add another kind of policy"
            )
        config = LlamaConfig(**text)
        self.vision_backbone = _Vision(entries)
        self.projector = _Projector(self.vision_backbone.width, config.hidden_size, self.vision_backbone.count)
        self.language_model = _empty_llama(config)
        self.to(dtype=dtype)
        self.hidden_size = int(config.hidden_size)
        """C."""
        self.vocabulary = int(config.vocab_size) - int(entries["pad_to_multiple_of"])
        """V without the rows that pad the embedding table; the last of these ids are the actions."""

    def logits(self, pixels: Tensor, prompts: Sequence[Tensor], tokens: int, bins: int, causal: bool = False) -> Tensor:
        """Logits (B, T, bins) float32 of the last `bins` ids of the vocabulary; other arguments as for `hidden`."""
        found = self.hidden(pixels, prompts, tokens, causal)
        # only the ids of actions: the rest of the vocabulary is never read
        head = self.language_model.lm_head.weight[self.vocabulary - bins : self.vocabulary]
        return functional.linear(found, head).float()

    def hidden(
        self,
        pixels: Tensor,
        prompts: Sequence[Tensor],
        tokens: int,
        causal: bool = False,
        after_patches: Tensor | None = None,
    ) -> Tensor:
        """Normalised states (B, T, C) of the last layer at the positions that predict the T `tokens` of a chunk.

        `pixels` are (B, 3 n m, H, W): m images, preprocessed for each of the n backbones, stacked by channel. `prompts`
        are B texts (P,) int64 starting with <s>, `after_patches` (B, n, C) embeddings that follow the patches.
        """
        device, patches = pixels.device, self.projector(self.vision_backbone(pixels))
        if after_patches is not None:
            patches = torch.cat([patches, after_patches.to(patches)], 1)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        # placeholders for the action tokens, any id: their embeddings are zeroed below
        rows = [torch.cat([prompt, prompt.new_ones(tokens), prompt.new_tensor([STOP_ID])]) for prompt in prompts]
        ids = pad_sequence(rows, batch_first=True).to(device)
        position = torch.arange(ids.shape[1], device=device)
        is_action = (position >= lengths[:, None]) & (position < lengths[:, None] + tokens)
        embeddings = self.language_model.get_input_embeddings()(ids).masked_fill(is_action[..., None], 0)
        # the patches follow <s>, so every later position shifts by their number
        whole = torch.cat([embeddings[:, :1], patches.to(embeddings), embeddings[:, 1:]], 1)
        ends = lengths + patches.shape[1] + tokens + 1
        mask = _mask(ends, whole.shape[1], causal, whole.dtype)
        positions = torch.arange(whole.shape[1], device=device).expand(len(whole), -1)
        states: Tensor = self.language_model.model(
            inputs_embeds=whole, attention_mask=mask, position_ids=positions, use_cache=False
        ).last_hidden_state
        first = lengths + patches.shape[1] - 1  # the last prompt token, which predicts the first action token
        return states[torch.arange(len(states), device=device)[:, None], first[:, None] + position[:tokens]]


class _Vision(nn.Module):
    """Concatenated patch features of one or two vision transformers, from the second to last block."""

    def __init__(self, entries: Mapping[str, Any]) -> None:
        super().__init__()
        names, sizes = entries["timm_model_ids"], entries["image_sizes"]
        activations = entries.get("timm_override_act_layers") or [None] * len(names)
        self.count = 2 if entries["use_fused_vision_backbone"] else 1
        self.featurizer = _featurizer(names[0], sizes[0], activations[0])
        parts = [self.featurizer]
        if self.count == FUSED:
            self.fused_featurizer = _featurizer(names[1], sizes[1], activations[1])
            parts.append(self.fused_featurizer)
        self.width = sum(int(part.embed_dim) for part in parts)

    def forward(self, pixels: Tensor) -> Tensor:
        """(B, 3 n m, H, W) -> (B, m N, width), the patches of m images in sequence."""
        backbones = [self.featurizer, self.fused_featurizer] if self.count == FUSED else [self.featurizer]
        images = []
        # channels are stacked by image, then by backbone
        for image in pixels.split(3 * self.count, 1):
            pairs = zip(backbones, image.split(3, 1), strict=True)
            images.append(torch.cat([_patches(backbone, channels) for backbone, channels in pairs], -1))
        return torch.cat(images, 1)


class _Projector(nn.Module):
    """Two linear layers, or three for fused backbones, with GELU in between."""

    def __init__(self, vision: int, hidden: int, backbones: int) -> None:
        super().__init__()
        wide = hidden if backbones == 1 else 4 * vision
        self.fc1 = nn.Linear(vision, wide)
        self.fc2 = nn.Linear(wide, hidden)
        self.fc3 = nn.Linear(hidden, hidden) if backbones > 1 else None

    def forward(self, patches: Tensor) -> Tensor:
        """(B, N, vision) -> (B, N, C)."""
        found: Tensor = self.fc2(functional.gelu(self.fc1(patches)))
        return found if self.fc3 is None else self.fc3(functional.gelu(found))


def load_prismatic(folder: Path, dtype: torch.dtype = torch.float32) -> Prismatic:
    """Load the model of an OpenVLA folder without running the folder's Python files."""
    from safetensors.torch import load_file

    entries = read_json_object(folder / "config.json")
    missing = [name for name in EXPECTED if name not in entries]
    if missing:
        raise UserError(f"{folder}/config.json does not belong to an OpenVLA model: it has no {', '.join(missing)}")
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{folder} has no *.safetensors file")
    model = Prismatic(entries, dtype)
    weights: dict[str, Tensor] = {}
    for file in files:
        # rotary frequencies are computed, and files of older transformers have them as weights
        weights |= {_inner(name): value.to(dtype) for name, value in load_file(file).items() if "inv_freq" not in name}
    try:
        # `assign` keeps the tensors as read, without a second copy of seven billion weights
        found = model.load_state_dict(weights, strict=False, assign=True)
    except RuntimeError as error:  # other shapes
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"the weights in {folder} belong to a different model: {reason}") from error
    if found.missing_keys or found.unexpected_keys:
        lacking, unknown = ", ".join(found.missing_keys[:3]), ", ".join(found.unexpected_keys[:3])
        raise UserError(
            f"the weights in {folder} belong to a different model: missing {lacking or 'none'}; unknown "
            f"{unknown or 'none'}"
        )
    return model.eval()


def save_prismatic(model: Prismatic, source: Path, folder: Path, without: Collection[str] = ()) -> None:
    """Write a folder that OpenVLA's code can load: weights under its names, all other files copied from `source`."""
    from huggingface_hub import save_torch_state_dict

    folder.mkdir(parents=True, exist_ok=True)
    if source.resolve() != folder.resolve():
        for file in source.iterdir():
            if file.is_file() and ".safetensors" not in file.name and file.name not in without:
                shutil.copy2(file, folder / file.name)
    weights = {_outer(name): value.detach().contiguous() for name, value in model.state_dict().items()}
    save_torch_state_dict(weights, str(folder))


def _featurizer(name: str, size: int, activation: str | None) -> Any:
    ensure_torchvision()
    try:
        import timm
    except ImportError as error:
        raise UserError("OpenVLA's vision backbones need timm: pip install 'timm>=1.0'") from error
    made: Any = timm.create_model(name, pretrained=False, num_classes=0, img_size=size, act_layer=activation)
    for part in ("norm", "attn_pool", "fc_norm", "head"):  # after the block that is read: they get no gradient
        for weight in getattr(made, part).parameters() if isinstance(getattr(made, part, None), nn.Module) else ():
            weight.requires_grad_(False)
    # not read either: features come from the second to last block
    made.blocks[-1].requires_grad_(False)
    return made


def _patches(part: Any, pixels: Tensor) -> Tensor:
    found: list[Tensor] = part.forward_intermediates(
        pixels, indices=[len(part.blocks) - 2], norm=False, stop_early=True, output_fmt="NLC", intermediates_only=True
    )
    return found[0]


def _empty_llama(config: Any) -> Any:
    """Llama without weights, which are loaded later: initialising 7 billion parameters would take minutes."""
    from transformers import LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    with torch.device("meta"):
        made = LlamaForCausalLM(config)
    # its frequencies are no weights, so they would stay on the meta device
    made.model.rotary_emb = LlamaRotaryEmbedding(config)
    return made


def _mask(ends: Tensor, width: int, causal: bool, dtype: torch.dtype) -> Tensor:
    """Attention mask (B, 1, L, L): 0 for allowed positions, the lowest number for all others."""
    position = torch.arange(width, device=ends.device)
    allowed = (position < ends[:, None])[:, None, None].expand(-1, 1, width, -1)
    if causal:
        allowed = allowed & (position <= position[:, None])
    # the lowest finite number and not -inf: a fully masked row would be NaN
    return torch.zeros(allowed.shape, dtype=dtype, device=ends.device).masked_fill(~allowed, torch.finfo(dtype).min)


def _inner(name: str) -> str:
    """Name of a weight in timm; the files use a different name for LayerScale's."""
    return name.replace(".scale_factor", ".gamma") if name.startswith("vision_backbone") else name


def _outer(name: str) -> str:
    return name[: -len("gamma")] + "scale_factor" if name.endswith((".ls1.gamma", ".ls2.gamma")) else name
