"""AWM, Advantage Weighted Matching (Xue et al., arXiv 2509.25050; public code scxue/advantage_weighted_matching).

The pretraining loss as policy gradient: each image's matching error l = mean |v - (noise - x_0)|^2 at T times takes the
place of a log-likelihood, weighted by the image's group advantage,

    L = mean max(-A r, -A clip(r)) + beta mean |v - v_ref|^2 + ema_coef mean |v - v_kl_ema|^2,
    r = exp(logp - logp_old),    logp = -(t / p) ((l + e)^p - e^p)      (`weighting: ghuber`, p = 1/4).

Images come from any solver, without guidance; A = clip(group advantage over the epoch's standard deviation, +-5) / 5.
With one update an epoch, the default as in all published runs, r is 1 and the gradient is A times that of logp.

Differences from the public code: the two anchors are independent of each other (there the second needs the first);
times are shared by the images of a prompt rather than of a micro-batch, so that micro-batches change nothing
(`timesteps.share_times`); `bgpo` is added, linear in the draws where the advantage is positive (arXiv 2510.11683).
Defaults are those of the GenEval preset of config/dgx_awm.py after 2026-03-27, except the sizes of an epoch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from diffusion.decisions import mean_over_decisions
from diffusion.ema import EMAWeights, kl_ema_decay
from diffusion.flow_matching import (
    FlowMatching,
    Matching,
    TimestepConfig,
    check_matching,
    matching_sampler,
    matching_trainer,
)
from diffusion.forward_process import NoisyRows
from diffusion.matching import VELOCITY_KLS, WEIGHTINGS, pseudo_log_likelihood
from diffusion.policy import DiffusionPolicy
from diffusion.recipe import DiffusionRecipe
from diffusion.sampler import SamplerConfig
from diffusion.settings import DiffusionConfig
from mmrl.core.aggregation import Denominators
from mmrl.core.metrics import Metric, mean_metric
from mmrl.core.objective import PolicyOutputs
from mmrl.core.rollouts import Rollouts
from mmrl.fields import bounded, choice
from mmrl.training.loop.loss_terms import LossTerms
from mmrl.training.loop.objectives import ObjectiveConfig
from mmrl.training.loop.settings import TrainerConfig

__all__ = ["AwmConfig", "AwmRecipe", "AwmSettings"]


@dataclass
class AwmSettings:
    """Options of the matching loss."""

    weighting: str = choice("ghuber", lambda: WEIGHTINGS)
    """Error to pseudo log-likelihood: uniform, t, t2, huber or ghuber."""
    power: float = bounded(0.25, above=0)
    """Exponent p of ghuber."""
    average: str = choice("exp_first", lambda: AVERAGING)
    """exp_first: a ratio for each time; sum_first: one of their mean; bgpo: exp_first, but linear where A >= 0."""
    kl_kind: str = choice("uniform", lambda: VELOCITY_KLS)
    """Weight of the velocity distances to reference and EMA: uniform or elbo."""
    ema_coef: float = bounded(1.0, at_least=0)
    """Weight of the distance to `kl_ema`, the moving average of past policies; 0 = no such term."""
    ema_limit: float = bounded(0.3, at_least=0, below=1)
    """Largest weight that the moving average gives to its old value."""
    ema_slope: float = bounded(0.001, at_least=0)
    """Growth of that weight an epoch until the limit; large = at once."""
    off_policy: bool = False
    """Draw images with the moving average instead of the policy."""


@dataclass
class AwmConfig(DiffusionConfig):
    """An AWM run."""

    awm: AwmSettings = field(default_factory=AwmSettings)
    """The matching loss."""
    timesteps: TimestepConfig = field(default_factory=TimestepConfig)
    """The noisy versions."""
    objective: ObjectiveConfig = field(default_factory=lambda: ObjectiveConfig(preset="awm"))
    """Advantage, clipping and the weight of the distance to the reference."""
    sampler: SamplerConfig = field(default_factory=matching_sampler)
    """How images are drawn."""
    trainer: TrainerConfig = field(default_factory=matching_trainer)
    """Batch sizes, optimiser and guards."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        super().validate()
        check_matching(self.trainer, self.sampler, self.timesteps)


@dataclass(frozen=True, kw_only=True)
class AwmScores(PolicyOutputs):
    """What AWM's loss takes from one pass of the policy."""

    kl_ema: Tensor | None
    """(B, T), distance to the velocity of the moving average; None where it was not asked for."""
    error: Tensor
    """(B, T), matching errors, without gradient."""
    velocity_norm: Metric | None
    """Size of the velocity over that of the reference."""


class AwmRecipe(DiffusionRecipe):
    """Advantage weighted matching; see the module."""

    config: AwmConfig
    process: FlowMatching
    has_loss_terms: ClassVar[bool] = True

    def __init__(self, config: AwmConfig) -> None:
        super().__init__(_with_ratio(config))
        self.process = FlowMatching(self.policy, config.sampler, config.timesteps)
        needs_ema = config.awm.ema_coef > 0 or config.awm.off_policy
        self.kl_ema = EMAWeights(self.policy) if needs_ema else None

    def sampling_weights(self, policy: DiffusionPolicy) -> AbstractContextManager[None]:
        """Those of the moving average off policy, else the policy's own."""
        average = self.kl_ema if self.config.awm.off_policy else None
        return nullcontext() if average is None else average.applied(policy)

    def scores(self, policy: nn.Module, rollouts: Rollouts, outputs: frozenset[str]) -> PolicyOutputs:
        """Pseudo log-likelihood of each noisy version; with "kl_ref" and "kl_ema" the distances to the anchors."""
        versions, kind = self.process.noisy(rollouts), self.config.awm.kl_kind
        with torch.no_grad():  # before the policy's own pass: its graph must not see other weights come and go
            ema = self._ema_velocity(rollouts, versions.rows) if "kl_ema" in outputs else None
            reference = self.loss_reference if "kl_ref" in outputs else None
            ref = self.process.reference_velocity(reference, rollouts, versions.rows)
        matching = self.process.evaluate(policy, rollouts, versions)
        return AwmScores(
            logp=self._logp(matching),
            kl_ref=None if ref is None else matching.distance(ref, kind),
            kl_ema=None if ema is None else matching.distance(ema, kind),
            error=matching.errors.detach(),
            velocity_norm=None if ref is None else _norm_ratio(matching.velocity, ref),
        )

    @property
    def loss_outputs(self) -> frozenset[str]:
        """Adds the distance to the moving average."""
        return super().loss_outputs | ({"kl_ema"} if self.config.awm.ema_coef else set())

    def loss_terms(
        self, policy: nn.Module, minibatch: Rollouts, scores: PolicyOutputs, denominators: Denominators
    ) -> LossTerms:
        """The distance to the moving average of past policies."""
        assert isinstance(scores, AwmScores)
        mask = minibatch.loss_mask
        metrics = {"awm/error": mean_metric(scores.error, mask)}
        if scores.velocity_norm is not None:
            metrics["awm/velocity_norm"] = scores.velocity_norm
        if scores.kl_ema is None:
            return LossTerms(metrics=metrics)
        term = self.config.awm.ema_coef * mean_over_decisions(scores.kl_ema, minibatch, denominators)
        metrics["policy/kl_ema"] = mean_metric(scores.kl_ema.detach(), mask)
        return LossTerms({"loss/kl_ema": term}, metrics)

    def describe(self) -> str:
        """Formula of the loss with its constants."""
        awm = self.config.awm
        anchor = f" + {awm.ema_coef:g} mean |v - v_kl_ema|^2" if awm.ema_coef else ""
        return f"{super().describe()}{anchor}; logp = {awm.weighting} of the matching error"

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        """Move the averages."""
        super().on_step_end(step, metrics)
        if self.kl_ema is not None:
            self.kl_ema.update(kl_ema_decay(step - 1, self.config.awm.ema_limit, self.config.awm.ema_slope))

    def state_dict(self) -> dict[str, Any]:
        """Counts and averages."""
        return super().state_dict() | {"kl_ema": None if self.kl_ema is None else self.kl_ema.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        super().load_state_dict(state)
        if self.kl_ema is not None and state["kl_ema"] is not None:
            self.kl_ema.load_state_dict(state["kl_ema"])

    def _logp(self, matching: Matching) -> Tensor:
        awm = self.config.awm
        logp = pseudo_log_likelihood(matching.error, matching.noisy.sigma, awm.weighting, awm.power)
        return matching.decisions.scatter(logp)

    def _ema_velocity(self, minibatch: Rollouts, noisy: NoisyRows) -> Tensor | None:
        if self.kl_ema is None:
            return None
        with self.kl_ema.applied():
            return self.process.velocity(self.policy, minibatch, noisy)


def _with_ratio(config: AwmConfig) -> AwmConfig:
    """The objective's ratio and clip rule as `awm.average` says, unless the configuration sets them itself."""
    changes = AVERAGING[config.awm.average]
    merged = {key: value | getattr(config.objective, key) for key, value in changes.items()}
    return dataclasses.replace(config, objective=dataclasses.replace(config.objective, **merged))


def _norm_ratio(velocity: Tensor, reference: Tensor) -> Metric:
    size, base = (x.detach().float().square().mean().sqrt() for x in (velocity, reference))
    return Metric(float(size / base.clamp(min=1e-8)), 1.0)


AVERAGING: dict[str, dict[str, dict[str, str]]] = {
    "exp_first": {},
    "sum_first": {"ratio": {"kind": "sequence_full"}},
    "bgpo": {"clip": {"kind": "bgpo"}},
}
"""What an averaging changes in the objective."""
