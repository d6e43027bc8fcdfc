"""Losses of noisy versions that pull the policy away from an old one: each image alone, or against its group.

With the velocity v of the policy, v_old, v_ref, the target u and A an image's advantage, the losses of a row are

* two_sided (DiffusionNFT): `diffusion.matching.losses.nft_loss`
* group_preference (DGPO): w_g A l, where l = mean |v - u|^2 and w_g = sigmoid(beta mean_g A (l - l_ref)); constant
  where exp(l_old - l) has left 1 +- clip on the side to which A moves it
* centred_reward (CRD): (5 / beta) [beta (R - mean_g R) - (a - mean_g a)]^2, where R = |v_old - u|^2 / w_old -
  |v - u|^2 / w is the reward that the policy implies, w the mean absolute error, a constant, and a = A / 10 + 1/2

w_g and the means over the group are those of the policy that the update starts from, constants of the update: they need
a pass before it, and micro-batches may then cut groups.

Shapes: B images, T noisy versions of each, M of the B * T whose mask is 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from diffusion.matching.losses import NFT_ADVANTAGE_LIMIT, NFT_ERROR_FLOOR, NoisyRows, nft_loss, nft_weight
from diffusion.matching.velocity import Matching
from mmrl.core.blocks.advantage import group_sum
from mmrl.core.rollouts import Rollouts


class MatchingLoss(ABC):
    """Loss of noisy versions, given the velocity of an old policy."""

    compares: ClassVar[bool] = False
    """Whether it has constants of the group; see `gain` and `constant`."""

    def __init__(self, beta: float, clip: float, temperature: float | None) -> None:
        self.beta, self.clip, self.temperature = beta, clip, temperature

    @abstractmethod
    def rows(self, matching: Matching, old: Tensor, advantage: Tensor, constant: Tensor | None) -> Tensor:
        """Losses (M,) for the old velocity (M, ...), the advantages (M,) and the constants of their groups (M,)."""

    def gain(self, matching: Matching, old: Tensor, reference: Tensor) -> Tensor:
        """What `constant` needs of each row (M,), for velocities (M, ...) of the old policy and the reference."""
        raise NotImplementedError

    def constant(self, gain: Tensor, rollouts: Rollouts) -> Tensor:
        """Constants (B, T) of the update."""
        raise NotImplementedError

    @abstractmethod
    def formula(self) -> str:
        """The loss with its constants."""


class TwoSided(MatchingLoss):
    """DiffusionNFT, arXiv 2509.16117."""

    def rows(self, matching: Matching, old: Tensor, advantage: Tensor, constant: Tensor | None) -> Tensor:
        return nft_loss(matching.velocity, old, matching.noisy, matching.clean, nft_weight(advantage), self.beta)

    def formula(self) -> str:
        return f"mean (5 / {self.beta:g}) [r |x+ - x_0|^2 / w+ + (1 - r) |x- - x_0|^2 / w-]"


class GroupPreference(MatchingLoss):
    """DGPO, arXiv 2510.08425; X-GenGroup/Flow-Factory src/flow_factory/trainers/dgpo.py."""

    compares = True

    def rows(self, matching: Matching, old: Tensor, advantage: Tensor, constant: Tensor | None) -> Tensor:
        assert constant is not None
        error = matching.error
        ratio = (matching.noisy.matching_error(old) - error).detach().exp()
        outside = torch.where(advantage > 0, ratio > 1 + self.clip, ratio < 1 - self.clip)
        return constant * advantage * torch.where(outside, error.detach(), error)

    def gain(self, matching: Matching, old: Tensor, reference: Tensor) -> Tensor:
        return matching.error - matching.noisy.matching_error(reference)

    def constant(self, gain: Tensor, rollouts: Rollouts) -> Tensor:
        assert rollouts.advantage is not None
        return torch.sigmoid(self.beta * group_means(rollouts.advantage * gain, rollouts))

    def formula(self) -> str:
        return f"mean w_g A l, w_g = sigmoid({self.beta:g} mean_g A (l - l_ref)), exp(l_old - l) in 1 +- {self.clip:g}"


class CentredReward(MatchingLoss):
    """CRD, arXiv 2603.14128; X-GenGroup/Flow-Factory src/flow_factory/trainers/crd.py, with the squared error.

    A temperature centres by the mean of two weighted means, of softmax(a / T) and of softmax(-a / T). That has the
    gradient of the code's loss, the mean of the squares around either.
    """

    compares = True

    def rows(self, matching: Matching, old: Tensor, advantage: Tensor, constant: Tensor | None) -> Tensor:
        assert constant is not None
        found = self.beta * implied_reward(matching, old) - nft_weight(advantage) - constant
        return NFT_ADVANTAGE_LIMIT / self.beta * found.square()

    def gain(self, matching: Matching, old: Tensor, reference: Tensor) -> Tensor:
        return implied_reward(matching, old)

    def constant(self, gain: Tensor, rollouts: Rollouts) -> Tensor:
        assert rollouts.advantage is not None
        wanted = nft_weight(rollouts.advantage)
        off = self.beta * gain - wanted
        if self.temperature is None:
            return group_means(off, rollouts)
        sides = [(sign * wanted / self.temperature).exp() for sign in (1, -1)]  # at most exp(1 / T)
        return torch.stack([group_means(off, rollouts, side) for side in sides]).mean(0)

    def formula(self) -> str:
        weighted = "" if self.temperature is None else f", means by softmax(+-a / {self.temperature:g})"
        return f"mean (5 / {self.beta:g}) [{self.beta:g} (R - mean_g R) - (a - mean_g a)]^2{weighted}"


def implied_reward(matching: Matching, old: Tensor) -> Tensor:
    """Reward (M,) float32 that the policy implies, computed in float64: how much nearer it is than the old velocity."""
    new = _scaled_error(matching.velocity, matching.noisy)
    return (_scaled_error(old, matching.noisy).detach() - new).float()


def group_means(x: Tensor, rollouts: Rollouts, weight: Tensor | None = None) -> Tensor:
    """Weighted mean (B, T) of x (B, T) over the trained rows of each row's group, at each place t; 0 without any."""
    share = rollouts.loss_mask if weight is None else rollouts.loss_mask * weight
    groups = rollouts.num_rows
    total = group_sum(torch.where(share > 0, share * x, 0.0), rollouts.group, groups)
    count = group_sum(share, rollouts.group, groups)
    return torch.where(count > 0, total / count, 0.0)[rollouts.group]


def _scaled_error(velocity: Tensor, noisy: NoisyRows) -> Tensor:
    """Squared error of velocities over their mean absolute error (M,) float64."""
    miss = (velocity.double() - noisy.target.double()).flatten(1)
    return miss.square().mean(1) / miss.detach().abs().mean(1).clamp(min=NFT_ERROR_FLOOR)


MATCHING_LOSSES: dict[str, type[MatchingLoss]] = {
    "two_sided": TwoSided,
    "group_preference": GroupPreference,
    "centred_reward": CentredReward,
}
