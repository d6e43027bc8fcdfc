"""Losses of noisy versions that move the policy away from an old one: each image alone, or compared with its group.

With the velocities v of the policy, v_old and v_ref, the target u and the advantage A of an image, the row losses are

* two_sided (DiffusionNFT): `diffusion.matching.losses.nft_loss`
* group_preference (DGPO): w_g A l, where l = mean |v - u|^2 and w_g = sigmoid(beta mean_g A (l - l_ref)); constant
  if exp(l_old - l) has left 1 +- clip on the side towards which A moves it
* centred_reward (CRD): (5 / beta) [beta (R - mean_g R) - (a - mean_g a)]^2, where R = |v_old - u|^2 / w_old -
  |v - u|^2 / w is the reward that the policy implies, w the mean absolute error, a constant, and a = A / 10 + 1/2; or
  the cross-entropy of the same two differences, -(5 / beta) [p log q + (1 - p) log (1 - q)], where p = sigmoid(a -
  mean_g a) and q = sigmoid(beta (R - mean_g R))

w_g and the group means are computed with the policy at the start of the update and then stay constant. This needs an
extra pass, but allows micro-batches to split groups.

Shapes: B images, T noisy versions of each, M of the B * T with mask 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from diffusion.matching.losses import NFT_ADVANTAGE_LIMIT, NFT_ERROR_FLOOR, NoisyRows, nft_loss, nft_weight
from diffusion.matching.velocity import Matching
from mmrl.core.blocks.advantage import group_sum
from mmrl.core.rollouts import Rollouts

DISTANCES = ("squared", "cross_entropy")
"""How CRD compares the implied reward with the given one."""


class MatchingLoss(ABC):
    """Loss of noisy versions, given the velocity of an old policy."""

    compares: ClassVar[bool] = False
    """Whether the loss has group constants; see `gain` and `constants`."""

    def __init__(
        self, beta: float, clip: float, temperature: float | None, *, distance: str = DISTANCES[0], moving: bool = False
    ) -> None:
        self.beta = beta
        self.clip = clip
        self.temperature = temperature
        self.distance = distance
        self.moving = moving

    @abstractmethod
    def rows(self, matching: Matching, old: Tensor, advantage: Tensor, constants: Sequence[Tensor]) -> Tensor:
        """Losses (M,) for the old velocity (M, ...), the advantages (M,) and the `constants` of their groups (M,)."""

    def gain(self, matching: Matching, old: Tensor, reference: Tensor) -> Tensor:
        """Values (M,) for `constants`, from velocities (M, ...) of the old policy and the reference."""
        raise NotImplementedError

    def constants(self, gain: Tensor, rollouts: Rollouts) -> list[Tensor]:
        """Constants of the update, each (B, T)."""
        raise NotImplementedError

    @abstractmethod
    def formula(self) -> str:
        """The loss with its constants."""


class TwoSided(MatchingLoss):
    """DiffusionNFT, arXiv 2509.16117."""

    def rows(self, matching: Matching, old: Tensor, advantage: Tensor, constants: Sequence[Tensor]) -> Tensor:
        return nft_loss(matching.velocity, old, matching.noisy, matching.clean, nft_weight(advantage), self.beta)

    def formula(self) -> str:
        return f"mean (5 / {self.beta:g}) [r |x+ - x_0|^2 / w+ + (1 - r) |x- - x_0|^2 / w-]"


class MatchingPreference(MatchingLoss):
    """DGPO, arXiv 2510.08425; X-GenGroup/Flow-Factory src/flow_factory/trainers/dgpo.py."""

    compares = True

    def rows(self, matching: Matching, old: Tensor, advantage: Tensor, constants: Sequence[Tensor]) -> Tensor:
        error = matching.error
        ratio = (matching.noisy.matching_error(old) - error).detach().exp()
        # clipped only on the side towards which the advantage moves the ratio, as in PPO
        outside = torch.where(advantage > 0, ratio > 1 + self.clip, ratio < 1 - self.clip)
        # detached, not dropped: the row keeps its value in the mean and only loses its gradient
        return constants[0] * advantage * torch.where(outside, error.detach(), error)

    def gain(self, matching: Matching, old: Tensor, reference: Tensor) -> Tensor:
        return matching.error - matching.noisy.matching_error(old if self.moving else reference)

    def constants(self, gain: Tensor, rollouts: Rollouts) -> list[Tensor]:
        assert rollouts.advantage is not None
        return [torch.sigmoid(self.beta * group_means(rollouts.advantage * gain, rollouts))]

    def formula(self) -> str:
        gain = "l - l_old" if self.moving else "l - l_ref"
        return f"mean w_g A l, w_g = sigmoid({self.beta:g} mean_g A ({gain})), exp(l_old - l) in 1 +- {self.clip:g}"


class CentredReward(MatchingLoss):
    """CRD, arXiv 2603.14128; X-GenGroup/Flow-Factory src/flow_factory/trainers/crd.py.

    With a temperature T the loss is the mean of two, centred by means with weights softmax(a / T) and softmax(-a / T).
    Squares are centred by the mean of the two means, which has the same gradient.
    """

    compares = True

    def rows(self, matching: Matching, old: Tensor, advantage: Tensor, constants: Sequence[Tensor]) -> Tensor:
        reward, wanted = self.beta * implied_reward(matching, old), nft_weight(advantage)
        if self.distance == "squared":
            return NFT_ADVANTAGE_LIMIT / self.beta * (reward - wanted - constants[0]).square()
        # `constants` has returned them in pairs: mean implied reward and mean given reward for each side
        found = [
            functional.binary_cross_entropy_with_logits(reward - own, torch.sigmoid(wanted - given), reduction="none")
            for own, given in zip(constants[::2], constants[1::2], strict=True)
        ]
        return NFT_ADVANTAGE_LIMIT / self.beta * torch.stack(found).mean(0)

    def gain(self, matching: Matching, old: Tensor, reference: Tensor) -> Tensor:
        return implied_reward(matching, old)

    def constants(self, gain: Tensor, rollouts: Rollouts) -> list[Tensor]:
        assert rollouts.advantage is not None
        wanted, sides = nft_weight(rollouts.advantage), list[Tensor | None]([None])
        if self.temperature is not None:
            sides = [(sign * wanted / self.temperature).exp() for sign in (1, -1)]  # at most exp(1 / T)
        if self.distance == "squared":
            # one difference is enough: the mean of a difference is the difference of the means
            off = self.beta * gain - wanted
            return [torch.stack([group_means(off, rollouts, side) for side in sides]).mean(0)]
        return [group_means(x, rollouts, side) for side in sides for x in (self.beta * gain, wanted)]

    def formula(self) -> str:
        weighted = "" if self.temperature is None else f", means by softmax(+-a / {self.temperature:g})"
        reward, wanted = f"{self.beta:g} (R - mean_g R)", "a - mean_g a"
        if self.distance == "squared":
            return f"mean (5 / {self.beta:g}) [{reward} - ({wanted})]^2{weighted}"
        return f"mean (5 / {self.beta:g}) cross-entropy of sigmoid({wanted}) and sigmoid({reward}){weighted}"


def reference_weight(advantage: Tensor, floor: float, coef: float) -> Tensor:
    """Weight of the distance to the start model: floor / coef at an advantage of -5, rising to 1 at 5 (CRD)."""
    least = floor / coef
    return least + nft_weight(advantage) * (1 - least)


def implied_reward(matching: Matching, old: Tensor) -> Tensor:
    """Reward (M,) float32 implied by the policy, computed in float64: how much closer it is than the old velocity."""
    new = _scaled_error(matching.velocity, matching.noisy)
    return (_scaled_error(old, matching.noisy).detach() - new).float()


def group_means(x: Tensor, rollouts: Rollouts, weight: Tensor | None = None) -> Tensor:
    """Weighted mean (B, T) of x (B, T) over the trained rows of each row's group, at each t; 0 if there are none."""
    share = rollouts.loss_mask if weight is None else rollouts.loss_mask * weight
    groups = rollouts.num_rows  # an upper bound, so that the host need not wait for the exact number
    total = group_sum(torch.where(share > 0, share * x, 0.0), rollouts.group, groups)
    count = group_sum(share, rollouts.group, groups)
    return torch.where(count > 0, total / count, 0.0)[rollouts.group]


def _scaled_error(velocity: Tensor, noisy: NoisyRows) -> Tensor:
    """Squared error of velocities divided by their mean absolute error (M,) float64."""
    miss = (velocity.double() - noisy.target.double()).flatten(1)
    return miss.square().mean(1) / miss.detach().abs().mean(1).clamp(min=NFT_ERROR_FLOOR)


MATCHING_LOSSES: dict[str, type[MatchingLoss]] = {
    "two_sided": TwoSided,
    "group_preference": MatchingPreference,
    "centred_reward": CentredReward,
}
