"""One pass of the vision tower over the images and videos of many prompts."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmrl.core.transfer import sum_of_bits, to_device
from mmrl.vlm.data.prompt import Prompt, leaves


def weights_state(parameters: Iterable[nn.Parameter]) -> tuple[int, ...]:
    """One number per trainable weight, plus one for all, that change whenever a weight changes.

    A parameter's `_version` counts writes, but not those of a fused optimiser. So weights that an optimiser may move
    are read: the sum of their bits, eight bytes at a time, which is exact, needs no order of summation and takes as
    long as reading them once (about 0.3 ms for a million float32 on one core of a desktop's CPU).
    """
    weights = list(parameters)
    trained = [weight for weight in weights if weight.requires_grad or weight.grad is not None]
    versions = sum(weight._version for weight in weights)
    if not trained:
        return (versions,)
    sums = torch.stack([sum_of_bits(weight.detach()).to(trained[0].device) for weight in trained])
    return (versions, *sums.tolist())


class _PatchProduct(nn.Conv3d):
    """A convolution whose kernel covers its whole input, computed as one (faster) matrix product."""

    def forward(self, patches: Tensor) -> Tensor:
        if patches.shape[2:] != self.kernel_size:
            return super().forward(patches)
        product = functional.linear(patches.flatten(1), self.weight.flatten(1), self.bias)
        return product[..., None, None, None]


def multiply_patches(tower: Any) -> None:
    """Compute the patch embedding of a vision tower as a matrix product; weights and names are unchanged."""
    if type(tower.patch_embed.proj) is nn.Conv3d:
        tower.patch_embed.proj.__class__ = _PatchProduct


@dataclass
class VisionFeatures:
    """Features in the order of the prompt's placeholder tokens."""

    tokens: Tensor
    """(n, H), replacements of the placeholder embeddings."""
    deepstack: tuple[Tensor, ...] = ()
    """(n, H) each, added to the hidden states after the first decoder layers (Qwen3-VL)."""

    def select(self, index: Tensor) -> VisionFeatures:
        """Rows `index` (m,) of all features."""
        return VisionFeatures(self.tokens[index], tuple(feature[index] for feature in self.deepstack))

    @staticmethod
    def concat(parts: Sequence[VisionFeatures]) -> VisionFeatures:
        """Features of all parts, one after another."""
        if len(parts) == 1:
            return parts[0]
        levels = zip(*(part.deepstack for part in parts), strict=True)
        return VisionFeatures(torch.cat([part.tokens for part in parts]), tuple(torch.cat(level) for level in levels))


class FeatureCache:
    """Cache of vision tower features, valid as long as the weights and the prompts exist unchanged."""

    def __init__(self) -> None:
        self._features: weakref.WeakKeyDictionary[Prompt, Any] = weakref.WeakKeyDictionary()
        self._weights: tuple[int, ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> FeatureCache:
        """A copied policy starts with an empty cache: its tower may be trained or moved on its own."""
        return FeatureCache()

    def __len__(self) -> int:
        return len(self._features)

    def clear(self) -> None:
        """Forget everything."""
        self._features.clear()

    def gather(
        self, weights: tuple[int, ...], prompts: Sequence[Prompt], encode: Callable[[Sequence[Prompt]], Sequence[Any]]
    ) -> list[Any]:
        """Features of each prompt that contains media; only those not seen before are encoded.

        `weights` changes with the weights of the tower: by a reload, or a moving average.
        """
        if weights != self._weights:
            self._features.clear()
            self._weights = weights
        missing = list(dict.fromkeys(p for p in prompts if p.media and p not in self._features))
        if missing:
            with torch.no_grad():
                self._features.update(zip(missing, encode(missing), strict=True))
        return [self._features[prompt] for prompt in prompts if prompt.media]


def tower_state(modules: Iterable[nn.Module], parameters: Iterable[nn.Parameter]) -> tuple[int, ...]:
    """`weights_state` of a tower, and whether its adapters are switched off for a while."""
    switches = (getattr(module, "disable_adapters", None) for module in modules)  # a method of whole models
    return (*weights_state(parameters), *(switch for switch in switches if isinstance(switch, bool)))


def gather_features(model: Any, prompts: Sequence[Prompt], cache: FeatureCache) -> VisionFeatures | None:
    """Features of all prompts, cached if no gradient flows into the tower."""
    prompts = [leaf for prompt in prompts for leaf in leaves(prompt)]
    if any(parameter.requires_grad for parameter in model.visual.parameters()) and torch.is_grad_enabled():
        cache.clear()
        return encode_vision(model, prompts)

    def encode(missing: Sequence[Prompt]) -> list[VisionFeatures]:
        features = encode_vision(model, missing)
        assert features is not None
        counts = [int((prompt.mm_token_type_ids > 0).sum()) for prompt in missing]
        rows = torch.arange(sum(counts), device=features.tokens.device).split(counts)
        return [features.select(index) for index in rows]

    parts = cache.gather(tower_state(model.visual.modules(), model.visual.parameters()), prompts, encode)
    return VisionFeatures.concat(parts) if parts else None


def encode_vision(model: Any, prompts: Sequence[Prompt]) -> VisionFeatures | None:
    """Run the vision tower once over all images and once over all videos of some prompts.

    Gradient: flows into the tower; rows that share a prompt add up there.
    """
    device = model.visual.patch_embed.proj.weight.device
    images, videos = (
        [(p.media[pixels], p.media[grids]) for p in prompts if pixels in p.media]
        for pixels, grids in (("pixel_values", "image_grid_thw"), ("pixel_values_videos", "video_grid_thw"))
    )
    parts = [
        _run_tower(model.visual, tower, media, device)
        for tower, media in ((model.get_image_features, images), (model.get_video_features, videos))
        if media
    ]
    if len(parts) < 2:
        return parts[0] if parts else None
    # features of all images come before those of all videos; placeholder tokens come in the order of the prompts
    types = torch.cat([prompt.mm_token_type_ids for prompt in prompts])
    is_video = types[types > 0] == 2
    order = torch.empty_like(is_video, dtype=torch.int64)
    order[~is_video] = torch.arange(int((~is_video).sum()))
    order[is_video] = torch.arange(int((~is_video).sum()), len(order))
    return VisionFeatures.concat(parts).select(order.to(device))


def _run_tower(visual: Any, tower: Any, media: Sequence[tuple[Any, Any]], device: torch.device) -> VisionFeatures:
    pixels = to_device(torch.cat([pixels for pixels, _ in media]), device)
    grids = torch.cat([grid for _, grid in media])
    output = tower(pixels, grids, return_dict=True, **({} if device.type == "cpu" else _layout(visual, grids, device)))
    deepstack = getattr(output, "deepstack_features", None) or ()
    return VisionFeatures(torch.cat(output.pooler_output), tuple(torch.cat(tuple(level)) for level in deepstack))


def _layout(visual: Any, grids: Tensor, device: torch.device) -> dict[str, Any]:
    """Arguments that the tower would otherwise derive from image sizes (n, 3) on the GPU, stalling every layer.

    Positions and indices go to the device. Boundaries of images and windows stay on the host, where layers split their
    input; only flash attention reads them on the device.
    """
    helpers, merge = vars(sys.modules[type(visual).__module__]), visual.spatial_merge_size
    own = {"spatial_merge_size": merge}
    boundaries, _ = helpers["get_vision_attention_seqlens"](grids, visual.config)
    found = {"position_ids": helpers["get_vision_position_ids"](grids, merge)}
    ends = {"cu_seqlens": boundaries}
    if "get_vision_window_index" in helpers:
        sizes = {"window_size": visual.window_size, "patch_size": visual.patch_size}
        found["window_index"], ends["cu_window_seqlens"] = helpers["get_vision_window_index"](grids, **own, **sizes)
    if "get_vision_interpolation_indices_and_weights" in helpers:
        interpolate = helpers["get_vision_interpolation_indices_and_weights"]
        options = {"mode": visual.interpolation_mode, "align_corners": visual.interpolation_align_corners}
        found["interp_indices"], found["interp_weights"] = interpolate(
            grids, visual.num_grid_per_side, **options, **own
        )
    if "flash" in (visual.config._attn_implementation or ""):
        found |= ends
        ends = {}
    return {name: to_device(value, device) for name, value in found.items()} | ends
