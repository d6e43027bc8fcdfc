"""HAPO's adaptive temperature: higher for uncertain tokens, lower for certain ones (arXiv 2509.16591).

A token is drawn at temperature T (1 + tau h), where T is `sampler.temperature` and h in [-1, 1] is the level of the
entropy of its distribution, on the scale of clip `hapo` in the step before. The first step samples at T.

Recorded and recomputed old log-probabilities are those of the policy at T, as in starriver030515/HAPO: the ratio of the
update does not correct for the drawn distribution. Evaluations sample at their own temperature.

Differences from vllm/v1/sample/sampler.py there: it takes the entropy at temperature 1, here at T, as the scale does;
its release never hands the scale to the sampler (an unknown keyword), and with the released sign of h (`clip.sign`
repo) certain tokens are drawn hotter, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mmrl.contrib.rows.adaptive import EntropyScale, HapoClip
from mmrl.core.rollouts import Rollouts
from mmrl.errors import UserError
from mmrl.fields import bounded
from mmrl.training.objectives import ObjectiveConfig, make_objective
from mmrl.training.processes import Streams
from mmrl.training.recipe import Step
from mmrl.vlm.data.prompt import Prompt
from mmrl.vlm.data.task import VlmTask
from mmrl.vlm.engine.prefix import KeepPrefill
from mmrl.vlm.engine.vlm_policy import VlmPolicy
from mmrl.vlm.engine.vlm_sampler import GenerationState, PolicySampler, SamplerConfig, Samples, fill
from mmrl.vlm.vlm_config import VlmConfig
from mmrl.vlm.vlm_recipe import VlmRecipe


@dataclass
class AdaptiveSettings:
    """Temperature of a token by the entropy of its distribution."""

    tau: float = bounded(0.05, at_least=0, at_most=0.5)
    """Maximum relative change of the temperature (0.05 in the public scripts; lower it if training collapses)."""


@dataclass
class AdaptiveTemperatureConfig(VlmConfig):
    """A HAPO run with all four of its components."""

    adaptive: AdaptiveSettings = field(default_factory=AdaptiveSettings)
    """Temperature of a token."""
    objective: ObjectiveConfig = field(default_factory=lambda: ObjectiveConfig(preset="hapo"))
    """Objective to optimise; it needs clip hapo, whose entropy scale the sampler uses."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        super().validate()
        clip = make_objective(self.objective).clip
        if not isinstance(clip, HapoClip):
            raise ValueError(
                f"objective.clip is '{clip.kind}', but the temperature follows the entropies that clip hapo compares; "
                "use objective.clip.kind=hapo, or recipe: vlm"
            )


def tempered(logp: Tensor, clip: HapoClip, scale: Tensor | None, tau: float) -> Tensor:
    """Log-probabilities (b, V) at the adapted temperature.

    Args:
        logp: (b, V) nats, at the sampling temperature.
        clip: The rule that makes levels of entropies.
        scale: (4,) of `HapoClip.scale_of`; None leaves the temperature.
        tau: Largest relative change of the temperature.

    Source: starriver030515/HAPO vllm/v1/sample/sampler.py compute_entropy_based_temperature.
    """
    if scale is None or tau == 0:
        return logp
    # entr is 0 where a banned token has probability 0
    entropy = torch.special.entr(logp.exp()).sum(-1)
    # entropies beyond those of the last step do not widen the range
    level = clip.level_by(scale.to(logp), entropy).clamp(-1.0, 1.0)
    return (logp / (1.0 + tau * level)[:, None]).log_softmax(-1)


class AdaptiveState(GenerationState):
    """Draws each token at its own temperature."""

    def __init__(self, sampler: AdaptiveSampler, policy: VlmPolicy, total: int, uniforms: Tensor) -> None:
        super().__init__(policy, sampler.config, total, uniforms)
        self._sampler = sampler

    def drawn_from(self, logp: Tensor) -> Tensor:
        """See `tempered`."""
        return tempered(logp, self._sampler.clip, self._sampler.scale, self._sampler.tau)


class AdaptiveSampler(PolicySampler):
    """Samples from the policy at temperatures that follow the entropy of each token; see `tempered`."""

    def __init__(self, config: SamplerConfig, keep: KeepPrefill, clip: HapoClip, tau: float) -> None:
        super().__init__(config, keep)
        self.clip = clip
        self.tau = tau
        self.scale: Tensor | None = None

    def sample(self, tasks: Sequence[Prompt], n: int, streams: Streams) -> Samples:
        """Draw n responses to each prompt."""
        assert self._policy is not None
        draws = streams.uniform(len(tasks), n, self.config.max_new_tokens)
        return fill(AdaptiveState(self, self._policy, len(tasks) * n, draws), tasks, n, self.keep)


class AdaptiveTemperatureRecipe(VlmRecipe):
    """HAPO with the temperature of each token adapted to its entropy."""

    config: AdaptiveTemperatureConfig
    sampler: AdaptiveSampler

    def __init__(self, config: AdaptiveTemperatureConfig) -> None:
        super().__init__(config)
        if self.samples_elsewhere:
            # super() may have started an engine
            self.close()
            raise UserError(
                "sampler.engine must be own, because adapted temperatures are only sampled by the policy itself"
            )

    def own_sampler(self) -> AdaptiveSampler:
        """The sampler that draws from the policy itself."""
        assert isinstance(self.objective.clip, HapoClip)
        settings = self.config
        return AdaptiveSampler(settings.sampler, self._keep_prefill(), self.objective.clip, settings.adaptive.tau)

    @property
    def scale(self) -> EntropyScale:
        """The scale of entropies of the last step."""
        return self.objective_state.blocks["clip"]

    def rollout(self, policy: VlmPolicy, tasks: Sequence[VlmTask], streams: Streams, step: Step) -> Rollouts:
        """Sample by the scale of the last step."""
        self.sampler.scale = self.scale.numbers
        return super().rollout(policy, tasks, streams, step)

    def rollout_state(self, tasks: Sequence[VlmTask]) -> list[float] | None:
        """The scale."""
        return self.scale.state_dict()

    def load_rollout_state(self, state: list[float] | None) -> None:
        """Restore `rollout_state`."""
        self.scale.load_state_dict(state)

    def describe(self) -> str:
        """The objective's formula and the temperature."""
        config = self.config
        return (
            f"{super().describe()}\nwhere a token is drawn at temperature {config.sampler.temperature:g} (1 + "
            f"{config.adaptive.tau:g} h), h by the entropies of the step before"
        )
