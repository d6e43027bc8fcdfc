"""Value-Augmented Sampling (Han et al., arXiv 2405.06639; public code idanshen/Value-Augmented-Sampling).

The policy stays as it is. A critic learns from its answers what they will earn from each token on, and decoding adds
beta times the critic's value after each of the `top_k` likeliest next tokens, less the mean of these values, to their
log-probabilities. Evaluations answer with and without it (`guided` and `sampled`, from the same random numbers).

The critic is a head on the policy's own last state, `model.critic`, fitted to the TD(lambda) returns of generalised
advantage estimation: gamma 1, lambda 0.95.

Differences from the public code: the critic is a head on the policy's own states, where the code trains a second,
smaller model; a token that ends the answer has the value of the state before it, because no return is known behind it;
answers are sampled in every step, where the code reads a data set of them; no critics of several rewards are added up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.core.loss import Denominators
from mmrl.core.objectives.objective import LossOutput
from mmrl.core.payload import to_device
from mmrl.core.rollouts import Rollouts
from mmrl.errors import UserError
from mmrl.fields import bounded
from mmrl.training.evaluation import Measure, Row, Trial
from mmrl.training.objectives import ObjectiveConfig
from mmrl.training.recipe import Step
from mmrl.vlm.data.prompt import Prompt
from mmrl.vlm.data.task import VlmTask
from mmrl.vlm.engine.prefix import CacheDecoder
from mmrl.vlm.engine.vlm_policy import VlmPolicy
from mmrl.vlm.engine.vlm_sampler import SamplerConfig, Samples, sample_by
from mmrl.vlm.model.model_config import CriticSettings, ModelConfig
from mmrl.vlm.vlm_config import VlmConfig
from mmrl.vlm.vlm_evaluation import AnswerMeasure
from mmrl.vlm.vlm_recipe import VlmRecipe

VALUES = frozenset({"values"})


@dataclass
class GuidanceConfig:
    """Decoding with values; the defaults are those of the public code."""

    beta: float = bounded(3.0, at_least=0)
    """Weight with which a value is added to a log-probability."""
    top_k: int = bounded(20, at_least=1)
    """Number of most likely tokens whose values are computed; the others keep their log-probabilities."""


def critic_on_states() -> ModelConfig:
    """A head with one hidden layer, whose gradient stops at the policy's states."""
    return ModelConfig(critic=CriticSettings(hidden=[1024], stop_gradient=True))


def returns_objective() -> ObjectiveConfig:
    """Generalised advantage estimation; its returns are what the critic is fitted to."""
    value = {"coef": 1.0, "clip": None}
    return ObjectiveConfig(preset="ppo", clip={"kind": "policy_gradient"}, kl={"kind": "none"}, value=value)


@dataclass
class ValueGuidedConfig(VlmConfig):
    """A run that trains a critic for a frozen policy."""

    model: ModelConfig = field(default_factory=critic_on_states)
    """Model, critic, precision."""
    guidance: GuidanceConfig = field(default_factory=GuidanceConfig)
    """Decoding with values, in evaluations."""
    objective: ObjectiveConfig = field(default_factory=returns_objective)
    """Objective whose critic is trained; its policy loss is not used."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        super().validate()
        if not self.model.critic.stop_gradient:
            raise UserError("value_guided does not train the policy; set model.critic.stop_gradient: true")


class ValueGuidedRecipe(VlmRecipe):
    """Trains the critic of a policy, and measures how much it improves decoding."""

    config: ValueGuidedConfig
    own_loss = "value_guided"
    critic_only = True

    def loss(self, policy: nn.Module, minibatch: Rollouts, denominators: Denominators, step: Step) -> LossOutput:
        """Squared error of the critic."""
        return self.objective.critic_loss(self.scores(policy, minibatch, VALUES), minibatch, denominators)

    def measures(self, policy: VlmPolicy, split: str, step: Step) -> list[Measure[VlmTask]]:
        """Greedy, sampled and guided accuracy."""
        _, *others = super().measures(policy, split, step)
        plain = vars(self.answers(policy, split, step))
        return [GuidedMeasure(**plain, guidance=self.config.guidance), *others]

    def describe(self) -> str:
        """The objective of the critic, and how it guides sampling."""
        guidance = self.config.guidance
        return (
            f"value_guided: fit V to the TD(lambda) returns of {self.objective.advantage.formula()}\n"
            f"  sampling: log pi(y) + {guidance.beta:g} (V(y) - mean V) over the {guidance.top_k} likeliest tokens"
        )


@dataclass
class GuidedMeasure(AnswerMeasure):
    """Adds responses sampled with values to the greedy and the sampled ones."""

    guidance: GuidanceConfig

    def run(self, batch: Sequence[Trial[VlmTask]], start: int) -> list[Row]:
        """Answer questions in all modes."""
        rows = super().run(batch, start)
        if rows:
            count = self._guided
            prompts = [self.policy.encode(row["task"]) for row in rows for _ in range(count)]
            draws = self.draws(rows, count, "evaluate")
            self._score(rows, sample_guided(self.policy, self.guidance, prompts, self.sampling, draws), "guided", count)
        return rows

    @property
    def _guided(self) -> int:
        return max(self.evaluation.samples, 1)

    def _modes(self) -> list[tuple[str, int]]:
        return [*super()._modes(), ("guided", self._guided)]


def augment(logp: Tensor, top: Tensor, values: Tensor, beta: float) -> Tensor:
    """Add values to the scores of some tokens, (b, V).

    Args:
        logp: (b, V) log-probabilities or logits.
        top: (b, k) int64, the tokens.
        values: (b, k) value after each of them.
        beta: weight.

    Source: idanshen/Value-Augmented-Sampling vas_trainer.py, VASLogitsProcessor.
    """
    # the mean over the k tokens is subtracted, or these would gain on all other tokens
    return logp.scatter_add(1, top, (beta * (values - values.mean(-1, keepdim=True))).to(logp.dtype))


class GuidedDecoder(CacheDecoder):
    """Decodes with the values of the next tokens."""

    def __init__(self, policy: Any, part: Any, guidance: GuidanceConfig) -> None:
        super().__init__(policy, policy.reader, part)
        self._guidance = guidance
        self._ends = to_device(torch.tensor(policy.eos_ids), policy.device)

    def next_logp(self, states: Tensor, temperature: float) -> Tensor:
        """Log-probabilities (b, V) of the next token."""
        # values are added before the temperature divides the sum, as in the code's logits processor
        logp = super().next_logp(states, 1.0)
        top = logp.topk(min(self._guidance.top_k, logp.shape[1]), -1).indices
        rows = torch.arange(len(top), device=top.device).repeat_interleave(top.shape[1])
        # reading a token changes the cache, so each of the k tokens gets a copy of its row
        ahead = CacheDecoder(self._policy, self._reader, self._part.select(rows)).advance(top.flatten())
        values, now = self._values(ahead).view_as(top), self._values(states)[:, None]
        ends = torch.isin(top, self._ends)
        # nothing follows an end token, and the critic was never fitted behind one
        values = torch.where(ends, now, values)
        return (augment(logp, top, values, self._guidance.beta) / temperature).log_softmax(-1)

    def _values(self, states: Tensor) -> Tensor:
        return self._policy.value_head(states.float())[:, 0]


def sample_guided(
    policy: VlmPolicy, guidance: GuidanceConfig, prompts: Sequence[Prompt], config: SamplerConfig, uniforms: Tensor
) -> Samples:
    """Draw one response to each prompt with the values of the policy's critic.

    Args:
        policy: a policy with a value head.
        guidance: weight and number of the values.
        prompts: N prompts.
        config: lengths, temperature and truncation.
        uniforms: (N, max_new_tokens) in [0, 1).
    """

    def decoder_of(own: Any) -> tuple[Any, Any]:
        return GuidedDecoder(policy, own, guidance), own.last_state

    return sample_by(policy, prompts, config, uniforms, decoder_of)
