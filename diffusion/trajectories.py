"""Policy gradient over denoising steps: what DDPO, Flow-GRPO and their relatives share.

An image is a row, each trained denoising step one decision with a Gaussian log-density, averaged over the latent's
dimensions. Rollouts keep the latents before and after each trained step; the update evaluates the model again on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from diffusion.conditioning import TextRows
from diffusion.data import DiffusionTask
from diffusion.matching import velocity_kl
from diffusion.payload import DiffusionPayload
from diffusion.recipe import DiffusionConfig, DiffusionRecipe
from diffusion.sampler import guided, make_kernel, sample_trajectories, trained_window
from diffusion.schedule import sigma_grid
from diffusion.steps import StepKernel, flow_grpo_head_kl, gaussian_kl
from mmrl.core.objective import PolicyOutputs
from mmrl.core.rollouts import Rollouts
from mmrl.fields import choice

KL_FORMS = ("exact", "flow_grpo_head", "velocity")

__all__ = ["StepScores", "StepSettings", "TrajectoryConfig", "TrajectoryRecipe", "placed"]


@dataclass
class StepSettings:
    """How the steps of a run are scored again."""

    kl_form: str = choice("exact", KL_FORMS)
    """KL of a step to the reference: exact, flow_grpo_head (as published, without the step length) or velocity."""
    detach_negative: bool = True
    """Leave the negative half of guidance out of the gradient, as newer Flow-GRPO code does."""


@dataclass
class TrajectoryConfig(DiffusionConfig):
    """A run that learns from the log-densities of denoising steps."""

    step: StepSettings = field(default_factory=StepSettings)
    """Scoring of the steps."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        super().validate()
        if self.sampler.noise_level == 0:
            raise ValueError("sampler.noise_level is 0, but a step without noise has no log-density")
        if self.sampler.kernel == "cps" and self.sampler.noise_level > 1:
            raise ValueError(f"sampler.noise_level is {self.sampler.noise_level}; must be at most 1 for cps")
        if self.sampler.steps < 2:
            raise ValueError(f"sampler.steps is {self.sampler.steps}; needs at least 2, the last one is not trained")


@dataclass
class StepScores:
    """The trained steps of some rows, one entry a step that counts."""

    states: _Steps
    """Where the steps start from and lead to."""
    velocity: Tensor
    """(M, C, H, W), carries the gradient."""
    mean: Tensor
    """(M, C, H, W) float32."""
    std: Tensor
    """(M,) float32, standard deviation of the step."""
    logp: Tensor
    """(M,) float32."""

    @property
    def chosen(self) -> Tensor:
        """(M,) int64, place of each in the flattened (B, T)."""
        return self.states.chosen


class TrajectoryRecipe(DiffusionRecipe):
    """Draws runs with log-densities and scores their steps again; the loss is the objective's."""

    config: TrajectoryConfig
    keeps_mean = False
    """Whether rollouts keep the means under the sampling policy."""

    def draw(self, tasks: Sequence[DiffusionTask], generator: torch.Generator) -> Rollouts:
        """Denoise G images of each task with stochastic steps inside the window."""
        size, config = self.config.trainer.samples_per_task, self.config.sampler
        group = torch.arange(len(tasks)).repeat_interleave(size)
        window = trained_window(config, generator)
        seeds = self.seeds_for(len(tasks), generator)
        text = self.text_of(tasks, group)
        run = sample_trajectories(
            self.policy, text, seeds, config, window, keep_mean=self.keeps_mean, together=self.halves_together
        )
        device = run.logp.device
        return Rollouts(
            group=group.to(device),
            mask=_chosen_steps(run.logp.shape, config.random_share, generator).to(device),
            logp_old=run.logp.nan_to_num(0.0, 0.0, 0.0),
            reward=torch.full((len(group),), float("nan"), device=device),
            payload=DiffusionPayload(
                tasks=list(tasks),
                latents=run.latents,
                images=np.zeros((len(group), 0, 0, 3), np.uint8),
                sigma=run.sigma,
                sigma_next=run.sigma_next,
                states=run.states,
                mean_old=run.mean,
            ),
        )

    def scores(self, policy: nn.Module, rollouts: Rollouts, outputs: frozenset[str]) -> PolicyOutputs:
        """Log-density of each trained step, and with "kl_ref" its exact divergence from the reference."""
        steps = self.step_scores(policy, rollouts)
        logp = placed(steps.logp, steps.chosen, rollouts.mask.shape)
        return PolicyOutputs(logp, kl_ref=self.placed_divergence(rollouts, steps) if "kl_ref" in outputs else None)

    def step_scores(self, policy: Any, rollouts: Rollouts) -> StepScores:
        """Evaluate a model on the trained steps of some rows.

        Args:
            policy: the policy, what wraps it, or the reference.
            rollouts: rows with states.

        Returns:
            One entry a step whose mask is 1; steps with mask 0 cost nothing.
        """
        states = _Steps(self, rollouts)
        velocity = states.velocity_of(policy, self.config.step.detach_negative)
        mean, std = self._kernel.transition(velocity, states.latents, states.sigma, states.sigma_next)
        logp = self._kernel.log_prob(states.reached, mean, std)
        return StepScores(states, velocity, mean, std, logp)

    def placed_divergence(self, rollouts: Rollouts, steps: StepScores) -> Tensor:
        """`divergence` as (B, T), 0 where nothing is trained."""
        return placed(self.divergence(steps), steps.chosen, rollouts.mask.shape)

    def divergence(self, steps: StepScores) -> Tensor:
        """KL (M,) of the policy's steps from those of the reference, in the configured form."""
        assert self.reference is not None
        states = steps.states

        def transition(module: nn.Module) -> tuple[Tensor, Tensor]:
            velocity = states.velocity_of(module, detach_negative=True)
            return velocity, self._kernel.transition(velocity, states.latents, states.sigma, states.sigma_next)[0]

        velocity, mean = self.reference.score(transition)
        if self.config.step.kl_form == "velocity":
            return velocity_kl(steps.velocity, velocity, states.sigma)
        if self.config.step.kl_form == "flow_grpo_head":
            return flow_grpo_head_kl(steps.mean, mean, steps.std, states.sigma, states.sigma_next)
        return gaussian_kl(steps.mean, mean, steps.std)

    @property
    def halves_together(self) -> bool:
        """Whether the two halves of guidance go through the model in one call.

        In the update a negative half without gradient has a call of its own. In bfloat16 sampling has to do the same:
        the two ways round differently, by more than a clip range of 1e-4.
        """
        low_precision = self.policy.dtype != torch.float32 or self.config.trainer.mixed_precision != "none"
        return not (low_precision and self.config.step.detach_negative)

    @cached_property
    def _kernel(self) -> StepKernel:
        grid = sigma_grid(self.policy.pipeline.scheduler, self.config.sampler.steps, self.policy.image_tokens)
        return make_kernel(self.config.sampler, grid)


class _Steps:
    """The trained steps of some rows as one batch of M."""

    def __init__(self, recipe: TrajectoryRecipe, rollouts: Rollouts) -> None:
        payload = DiffusionPayload.of(rollouts)
        assert payload.states is not None
        assert payload.sigma_next is not None
        width = rollouts.num_decisions
        self._recipe = recipe
        self.chosen = torch.nonzero(rollouts.mask.flatten() > 0).flatten()
        self.latents = payload.states[:, :width].flatten(0, 1)[self.chosen]
        self.reached = payload.states[:, 1 : width + 1].flatten(0, 1)[self.chosen]
        self.sigma = payload.sigma[:, :width].flatten()[self.chosen]
        self.sigma_next = payload.sigma_next[:, :width].flatten()[self.chosen]
        self._text: TextRows = recipe.text_of(payload.tasks, rollouts.group[self.chosen // width])

    def velocity_of(self, model: Any, detach_negative: bool) -> Tensor:
        """Guided velocity (M, C, H, W) of a model at the states before the steps."""
        recipe, config = self._recipe, self._recipe.config.sampler
        options = {"detach_negative": detach_negative, "together": recipe.halves_together}
        velocity = guided(recipe.policy, model, self._text, config.guidance, config.negative_prompt, **options)
        return velocity(self.latents, self.sigma)


def _chosen_steps(shape: torch.Size, share: float, generator: torch.Generator) -> Tensor:
    """Mask (B, T) of the trained steps: a random share of them for each row."""
    rows, steps = shape
    if share >= 1.0:
        return torch.ones(rows, steps)
    order = torch.rand(rows, steps, generator=generator).argsort(1).argsort(1)
    return (order < max(int(steps * share), 1)).float()


def placed(values: Tensor, chosen: Tensor, shape: torch.Size) -> Tensor:
    """Put values (M,) at their places in (B, T), 0 elsewhere."""
    return values.new_zeros(shape.numel()).index_copy(0, chosen, values).view(shape)
