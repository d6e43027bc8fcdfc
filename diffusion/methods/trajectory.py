"""Base of the methods that train the sampler's denoising steps: DDPO, Flow-GRPO and its variants, PPO with a critic."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from diffusion.diffusion_recipe import DiffusionRecipe
from diffusion.models.diffusion_policy import DiffusionPolicy
from diffusion.sampling.steps import gaussian_kl
from diffusion.sampling.trajectories import DiffusionPayload, StepScores, Trajectories
from mmrl.core.objectives.objective import PolicyOutputs
from mmrl.core.rollouts import Rollouts
from mmrl.training.processes import Streams
from mmrl.training.recipe import LossTerm, Passes, Step, single_update


class TrajectoryRecipe(DiffusionRecipe):
    """Learning from stochastic denoising steps, which `process` draws."""

    process: Trajectories
    keeps_means: ClassVar[bool] = False
    """Whether the method compares the means of steps with those of the policy at the start of the update."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        # means cost as much memory as the states, so they are stored only if a loss reads them
        keep = self.keeps_means or "kl_old" in self.objective.needs
        precision = config.trainer.mixed_precision
        self.process = Trajectories(self.policy, config.sampler, config.step, precision, keep_mean=keep)
        self.old = OldMeans(self)
        self.terms = [self.old] if keep else []

    def draw(self, policy: DiffusionPolicy, tasks: Sequence[Any], streams: Streams, step: Step) -> Rollouts:
        """Draw images; the window of trained steps may move with the training step."""
        return self.process.draw(policy, tasks, self.config.trainer.samples_per_task, streams, step.number)

    def scores(self, policy: nn.Module, rollouts: Rollouts, outputs: frozenset[str]) -> PolicyOutputs:
        """Log-density of each step, and its divergence from the reference and the policy before the update."""
        found = self.process.evaluate(policy, rollouts)
        decisions = found.steps.decisions
        kl_old = None
        if "kl_old" in outputs:
            _, mean_old = self.old.of(found, rollouts)
            kl_old = decisions.scatter(gaussian_kl(found.mean, mean_old, found.std))
        kl_ref = self.process.kl(found, self.loss_reference if "kl_ref" in outputs else None)
        return PolicyOutputs(decisions.scatter(found.logp), kl_ref=kl_ref, kl_old=kl_old)


class OldMeans(LossTerm):
    """Means and log-densities of the policy at the start of the update, if rounding makes the sampler's differ.

    A single update has them anyway.
    """

    name = "old_means"
    gradient = "never"

    def __init__(self, recipe: TrajectoryRecipe) -> None:
        self.recipe = recipe

    @property
    def is_in_update(self) -> bool:
        """Whether the policy in the loss is still the one at the start of the update."""
        return single_update(self.recipe.config.trainer) and not self.recipe.keeps_sampled_logp

    def of(self, found: StepScores, rollouts: Rollouts) -> tuple[Tensor, Tensor]:
        """Old log-densities (M,) and means (M, C, H, W) of scored steps."""
        if self.is_in_update:
            # detached from the same pass: the ratio is exactly 1 and still has a gradient
            return found.logp.detach(), found.mean.detach()
        means = DiffusionPayload.of(rollouts).mean_old
        assert means is not None
        decisions = found.steps.decisions
        return decisions.gather(rollouts.logp_old), decisions.gather(means)

    def provides(self, step: Step) -> frozenset[str]:
        """The log-densities, which have to come from the same pass as the means."""
        return frozenset() if self.is_in_update else frozenset({"logp_old"})

    def prepare(self, passes: Passes, rollouts: Rollouts, step: Step) -> Rollouts:
        """Evaluate the sampled steps again, in the micro-batches of the update so that both round alike."""
        if self.recipe.keeps_sampled_logp or self.is_in_update:
            return rollouts
        payload = DiffusionPayload.of(rollouts)
        assert payload.mean_old is not None
        logps, means = [], []
        # the same splits as in the update: another batch shape would round differently in low precision
        for chunk in rollouts.micro_batches(self.recipe.config.trainer.micro_batch or rollouts.num_rows):
            with torch.no_grad():
                found = self.recipe.process.evaluate(passes.policy, chunk)
            decisions = found.steps.decisions
            sampled = DiffusionPayload.of(chunk).mean_old
            assert sampled is not None
            # untrained steps keep the sampler's means; nothing reads them, but the table stays rectangular
            mean = sampled.flatten(0, 1).index_copy(0, decisions.index, found.mean)
            means.append(mean.view(*decisions.shape, *mean.shape[1:]))
            logps.append(decisions.scatter(found.logp))
        # both from one pass: GRPO-Guard's ratio is exactly 1 only if they agree
        return rollouts.replace(
            logp_old=torch.cat(logps), payload=dataclasses.replace(payload, mean_old=torch.cat(means))
        )
