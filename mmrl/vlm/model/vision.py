"""One pass of the vision tower over the images and videos of many prompts."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmrl.core.transfer import sum_of_bits
from mmrl.vlm.data.prompt import Prompt


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
