"""One pass of the vision tower over the images and videos of many prompts."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmrl.vlm.payload import Prompt, leaves
from mmrl.vlm.weights_state import weights_state


class _PatchProduct(nn.Conv3d):
    """A convolution whose kernel covers its input: one matrix product, which convolution kernels are slow at."""

    def forward(self, patches: Tensor) -> Tensor:
        if patches.shape[2:] != self.kernel_size:
            return super().forward(patches)
        product = functional.linear(patches.flatten(1), self.weight.flatten(1), self.bias)
        return product[..., None, None, None]


def multiply_patches(tower: Any) -> None:
    """Have a vision tower compute its patch embedding as a matrix product; weights and their names stay."""
    if type(tower.patch_embed.proj) is nn.Conv3d:
        tower.patch_embed.proj.__class__ = _PatchProduct


@dataclass
class VisionFeatures:
    """Features in the order of the prompt's placeholder tokens."""

    tokens: Tensor
    """(n, H), what replaces the placeholder embeddings."""
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
    """Features of the vision tower, kept as long as its weights and the prompts they belong to."""

    def __init__(self) -> None:
        self._features: weakref.WeakKeyDictionary[Prompt, VisionFeatures] = weakref.WeakKeyDictionary()
        self._weights: tuple[int, ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> FeatureCache:
        """A copied policy starts with an empty cache: its tower may be trained or moved on its own."""
        return FeatureCache()

    def __len__(self) -> int:
        return len(self._features)

    def clear(self) -> None:
        """Forget everything."""
        self._features.clear()

    def gather(self, model: Any, prompts: Sequence[Prompt]) -> VisionFeatures | None:
        """Features of all prompts; only those not seen before pass the tower."""
        self._drop_outdated(model)
        absent = [prompt for prompt in prompts if prompt.has_vision and prompt not in self._features]
        missing = list(dict.fromkeys(absent))
        if missing:
            with torch.no_grad():
                features = encode_vision(model, missing)
            assert features is not None
            counts = [int((prompt.mm_token_type_ids > 0).sum()) for prompt in missing]
            start = 0
            for prompt, count in zip(missing, counts, strict=True):
                index = torch.arange(start, start + count, device=features.tokens.device)
                self._features[prompt] = features.select(index)
                start += count
        parts = [self._features[prompt] for prompt in prompts if prompt.has_vision]
        return VisionFeatures.concat(parts) if parts else None

    def _drop_outdated(self, model: Any) -> None:
        """Forget everything once a weight of the tower was written (a reload, a moving average)."""
        weights = weights_state(model.visual.parameters())
        if weights != self._weights:
            self._features.clear()
            self._weights = weights


def gather_features(model: Any, prompts: Sequence[Prompt], cache: FeatureCache) -> VisionFeatures | None:
    """Features of all prompts, through the cache where no gradient flows into the tower."""
    prompts = [leaf for prompt in prompts for leaf in leaves(prompt)]
    trained = any(parameter.requires_grad for parameter in model.visual.parameters())
    if not (trained and torch.is_grad_enabled()):
        return cache.gather(model, prompts)
    cache.clear()
    return encode_vision(model, prompts)


def encode_vision(model: Any, prompts: Sequence[Prompt]) -> VisionFeatures | None:
    """Run the vision tower once over all images and once over all videos of some prompts.

    Gradient: flows into the tower; rows that share a prompt add up there.
    """
    device = model.visual.patch_embed.proj.weight.device
    images = [(p.pixel_values, p.image_grid_thw) for p in prompts if p.pixel_values is not None]
    videos = [(p.pixel_values_videos, p.video_grid_thw) for p in prompts if p.pixel_values_videos is not None]
    parts = [
        _run_tower(tower, media, device)
        for tower, media in ((model.get_image_features, images), (model.get_video_features, videos))
        if media
    ]
    if not parts:
        return None
    features = VisionFeatures.concat(parts)
    return features.select(_token_order(prompts).to(device)) if len(parts) == 2 else features


def _run_tower(tower: Any, media: Sequence[tuple[Any, Any]], device: torch.device) -> VisionFeatures:
    pixels = torch.cat([pixels for pixels, _ in media]).to(device)
    grids = torch.cat([grid for _, grid in media]).to(device)
    output = tower(pixels, grids, return_dict=True)
    deepstack = getattr(output, "deepstack_features", None) or ()
    return VisionFeatures(torch.cat(output.pooler_output), tuple(torch.cat(tuple(level)) for level in deepstack))


def _token_order(prompts: Sequence[Prompt]) -> Tensor:
    """Where the feature of each placeholder token lies when all images come before all videos."""
    types = torch.cat([prompt.mm_token_type_ids for prompt in prompts])
    types = types[types > 0]
    order = torch.empty_like(types)
    images = int((types == 1).sum())
    order[types == 1] = torch.arange(images)
    order[types == 2] = torch.arange(images, len(types))
    return order
