"""The AWM loss for any samples trained by velocity matching: likelihoods, anchors, averages and metrics.

    L = mean max(-A r, -A clip(r)) + beta mean |v - v_ref|^2 + ema_coef mean |v - v_kl_ema|^2,
    r = exp(logp - logp_old),    logp = -(t / p) ((l + e)^p - e^p)      (`weighting: ghuber`, p = 1/4)

where l is the matching error of a noisy version. The first two terms belong to the objective (`awm` in the catalogue).

Source: Xue et al., AWM, arXiv 2509.25050; scxue/advantage_weighted_matching.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from diffusion.matching.losses import WEIGHTINGS, pseudo_log_likelihood
from diffusion.matching.velocity import VelocityMatching
from diffusion.models.ema import EMAWeights, kl_ema_decay
from diffusion.sampling.steps import VELOCITY_KLS
from diffusion.sampling.trajectories import mean_over_decisions
from mmrl.core.loss import Denominators, Metric, mean_metric, row_metric
from mmrl.core.objectives.objective import PolicyOutputs
from mmrl.core.rollouts import Rollouts
from mmrl.fields import bounded, choice, only_with, rare
from mmrl.training.objectives import ObjectiveConfig
from mmrl.training.recipe import LossTerm, Reference, Step, TermLoss


@dataclass
class AwmSettings:
    """Options of the matching loss."""

    weighting: str = choice("ghuber", lambda: WEIGHTINGS)
    """Conversion of errors to pseudo log-likelihoods: uniform, t, t2, huber or ghuber."""
    power: float = rare(only_with(bounded(0.25, above=0), weighting="ghuber"))
    """Exponent p of ghuber."""
    average: str = rare(choice("exp_first", lambda: AVERAGING))
    """exp_first: one ratio per time; sum_first: one ratio of their mean; bgpo: like exp_first, but linear if A >= 0."""
    kl_kind: str = rare(choice("uniform", lambda: VELOCITY_KLS))
    """Weight of the velocity distances to reference and EMA: uniform or elbo."""
    ema_coef: float = bounded(1.0, at_least=0)
    """Weight of the distance to `kl_ema`, the moving average of past policies; 0 = no such term."""
    ema_limit: float = rare(bounded(0.3, at_least=0, below=1))
    """Maximum weight of the old value in the moving average."""
    ema_slope: float = rare(bounded(0.001, at_least=0))
    """Growth of that weight per epoch up to the limit; a large value reaches it immediately."""
    off_policy: bool = rare(False)
    """Draw images with the moving average instead of the policy."""

    def validate(self) -> None:
        """Reject options of a moving average that is not used; raises ValueError."""
        # both options only shape the average, which either use below keeps alive
        for name in () if self.ema_coef or self.off_policy else ("ema_limit", "ema_slope"):
            if getattr(self, name) != getattr(AwmSettings, name):
                raise ValueError(
                    f"awm.{name} is {getattr(self, name):g}, but no moving average is used when awm.ema_coef is 0 "
                    "and awm.off_policy is false; leave it out"
                )


@dataclass(frozen=True, kw_only=True)
class AwmScores(PolicyOutputs):
    """Inputs of AWM's loss from one pass of the policy."""

    kl_ema: Tensor | None
    """(B, T), distance to the velocity of the moving average; None if not requested."""
    error: Tensor
    """(B, T), matching errors, without gradient."""
    velocity_norm: Metric | None
    """Norm of each velocity relative to the reference's."""


class AwmLoss(LossTerm):
    """The distance to the moving average of past policies, and the likelihoods that the objective reads."""

    name = "kl_ema"
    scaling = ""
    """Words of the formula about the model's errors."""

    def __init__(self, policy: nn.Module, settings: AwmSettings, process: VelocityMatching) -> None:
        self.policy = policy
        self.settings = settings
        self.process = process
        self.scaling = process.scaling
        # two readers: the loss term, and off-policy sampling
        needs_ema = settings.ema_coef > 0 or settings.off_policy
        self.kl_ema = EMAWeights(policy, enabled=needs_ema)
        # the distance costs a forward pass, so it is only asked for if it has a weight
        self.outputs = frozenset({"kl_ema"} if settings.ema_coef else ())

    @property
    def sampling_average(self) -> EMAWeights | None:
        """The moving average, if samples are drawn off-policy."""
        return self.kl_ema if self.settings.off_policy else None

    def scores(
        self, policy: nn.Module, rollouts: Rollouts, outputs: frozenset[str], reference: Reference | None
    ) -> AwmScores:
        """Pseudo log-likelihood of each noisy version, plus distances to the anchors if requested."""
        # mixed once: policy, moving average and reference have to be compared on the same noisy versions
        versions, kind = self.process.noisy(rollouts), self.settings.kl_kind
        with torch.no_grad():  # before the policy's own pass: its graph must not see its weights exchanged
            ema = None
            if "kl_ema" in outputs:
                # the bare policy, whose parameters the average replaces for this pass
                with self.kl_ema.applied():
                    ema = self.process.velocity(self.policy, rollouts, versions.rows)
            ref = self.process.reference_velocity(reference, rollouts, versions.rows)
        matching = self.process.evaluate(policy, rollouts, versions)
        # not a density: it only has to rank noisy versions, and the ratio of new to old is all that is used
        logp = pseudo_log_likelihood(matching.error, matching.noisy.sigma, self.settings.weighting, self.settings.power)
        return AwmScores(
            logp=matching.decisions.scatter(logp),
            kl_ref=None if ref is None else matching.distance(ref, kind),
            kl_ema=None if ema is None else matching.distance(ema, kind),
            error=matching.errors.detach(),
            velocity_norm=None if ref is None else _norm_ratio(matching.velocity, ref),
        )

    def __call__(
        self, policy: nn.Module, minibatch: Rollouts, scores: PolicyOutputs, counts: Denominators, step: Step
    ) -> TermLoss:
        """The distance to the moving average of past policies."""
        assert isinstance(scores, AwmScores)
        mask = minibatch.loss_mask
        metrics = {"awm/error": mean_metric(scores.error, mask)}
        if scores.velocity_norm is not None:
            metrics["awm/velocity_norm"] = scores.velocity_norm
        if scores.kl_ema is None:
            return TermLoss(metrics=metrics)
        term = self.settings.ema_coef * mean_over_decisions(scores.kl_ema, minibatch, counts)
        # the metric is the distance itself, without the coefficient
        metrics["policy/kl_ema"] = mean_metric(scores.kl_ema.detach(), mask)
        return TermLoss({"loss/kl_ema": term}, metrics)

    def formula(self) -> str:
        """The anchor term and the substitute for a log-likelihood."""
        settings = self.settings
        anchor = f"          + {settings.ema_coef:g} mean |v - v_kl_ema|^2; " if settings.ema_coef else "  "
        return f"{anchor}logp = {settings.weighting} of the matching error{self.scaling}"

    def on_step_end(self, step: Step) -> None:
        """Move the average of past policies."""
        # after the update: with a small decay, the next anchor is nearly the policy that draws its images
        self.kl_ema.update(kl_ema_decay(step.number, self.settings.ema_limit, self.settings.ema_slope))

    def state_dict(self) -> dict[str, Tensor] | None:
        """The average of past policies."""
        return self.kl_ema.state_dict()

    def load_state_dict(self, state: dict[str, Tensor] | None) -> None:
        """Restore `state_dict`."""
        self.kl_ema.load_state_dict(state)


def with_ratio(objective: ObjectiveConfig, settings: AwmSettings) -> ObjectiveConfig:
    """The objective with the ratio and clip rule of `settings.average`, unless the configuration sets them itself."""
    changes = AVERAGING[settings.average]
    # options of the user come last, so they win
    return dataclasses.replace(objective, **{key: value | getattr(objective, key) for key, value in changes.items()})


def _norm_ratio(velocity: Tensor, reference: Tensor) -> Metric:
    # how far the velocity has grown: rows with negative advantage push it away without bound
    size, base = (x.detach().float().flatten(1).norm(dim=1) for x in (velocity, reference))
    # a mean over noisy versions: one quotient of sums would differ between micro-batches and between processes
    return row_metric(size / base.clamp(min=1e-8))


AVERAGING: dict[str, dict[str, dict[str, str]]] = {
    "exp_first": {},
    "sum_first": {"ratio": {"kind": "sequence_full"}},
    "bgpo": {"clip": {"kind": "bgpo"}},
}
"""Changes to the objective for each kind of averaging."""
