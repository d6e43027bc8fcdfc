"""Options common to all reinforcement learning runs of diffusion and flow models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from diffusion.data.prompts import PromptConfig
from diffusion.diffusion_evaluation import DiffusionEvaluationConfig
from diffusion.entries import SCORES
from diffusion.matching.times import TimestepConfig, check_times, sample_times
from diffusion.models.diffusion_policy import PipelineConfig
from diffusion.models.ema import EvalEmaConfig
from diffusion.sampling.latent_sampler import TRAINED_STEPS, LatentSamplerConfig
from diffusion.sampling.schedule import RANDOM_SOLVERS
from diffusion.sampling.steps import BOUNDED
from diffusion.sampling.trajectories import StepConfig, check_trajectories
from mmrl.core.blocks.filter import DropGroups, Epochs
from mmrl.core.objectives.decoupled import check_decoupled
from mmrl.errors import UserError
from mmrl.fields import choice, rare
from mmrl.rewards import RewardConfig
from mmrl.rewards.reward_config import refuse_weights
from mmrl.training.objectives import ObjectiveConfig, check_objective, make_objective
from mmrl.training.settings import BaseRunConfig, RunConfig, TrainerConfig

COMBINATIONS = ("sum", "gdpo")


def image_trainer() -> TrainerConfig:
    """Optimiser and batch sizes of the published recipes: AdamW at 3e-4 for LoRA, two updates per epoch."""
    return TrainerConfig(
        learning_rate=3e-4,
        samples_per_task=24,
        minibatches_per_step=2,
        weight_decay=1e-4,
        old_logp="auto",
    )


def check_matching(config: Any, sampler: LatentSamplerConfig) -> None:
    """Reject options that do not apply to runs on noisy versions, before a model is loaded; raises ValueError."""
    trainer, timesteps = config.trainer, config.timesteps
    if isinstance(trainer, TrainerConfig) and trainer.old_logp != "recompute":
        raise ValueError("trainer.old_logp must be 'recompute'; the sampler has no likelihood of noisy versions")
    grid = torch.linspace(1, 0, sampler.steps + 1)  # a stand-in with as many times as the scheduler's grid
    try:
        sample_times(timesteps, grid, torch.Generator())
    except UserError as error:
        raise ValueError(f"timesteps.times is '{timesteps.times}', sampler.steps {sampler.steps}: {error}") from error
    check_times(config)
    if sampler.solver == "sa_solver" and sampler.steps < 2:
        raise ValueError(f"sampler.steps is {sampler.steps}; sampler.solver 'sa_solver' needs at least 2")
    if sampler.same_noise and (sampler.solver not in RANDOM_SOLVERS or sampler.noise_level == 0):
        raise ValueError(
            f"sampler.same_noise is true, but solver '{sampler.solver}' with noise_level={sampler.noise_level} is "
            "deterministic: all images of a prompt would be identical; leave same_noise out, or set noise_level "
            f"above 0 with one of {', '.join(RANDOM_SOLVERS)}"
        )
    if sampler.solver in BOUNDED and sampler.noise_level > 1:
        raise ValueError(f"sampler.noise_level is {sampler.noise_level}; must be at most 1 for {sampler.solver}")


@dataclass
class MatchingParts:
    """Options of methods that train on the policy's own images; inherit from this before `DiffusionConfig`."""

    timesteps: TimestepConfig = field(default_factory=TimestepConfig)
    """The noisy versions."""
    sampler: LatentSamplerConfig = field(
        default_factory=lambda: LatentSamplerConfig(steps=14, guidance=1.0, solver="sa_solver", noise_level=0.4)
    )
    """Sampling of images. Default: 14 steps of SA-Solver without guidance, as published for AWM on GenEval."""
    trainer: TrainerConfig = field(
        default_factory=lambda: replace(image_trainer(), minibatches_per_step=1, old_logp="recompute")
    )
    """Batch sizes, optimiser and guards; one update per epoch, so the ratio is 1 and nothing is clipped."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        super().validate()  # type: ignore[misc]
        check_matching(self, self.sampler)
        reason = "this method only learns from x_0, which is sampled with sampler.solver"
        self.sampler.refuse_set(TRAINED_STEPS, reason)


@dataclass
class TrajectoryParts:
    """Options of methods that train the sampler's steps; inherit from this before `DiffusionConfig`."""

    scored: ClassVar[tuple[str, ...]] = SCORES
    step: StepConfig = field(default_factory=StepConfig)
    """How trained steps are evaluated."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        super().validate()  # type: ignore[misc]
        check_trajectories(self.sampler)  # type: ignore[attr-defined]


@dataclass
class DiffusionParts:
    """Model and evaluation prompts of a diffusion run; inherit from this before the configuration of a run."""

    model: PipelineConfig = field(default_factory=PipelineConfig)
    """Pipeline, adapter, precision."""
    eval_data: dict[str, PromptConfig] = field(default_factory=dict)
    """Held-out prompts by name; the first split gives the headline metrics."""
    eval_ema: EvalEmaConfig = field(default_factory=EvalEmaConfig)
    """Moving average that evaluations use."""

    def validate(self) -> None:
        """Reject float16 weights whose gradients would vanish or could not be unscaled; raises ValueError."""
        super().validate()  # type: ignore[misc]
        if self.model.dtype != "float16":
            return
        precision = self.trainer.mixed_precision  # type: ignore[attr-defined]
        if precision != "fp16":
            raise ValueError(
                f"model.dtype is float16 and trainer.mixed_precision {precision}: gradients below 6e-8 would become 0; "
                "set trainer.mixed_precision=fp16, which scales the loss"
            )
        if not self.model.lora.enabled:
            raise ValueError(
                "model.dtype is float16 and model.lora.enabled false: gradients of float16 weights cannot be unscaled; "
                "use model.dtype=float32 with trainer.mixed_precision=fp16, or adapters"
            )


@dataclass
class GivenEvaluationConfig(DiffusionEvaluationConfig):
    """Evaluation at fixed prompts and seeds, for runs that learn from given images."""

    sampler: LatentSamplerConfig = field(
        default_factory=lambda: LatentSamplerConfig(guidance=1.0, eval_guidance=3.0, eval_steps=20)
    )
    """Sampling of images."""
    rewards: list[RewardConfig] = field(default_factory=list)
    """Reward terms to report."""
    heldout_rewards: list[RewardConfig] = field(default_factory=list)
    """Reward terms to report as held out; at least one."""


@dataclass
class GivenImagesConfig(DiffusionParts, BaseRunConfig):
    """A run that learns from given images; rewards and sampling are only used for evaluation."""

    evaluation: GivenEvaluationConfig = field(default_factory=GivenEvaluationConfig)
    """Evaluation at fixed prompts and seeds."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        super().validate()
        check_rewards(self.evaluation.rewards, self.evaluation.heldout_rewards)
        refuse_weights({reward.name: reward.weight for reward in self.evaluation.rewards}, "evaluation.rewards")
        if self.evaluation.sampler.guidance != 1.0:
            raise ValueError(
                f"evaluation.sampler.guidance is {self.evaluation.sampler.guidance}, but training on given images "
                "uses no guidance; set evaluation.sampler.eval_guidance for evaluation images"
            )
        drawn = (*TRAINED_STEPS, "noise_level", "solver", "same_noise")
        self.evaluation.sampler.refuse_set(drawn, "no images are sampled during training", "evaluation.sampler")


@dataclass
class DiffusionConfig(DiffusionParts, RunConfig):
    """A reinforcement learning run of a diffusion or flow model."""

    compares_samples: ClassVar[bool] = True
    """Whether advantages compare the images of a prompt with each other."""
    scored: ClassVar[tuple[str, ...]] = ("kl_ref", "draws")
    """Scores of decisions in addition to log-probabilities; by default a velocity distance."""
    replaced_blocks: ClassVar[tuple[str, ...]] = ()
    """Blocks of the objective replaced by the method's own loss or estimator; setting one is an error."""

    data: PromptConfig = field(default_factory=PromptConfig)
    """Training prompts."""
    sampler: LatentSamplerConfig = field(default_factory=LatentSamplerConfig)
    """Sampling of images."""
    rewards: list[RewardConfig] = field(default_factory=list)
    """Reward terms to optimise, with their weights."""
    heldout_rewards: list[RewardConfig] = field(default_factory=list)
    """Reward terms that are never optimised and always reported with the others; at least one."""
    combine: str = rare(choice("sum", COMBINATIONS))
    """sum: weighted sum of the rewards, then one advantage; gdpo: one advantage per reward, whose weighted sum is
    normalised over the batch, then the objective's clipping and scaling."""
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    """Objective to optimise."""
    trainer: TrainerConfig = field(default_factory=image_trainer)
    """Batch sizes, optimiser and guards."""
    evaluation: DiffusionEvaluationConfig = field(default_factory=DiffusionEvaluationConfig)
    """Evaluation at fixed prompts and seeds."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        super().validate()
        check_rewards(self.rewards, self.heldout_rewards)
        if not self.compares_samples and self.combine != "sum":
            raise ValueError(f"combine is '{self.combine}'; this recipe needs the summed reward; use sum")
        self.check_objective()
        if self.combine == "gdpo":
            self._check_gdpo()

    @property
    def compared(self) -> tuple[str, ...]:
        """Rewards by which the images of a prompt are compared, see `Recipe.compared`."""
        if not self.compares_samples:
            return ()
        return tuple(term.name for term in self.rewards if term.weight) if self.combine == "gdpo" else ("reward",)

    def _check_gdpo(self) -> None:
        """Reject parts of the objective that read the summed reward; raises ValueError."""
        objective = make_objective(self.objective)
        try:
            check_decoupled(objective)
        except ValueError as error:
            raise ValueError(f"combine is 'gdpo', but {error}") from error
        chosen = objective.filter
        bounds = isinstance(chosen, DropGroups) and (chosen.low, chosen.high) != (None, None)
        if bounds and chosen.reward_key == "reward":
            raise ValueError(
                "combine is 'gdpo', but objective.filter.low and high bound the mean of the summed reward; set "
                f"objective.filter.key to one of the rewards: {', '.join(self.compared)}"
            )

    def check_objective(self) -> None:
        """Reject an objective that needs more than the policy or the rewards provide; raises ValueError."""
        refuse_blocks(self.objective, self.replaced_blocks)
        objective = make_objective(self.objective)
        if "order" in self.replaced_blocks and objective.order != Epochs():
            raise ValueError(
                f"objective.order is '{objective.order.kind}', but this method has no per-task scores to order tasks by"
            )
        samples = self.trainer.samples_per_task if self.compares_samples else None
        check_objective(objective, self.scored, samples, [reward.name for reward in self.rewards])


OWN_KL = ("kl.to", "kl.anneal", "kl.in_reward", "kl.importance", "kl.clamp", "kl.aggregation")
OWN_LOSS = ("ratio", "clip", "weight", "entropy", "aggregation", *OWN_KL)
"""Blocks and options replaced by matching losses, which only use the coefficient of the divergence."""


def refuse_blocks(objective: ObjectiveConfig, replaced: Sequence[str]) -> None:
    """Reject blocks of an objective, or options of blocks, that have no effect; raises ValueError."""
    for key in replaced:
        block, _, option = key.partition(".")
        if option in getattr(objective, block) or (not option and getattr(objective, block)):
            raise ValueError(f"objective.{key} is set, but this method replaces it with its own; leave it out")


def check_rewards(rewards: Sequence[RewardConfig], heldout_rewards: Sequence[RewardConfig]) -> None:
    """Reject rewards that measure nothing, and held-out rewards that are also optimised; raises ValueError."""
    if not any(reward.weight for reward in rewards):
        raise ValueError("rewards is empty or all weights are 0; add at least one reward (see `mmrl list rewards`)")
    if not heldout_rewards:
        raise ValueError(
            "heldout_rewards is empty; add at least one reward that is not optimised, so that reward hacking "
            "becomes visible"
        )
    refuse_weights({reward.name: reward.weight for reward in heldout_rewards}, "heldout_rewards")
    sources, heldout = ({_source(reward) for reward in terms} for terms in (rewards, heldout_rewards))
    if both := sorted(sources & heldout):
        raise ValueError(
            f"{', '.join(both)} is in both rewards and heldout_rewards; a held-out reward must not be optimised"
        )


def _source(reward: RewardConfig) -> str:
    return reward.function or reward.name
