"""Flow matching on captioned images: the supervised start of a tiny pipeline before it is trained with rewards.

    L = mean |v(x_t, t, c) - (noise - x_0)|^2,   x_t = (1 - t) x_0 + t noise,

with t from a shifted logit-normal and the caption left out at random, so that the model can be guided. For Stable
Diffusion, which predicts noise or another velocity, the loss is the error of that prediction, as in its pretraining.
Training runs in the same loop as reinforcement learning; the rewards of `evaluation` only score held-out images.

Source: Lipman et al., Flow Matching, arXiv 2210.02747; Esser et al., arXiv 2403.03206 (times and shift).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from diffusion.data.captioned_images import CaptionedImage, ImageDataConfig, load_images
from diffusion.data.prompts import DiffusionTask
from diffusion.diffusion_config import GivenImagesConfig, check_matching
from diffusion.diffusion_recipe import DiffusionDomain
from diffusion.matching.times import TimestepConfig
from diffusion.matching.velocity import ERRORS, FlowMatching, encode_given, given_rollouts
from diffusion.models.diffusion_policy import DiffusionPolicy, PipelineConfig, full_model
from diffusion.models.ema import KeepsEvalAverage
from diffusion.sampling.trajectories import mean_over_decisions
from mmrl.core.loss import Denominators, Metric
from mmrl.core.objectives.objective import LossOutput, PolicyOutputs
from mmrl.core.rollouts import Rollouts
from mmrl.fields import bounded, choice, rare
from mmrl.training.processes import Streams
from mmrl.training.recipe import Reference, Step
from mmrl.training.settings import BaseTrainerConfig
from mmrl.training.supervised import SupervisedRecipe


@dataclass
class PretrainConfig(GivenImagesConfig):
    """A flow-matching run on captioned images."""

    model: PipelineConfig = field(default_factory=full_model)
    """Pipeline whose transformer is fully fine-tuned."""
    images: ImageDataConfig = field(default_factory=ImageDataConfig)
    """The captioned images."""
    drop_caption: float = rare(bounded(0.1, at_least=0, at_most=1))
    """Probability that an image is shown without its caption."""
    error: str = rare(choice("prediction", ERRORS))
    """Error to minimise: of the network's own prediction, of the velocity, or of the noise that it implies, (1 - t)
    times that of the velocity."""
    timesteps: TimestepConfig = field(
        default_factory=lambda: TimestepConfig(count=1, times="logit_normal", share_times="image")
    )
    """Times of each image in a step."""
    trainer: BaseTrainerConfig = field(
        default_factory=lambda: BaseTrainerConfig(
            steps=5000, tasks_per_step=64, learning_rate=1.5e-3, schedule="cosine", warmup_steps=100
        )
    )
    """Batch sizes, optimiser and guards; the defaults are enough for a tiny pipeline to learn to draw."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        super().validate()
        check_matching(self, self.evaluation.sampler)
        if self.timesteps.share_noise:
            raise ValueError("timesteps.share_noise is true, but here each image is a group by itself; leave it out")


class PretrainRecipe(KeepsEvalAverage, DiffusionDomain, SupervisedRecipe[DiffusionPolicy, CaptionedImage]):
    """Flow matching on given images; see the module."""

    config: PretrainConfig
    own_loss = "flow_matching"
    start: Reference

    def __init__(self, config: PretrainConfig) -> None:
        super().__init__(config)
        self.open(config, config.evaluation)
        self.process = FlowMatching(self.policy, config.evaluation.sampler, config.timesteps)

    def load_train_tasks(self) -> Sequence[Any]:
        """The captioned images."""
        return load_images(self.config.images)

    def prompts_of(self, task: Any) -> list[str]:
        """The caption of an image, or the prompt of an evaluation."""
        return [task.caption if isinstance(task, CaptionedImage) else task.prompt]

    def batch(self, policy: DiffusionPolicy, tasks: Sequence[CaptionedImage], streams: Streams, step: Step) -> Rollouts:
        """Encode the images of a step and drop the caption of a random subset."""
        rows, ids = len(tasks), [task.id for task in tasks]
        images = encode_given(policy, ids, [task.read() for task in tasks], self.scoring.sampler.batch_rows)
        kept = streams.uniform(rows, 1, purpose="caption") >= self.config.drop_caption
        captions = [task.caption if keep else "" for task, keep in zip(tasks, kept.tolist(), strict=True)]
        shown = [DiffusionTask(task.id, caption) for task, caption in zip(tasks, captions, strict=True)]
        sigma = self.process.times(rows, 1, streams)
        seeds = streams.seeds(rows, 1, purpose="noise")
        return given_rollouts(policy, shown, torch.arange(rows), images, sigma, seeds)

    def scores(self, policy: nn.Module, rollouts: Rollouts, outputs: frozenset[str]) -> PolicyOutputs:
        """Minus the error on each noisy version (B, T)."""
        return PolicyOutputs(-self.process.errors(policy, rollouts, self.config.error))

    def loss(self, policy: nn.Module, minibatch: Rollouts, denominators: Denominators, step: Step) -> LossOutput:
        """Mean error."""
        errors = self.process.errors(policy, minibatch, self.config.error)
        loss = mean_over_decisions(errors, minibatch, denominators)
        return LossOutput(loss, {"loss/total": Metric.summed(loss.detach())})

    def describe(self) -> str:
        """Formula of the loss."""
        return self.process.error_formula(self.config.error)
