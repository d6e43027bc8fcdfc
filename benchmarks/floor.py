"""Lower bounds of a step's work and memory: operations and bytes counted from the sizes of a model.

A multiplication with its addition is 2 operations. Only matrix products are counted, so that elementwise work,
which shared prompts save as well, makes the ratios estimates rather than bounds in the strict sense.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Dimensions:
    """Sizes of a vision-language model."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    vision_layers: int
    vision_hidden: int
    vision_intermediate: int
    vision_gated: bool
    """Whether the tower's feed-forward layers have three matrices or two."""
    vision_full_layers: int
    """Tower layers that attend over the whole image; the others attend over `window_patches`."""
    window_patches: int
    patch_values: int
    """Numbers in one patch of pixels."""
    mergers: int
    """Maps from the tower to the decoder: one, and one more for each deepstack level."""
    merge: int = 2
    """Patches on a side that become one token."""

    @property
    def layer_weights(self) -> int:
        """Weights of the matrices in one decoder layer."""
        attention = self.hidden * (2 * self.heads + 2 * self.kv_heads) * self.head_dim
        return attention + 3 * self.hidden * self.intermediate


def dimensions_of(config: Any) -> Dimensions:
    """Read the sizes from a transformers configuration of Qwen2.5-VL or Qwen3-VL."""
    text, vision = config.text_config, config.vision_config
    full = getattr(vision, "fullatt_block_indexes", None)
    patch = int(vision.patch_size)
    side = 112 // patch
    return Dimensions(
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        heads=text.num_attention_heads,
        kv_heads=text.num_key_value_heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        intermediate=text.intermediate_size,
        vocabulary=text.vocab_size,
        vision_layers=vision.depth,
        vision_hidden=vision.hidden_size,
        vision_intermediate=vision.intermediate_size,
        vision_gated=full is not None,
        vision_full_layers=vision.depth if full is None else len(full),
        window_patches=side * side,
        patch_values=3 * vision.temporal_patch_size * patch * patch,
        mergers=1 + len(getattr(vision, "deepstack_visual_indexes", None) or ()),
        merge=vision.spatial_merge_size,
    )


def vision_flops(size: Dimensions, image_tokens: int) -> float:
    """Operations of the tower's forward pass over one image."""
    unit = size.merge**2
    patches = unit * image_tokens
    width = size.vision_hidden
    matrices = 4 * width * width + (3 if size.vision_gated else 2) * width * size.vision_intermediate
    linear = 2.0 * patches * (size.vision_layers * matrices + size.patch_values * width)
    windowed = size.vision_layers - size.vision_full_layers
    seen = size.vision_full_layers * patches + windowed * min(size.window_patches, patches)
    merged = unit * width
    mergers = 2.0 * image_tokens * size.mergers * (merged * merged + merged * size.hidden)
    return linear + 4.0 * width * patches * seen + mergers


def forward_flops(
    size: Dimensions, prompt: int, completions: Sequence[int], image_tokens: int, *, shared: bool, images: int = 1
) -> dict[str, float]:
    """Operations of one forward pass over a group, log-probs of its completions included."""
    rows = len(completions)
    suffix = sum(completions)
    tokens = (1 if shared else rows) * prompt + suffix
    if shared:
        pairs = _causal(prompt) + sum(length * prompt + _causal(length) for length in completions)
    else:
        pairs = sum(_causal(prompt + length) for length in completions)
    parts = {
        "vision": (1 if shared else rows) * images * vision_flops(size, image_tokens // images),
        "linear": 2.0 * size.layers * size.layer_weights * tokens,
        "attention": 4.0 * size.layers * size.heads * size.head_dim * pairs,
        "head": 2.0 * size.hidden * size.vocabulary * suffix,
    }
    return parts | {"total": sum(parts.values())}


def decode_flops(size: Dimensions, prompt: int, completions: Sequence[int]) -> float:
    """Operations of drawing completions token by token from a prompt that has been read."""
    read = sum(max(length - 1, 0) for length in completions)
    pairs = sum((length - 1) * prompt + _causal(length - 1) for length in completions if length > 1)
    linear = 2.0 * size.layers * size.layer_weights * read
    attention = 4.0 * size.layers * size.heads * size.head_dim * pairs
    return linear + attention + 2.0 * size.hidden * size.vocabulary * sum(completions)


def decode_bytes(size: Dimensions, prompt: int, completions: Sequence[int], width: int = 4) -> float:
    """Bytes that drawing completions together must read: all weights at every step, each cached key and value."""
    steps = max(completions, default=1) - 1
    head = size.hidden * size.vocabulary
    weights = steps * size.layers * size.layer_weights + (steps + 1) * head
    cached = 2 * size.layers * size.kv_heads * size.head_dim
    own = sum(_causal(length - 1) for length in completions if length > 1)
    return float(width) * (weights + cached * (steps * prompt + own))


def activation_bytes(
    size: Dimensions, prompt: int, completions: Sequence[int], image_tokens: int, *, shared: bool, width: int = 4
) -> float:
    """Bytes that a backward pass needs of its forward pass: inputs of matrices, norms, gates and attention."""
    copies = 1 if shared else len(completions)
    tokens = copies * prompt + sum(completions)
    heads = (2 * size.heads + 2 * size.kv_heads) * size.head_dim
    decoder = size.layers * (4 * size.hidden + heads + 4 * size.intermediate)
    feed_forward = (4 if size.vision_gated else 2) * size.vision_intermediate
    tower = size.vision_layers * (8 * size.vision_hidden + feed_forward)
    return float(width) * (tokens * decoder + copies * size.merge**2 * image_tokens * tower)


def matmul_rates(options: Mapping[str, Any]) -> dict[str, Any]:
    """Arm that measures what the machine does with matrices of the model's sizes.

    Returns:
        counts: tall_flops and flat_flops, operations a second, and read_bytes, bytes a second.
    """
    import torch

    from benchmarks.measure import repeat

    device = options["device"]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    hidden, intermediate = options["hidden"], options["intermediate"]
    weight = torch.randn(hidden, intermediate, device=device, dtype=dtype)
    inputs = {key: torch.randn(options[key], hidden, device=device, dtype=dtype) for key in ("tall", "flat")}
    calls = {
        key: max(1, int(options["operations"] / (2.0 * rows.numel() * intermediate))) for key, rows in inputs.items()
    }

    much = torch.ones(options["read"] // dtype.itemsize, device=device, dtype=dtype)

    def once(watch: Any) -> None:
        for key, rows in inputs.items():
            with watch.stage(key):
                for _ in range(calls[key]):
                    rows @ weight
        with watch.stage("read"):
            much.sum()

    seconds = repeat(once, options["repetitions"], device)["wall_s" if device == "cuda" else "cpu_s"]
    done = {key: 2.0 * rows.numel() * intermediate * calls[key] for key, rows in inputs.items()}
    rates = {f"{key}_flops": done[key] / seconds[key] for key in inputs}
    return {"counts": rates | {"read_bytes": options["read"] / seconds["read"]}}


def _causal(length: int) -> int:
    """Pairs of a token and itself or one before it."""
    return length * (length + 1) // 2
