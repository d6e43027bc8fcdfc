"""The velocity of a flow model under classifier-free guidance.

Shapes: B rows (images), C channels, H x W latent pixels; latents of videos are (B, C, T, H, W).
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from diffusion.families.base import Combine, Family, Text, VelocityModel, linear_guidance
from diffusion.models.conditioning import TextRows
from mmrl.errors import UserError


class GuidedVelocity:
    """Velocity of fixed text rows under guidance, negative + scale (positive - negative).

    The text rows are laid out at the first step and reused at every later one. Scale 1 only needs the positive half and
    scale 0 only the negative half; the other half is not computed then.

    Args:
        model: the flow model.
        text: positive text of B rows.
        negative: negative text of the same B rows, or a single row shared by all; not needed with scale 1.
        scale: guidance scale w; 1 = no guidance.
        together: whether both halves go through the model in one call of 2 B rows or in two calls of B rows.
        detach_negative: exclude the negative half from the gradient. If gradients are enabled, it then gets a separate
            call without a graph, which saves its backward pass.
        combine: custom formula of the family instead of the linear one.

    Raises:
        UserError: the scale is not finite, or guidance lacks a negative prompt for some row.

    Source: Ho and Salimans, Classifier-Free Diffusion Guidance (arXiv 2207.12598), eq. 6 with scale = 1 + their w.
    """

    def __init__(
        self,
        model: VelocityModel,
        text: TextRows,
        negative: TextRows | None = None,
        scale: float = 1.0,
        *,
        together: bool = True,
        detach_negative: bool = False,
        combine: Combine = linear_guidance,
    ) -> None:
        if not math.isfinite(scale):
            raise UserError(f"guidance scale is {scale}; must be finite")
        self.model = model
        self.scale = scale
        self.together = together
        self.detach_negative = detach_negative
        self.combine = combine
        # scale 0 drops the positive half only in the linear formula; a family's own may need it at any scale
        self._positive = None if scale == 0.0 and combine is linear_guidance else text
        # at scale 1 the negative half cancels in the linear formula, and families define 1 as no guidance
        self._negative = None if scale == 1.0 else _negative_rows(negative, text, scale)

    @property
    def halves(self) -> int:
        """Model rows that one image costs at each step: 1 or 2."""
        return (self._positive is not None) + (self._negative is not None)

    def __call__(self, latents: Tensor, sigma: Tensor) -> Tensor:
        """Evaluate the guided velocity.

        Args:
            latents: x_t (B, C, H, W).
            sigma: time of each row (B,), or () for all rows.

        Returns:
            Velocity (B, C, H, W) in the model's dtype.

        Gradient: through both halves, or with `detach_negative` through the positive one only.
        """
        sigma = sigma.expand(len(latents))  # samplers pass one time for all rows, updates one per row
        if self._negative is None:
            return self.model(latents, sigma, self._positive_text)
        if self._positive is None:
            return self.model(latents, sigma, self._negative_text)
        # without gradients there is nothing to detach, and one call of 2 B rows is faster
        apart = not self.together or (self.detach_negative and torch.is_grad_enabled())
        if apart:
            with torch.set_grad_enabled(torch.is_grad_enabled() and not self.detach_negative):
                negative = self.model(latents, sigma, self._negative_text)
            positive = self.model(latents, sigma, self._positive_text)
        else:
            both = self.model(torch.cat([latents, latents]), torch.cat([sigma, sigma]), self._both_texts)
            # the order of `_both_texts`: negative rows first
            negative, positive = both.chunk(2)
        return self.combine(positive, negative, self.scale, sigma)

    # laid out at first use, so a half that is never evaluated costs no memory
    @cached_property
    def _positive_text(self) -> Text:
        assert self._positive is not None
        return self._positive.expanded()

    @cached_property
    def _negative_text(self) -> Text:
        assert self._negative is not None
        return self._negative.expanded()

    @cached_property
    def _both_texts(self) -> Text:
        assert self._negative is not None
        assert self._positive is not None
        # padded to one length by `followed_by`, as both halves share a call
        return self._negative.followed_by(self._positive).expanded()


def guided(
    policy: Any, velocity_of: Any, text: TextRows, scale: float, negative: str, **options: Any
) -> GuidedVelocity:
    """Velocity of rows under classifier-free guidance, using the policy's embeddings of the negative prompt."""
    # without guidance the negative prompt is never read, so it is not embedded either
    other = None if scale == 1.0 else policy.embeddings.negative(negative)
    linear = type(policy.family).combine is Family.combine
    combine = linear_guidance if linear else policy.family.combine
    return GuidedVelocity(velocity_of, text, other, scale, combine=combine, **options)


def _negative_rows(negative: TextRows | None, text: TextRows, scale: float) -> TextRows:
    if negative is None:
        raise UserError(f"guidance scale {scale} needs a negative prompt, which may be empty; scale 1 needs none")
    if len(negative) == 1:
        # one prompt is shared by all rows, but each row keeps its image to be edited
        return negative.for_rows_of(text)
    if len(negative) != len(text):
        raise UserError(f"there are {len(negative)} negative text rows for {len(text)} rows; must be 1 or {len(text)}")
    return negative
