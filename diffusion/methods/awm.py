"""AWM, Advantage Weighted Matching (Xue et al., arXiv 2509.25050; public code scxue/advantage_weighted_matching).

The pretraining loss as a policy gradient: the matching error l = mean |v - (noise - x_0)|^2 of each image at T times
replaces the log-likelihood and is weighted by the group advantage of the image,

    L = mean max(-A r, -A clip(r)) + beta mean |v - v_ref|^2 + ema_coef mean |v - v_kl_ema|^2,
    r = exp(logp - logp_old),    logp = -(t / p) ((l + e)^p - e^p)      (`weighting: ghuber`, p = 1/4).

Images can come from any solver, without guidance; A = clip(group advantage over the epoch's standard deviation, +-5) /
5. With one update per epoch, the default in all published runs, r is 1 and the gradient is A times that of logp.

Differences from the public code: the two anchors are independent (there, the second requires the first); times are
shared by the images of a prompt rather than of a micro-batch, so micro-batches do not affect the result
(`timesteps.share_times`); `bgpo` is an addition that is linear in the draws if the advantage is positive (arXiv
2510.11683). Defaults follow the GenEval preset of config/dgx_awm.py after 2026-03-27, except for the epoch size.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from torch import nn

from diffusion.diffusion_config import DiffusionConfig, MatchingParts
from diffusion.diffusion_recipe import DiffusionRecipe
from diffusion.matching.awm_loss import AwmLoss, AwmSettings, with_ratio
from diffusion.matching.velocity import FlowMatching
from diffusion.models.ema import EMAWeights
from mmrl.core.objectives.objective import PolicyOutputs
from mmrl.core.rollouts import Rollouts
from mmrl.training.objectives import ObjectiveConfig


@dataclass
class AwmConfig(MatchingParts, DiffusionConfig):  # type: ignore[misc]  # the trainer is a narrower one
    """An AWM run."""

    awm: AwmSettings = field(default_factory=AwmSettings)
    """The matching loss."""
    objective: ObjectiveConfig = field(default_factory=lambda: ObjectiveConfig(preset="awm"))
    """Advantage, clipping and the weight of the distance to the reference."""


class AwmRecipe(DiffusionRecipe):
    """Advantage weighted matching; see the module docstring."""

    config: AwmConfig
    process: FlowMatching

    def __init__(self, config: AwmConfig) -> None:
        super().__init__(dataclasses.replace(config, objective=with_ratio(config.objective, config.awm)))
        self.process = FlowMatching(self.policy, config.sampler, config.timesteps)
        self.awm = AwmLoss(self.policy, config.awm, self.process)
        self.terms = [self.awm]

    @property
    def sampling_average(self) -> EMAWeights | None:
        """The moving average, if sampling is off-policy."""
        return self.awm.sampling_average

    def scores(self, policy: nn.Module, rollouts: Rollouts, outputs: frozenset[str]) -> PolicyOutputs:
        """Pseudo log-likelihood of each noisy version, plus distances to the anchors for "kl_ref" and "kl_ema"."""
        reference = self.loss_reference if "kl_ref" in outputs else None
        return self.awm.scores(policy, rollouts, outputs, reference)
