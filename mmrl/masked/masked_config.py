"""Options of runs with a masked-diffusion language model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from mmrl.core.objectives.objective import Objective
from mmrl.errors import ConfigError
from mmrl.fields import Unless, bounded, choice, only_with, rare
from mmrl.masked.entries import SCORES
from mmrl.masked.masked_sampler import MaskedSampling
from mmrl.rewards import RewardConfig
from mmrl.training.objectives import make_objective
from mmrl.vlm.methods.sft import SftConfig
from mmrl.vlm.model.model_config import ModelConfig
from mmrl.vlm.vlm_config import VlmConfig, VlmEvaluationConfig

KINDS = ("auto", "one_step", "elbo")


@dataclass
class LikelihoodConfig:
    """Log-probabilities of a filled-in response, and the decisions that they belong to."""

    kind: str = choice("auto", KINDS)
    """one_step: each token given only the question, one decision per token (d1, IGPO); elbo: Monte Carlo draws of a
    lower bound of the log-likelihood of the whole response, one decision per draw, with the same masks for the old and
    the new policy; auto: as the objective needs it, otherwise one_step."""
    draws: int = only_with(bounded(8, at_least=1), kind=Unless("one_step"))
    """Number of elbo draws per response."""
    chunk: int = rare(only_with(bounded(0, at_least=0), kind=Unless("one_step")))
    """Number of elbo draws to backpropagate at a time, so that memory does not grow with their number; 0 means all.
    Needs an objective that sums over decisions, such as bgpo: token ratio, token_mean, no gate, and no clip that
    compares decisions."""

    per_token: bool = rare(only_with(False, kind=Unless("one_step")))
    """Divide the elbo bounds by the number of tokens in the response, as BGPO's code does."""


@dataclass
class InpaintingConfig:
    """Responses filled in around chunks of the worked answer, for questions that every sample gets wrong (IGPO)."""

    replacements: int = bounded(0, at_least=0)
    """Maximum number of samples per question to replace with correct ones; 0 = no inpainting. IGPO uses 4 of 8."""
    trace_key: str = "completion"
    """Column with the worked answer; IGPO's code uses all of it, including the result."""
    low: float = bounded(0.2, at_least=0, at_most=1)
    """Minimum fraction of the chunks to give."""
    high: float = bounded(0.6, at_least=0, at_most=1)
    """Maximum fraction of the chunks to give; each sample draws its fraction between the two."""
    min_chunk: int = bounded(5, at_least=1)
    """Minimum chunk size in tokens; a shorter remainder of the worked answer is not given."""
    max_chunk: int = bounded(10, at_least=1)
    """Maximum chunk size in tokens."""
    free: int = bounded(30, at_least=0)
    """Number of tokens at the end of the response that never contain a chunk."""
    stretch: float = rare(bounded(1.5, at_least=1))
    """Maximum factor by which gaps between chunks grow if the worked answer is shorter than the available space; 1 = no
    growth."""
    max_gap: int = rare(bounded(100, at_least=0))
    """Maximum gap between two chunks, in tokens."""

    def validate(self) -> None:
        """Check that bounds are in order; raises ConfigError."""
        if self.low > self.high:
            raise ConfigError(f"inpainting.low={self.low:g} is above inpainting.high={self.high:g}")
        if self.min_chunk > self.max_chunk:
            raise ConfigError(f"inpainting.min_chunk={self.min_chunk} is above inpainting.max_chunk={self.max_chunk}")


def check_model(model: ModelConfig) -> None:
    """Reject settings that only apply to left-to-right models; raises ValueError."""
    if model.attention == "flash_attention_2":
        raise ValueError(
            "model.attention is flash_attention_2, which does not support bidirectional attention masks; use sdpa or "
            "eager"
        )
    if model.router_aux_loss_coef:
        raise ValueError("model.router_aux_loss_coef is not supported with masked-diffusion models")


@dataclass
class MaskedConfig(VlmConfig):
    """A reinforcement-learning run of a masked-diffusion language model."""

    scored_outputs: ClassVar[tuple[str, ...]] = SCORES
    sampler: MaskedSampling = field(default_factory=MaskedSampling)  # type: ignore[assignment]
    """Sampling of responses in training and evaluation."""
    likelihood: LikelihoodConfig = field(default_factory=LikelihoodConfig)
    """Log-probabilities of responses."""
    inpainting: InpaintingConfig = field(default_factory=InpaintingConfig)
    """Hints for questions that every sample gets wrong."""
    evaluation: VlmEvaluationConfig = field(default_factory=VlmEvaluationConfig)
    """Evaluation."""

    @property
    def draws(self) -> int:
        """Number of likelihood draws per response; 0 if decisions are tokens."""
        kind, needs = self.likelihood.kind, make_objective(self.objective).needs
        elbo = kind == "elbo" or (kind == "auto" and "draws" in needs)
        return self.likelihood.draws if elbo else 0

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        super().validate()
        check_model(self.model)
        objective = make_objective(self.objective)
        if self.trainer.old_logp == "sampler":
            raise ValueError(
                "trainer.old_logp is 'sampler', but the sampler of a masked-diffusion model provides no "
                "log-probabilities of whole responses; use auto or recompute"
            )
        if "hints" in objective.needs and self.draws:
            raise ValueError(f"objective {objective.name} weights tokens; set likelihood.kind: one_step")
        if "draws" in objective.needs and not self.draws:
            raise ValueError(f"objective {objective.name} needs draws of a likelihood bound; set likelihood.kind: elbo")
        if self.likelihood.chunk and not (self.draws and splits(objective)):
            raise ValueError(
                "likelihood.chunk needs likelihood.kind elbo and an objective that sums over decisions, such as bgpo: "
                "ratio token, aggregation token_mean (also of the kl), no gate, and no clip that compares decisions; "
                f"{objective.name} is: {objective.parts()}"
            )
        if self.inpainting.replacements > self.trainer.samples_per_task:
            raise ValueError(
                f"inpainting.replacements is {self.inpainting.replacements}, but a question has "
                f"trainer.samples_per_task={self.trainer.samples_per_task} samples"
            )
        if self.inpainting.replacements and self.inpainting.free >= self.sampler.max_new_tokens:
            raise ValueError(
                f"inpainting.free is {self.inpainting.free}, which leaves no room in responses of "
                f"sampler.max_new_tokens={self.sampler.max_new_tokens} tokens"
            )


def splits(objective: Objective) -> bool:
    """Whether the loss is a sum of independent terms, one per decision, divided by their number."""
    averages = [objective.aggregation, None if objective.kl is None else objective.kl.aggregation]
    if objective.ratio.kind != "token" or any(mean is not None and mean.kind != "token_mean" for mean in averages):
        return False
    # a gate takes the mean of a row, of which a chunk has a part
    return objective.gate is None and not (objective.compares_rows or objective.clip.compares_decisions)


@dataclass
class MaskedScoring(VlmEvaluationConfig):
    """Evaluation of responses in supervised runs."""

    sampler: MaskedSampling = field(default_factory=MaskedSampling)
    """Length and sampling of the responses; training uses the same length."""
    rewards: list[RewardConfig] = field(default_factory=list)
    """Reward terms that score the responses."""
    accuracy_reward: str = ""
    """Reward term used to score correctness (1 = correct). Default: the last term."""


@dataclass
class MaskedSftConfig(SftConfig):
    """A supervised run of a masked-diffusion language model on a column of worked answers."""

    evaluation: MaskedScoring = field(default_factory=MaskedScoring)
    """Evaluation, with the length of responses and the rewards that score them."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        super().validate()
        check_model(self.model)
        if self.evaluation.sampler.temperature != 1.0:
            raise ValueError(
                f"evaluation.sampler.temperature is {self.evaluation.sampler.temperature:g}, but evaluations sample "
                "at evaluation.temperature; set that instead"
            )

    @property
    def scoring(self) -> Any:
        """Settings in `evaluation` for sampling and scoring responses."""
        return self.evaluation
