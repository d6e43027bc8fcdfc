"""Samples of a world model as rollouts, see `robotics.flow3d.model.exploration`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diffusion.forward_process import NoisyRows
from diffusion.velocity_matching import MatchedSamples, TimestepConfig, VelocityMatching, draw_times
from mmrl.core.payload import Payload, per_decision, per_group, per_row
from mmrl.core.rollouts import Rollouts
from mmrl.errors import UserError
from robotics.flow3d.clip import VISIBLE, FlowClip
from robotics.flow3d.model.exploration import ExplorationConfig, perturbed
from robotics.flow3d.model.inputs import FlowInputs
from robotics.flow3d.model.processes import RectifiedProcess, sigma_grid
from robotics.flow3d.model.world_model import FlowWorldModel


@dataclass
class FlowPayload(Payload):
    """N scenes, each stored once, and B sampled flows of their object."""

    clips: list[FlowClip] = per_group()
    """The clip of each scene; its true flow is read by evaluations alone."""
    images: Tensor = per_group()
    """(N, S, S, 3) uint8."""
    points: Tensor = per_group()
    """(N, n, n, 3) query points in -1..1."""
    instructions: list[str] = per_group()
    """Lower-cased."""
    flow: Tensor = per_row()
    """(B, C, T, n, n) encoded samples, x_0."""
    sigma: Tensor = per_decision()
    """(B, T') times of the noisy versions."""
    noise_seed: Tensor = per_row()
    """(B,) int64, seed of each row's T' noises."""
    reasons: list[str] = per_row(blank="", default_factory=list)
    """The verifiers' reasons for each sample."""

    @property
    def scenes(self) -> FlowInputs:
        """The model's inputs of the N scenes."""
        return FlowInputs(self.images, self.points, self.instructions)


class FlowSampling(VelocityMatching):
    """Samples flows with noisy versions of them, and evaluates world models on these, without guidance."""

    def __init__(
        self, policy: FlowWorldModel, timesteps: TimestepConfig, exploration: ExplorationConfig | None = None
    ) -> None:
        super().__init__(timesteps)
        if not isinstance(policy.process, RectifiedProcess):
            raise UserError(
                f"AWM matches velocities of rectified flow; this world model has model.process.kind "
                f"{policy.config.process.kind}"
            )
        self.policy, self.process = policy, policy.process
        self.exploration = exploration or ExplorationConfig()
        self._grid = sigma_grid(policy.config.process.steps)
        draw_times(timesteps, self._grid, 1, 1, torch.Generator())

    def draw(
        self, policy: FlowWorldModel, clips: Sequence[FlowClip], group_size: int, generator: torch.Generator
    ) -> Rollouts:
        """Sample K flows of each scene, and draw the times and noises of their training."""
        rows = len(clips) * group_size
        inputs = policy.inputs_of([clip.observation for clip in clips], [clip.points for clip in clips])
        seeds = torch.randint(2**62, (rows,), generator=generator)
        flow = policy.sample(inputs, seeds, guidance=1.0)
        device, zeros = flow.device, torch.zeros(rows, self.timesteps.count, device=flow.device)
        noise_seed = torch.randint(2**62, (rows,), generator=generator)
        if self.timesteps.share_noise:
            noise_seed = noise_seed[::group_size].repeat_interleave(group_size)
        sigma = draw_times(self.timesteps, self._grid, len(clips), group_size, generator).to(device)
        if self.exploration.on:
            flow = self._explored(flow, clips, torch.randint(2**62, (rows,), generator=generator))
        return Rollouts(
            group=torch.arange(len(clips), device=device).repeat_interleave(group_size),
            mask=torch.ones_like(zeros),
            logp_old=zeros,
            reward=torch.full((rows,), float("nan"), device=device),
            payload=FlowPayload(
                clips=list(clips),
                images=inputs.images.to(device),
                points=inputs.points.to(device),
                instructions=inputs.instructions,
                flow=flow,
                sigma=sigma,
                noise_seed=noise_seed.to(device),
            ),
        )

    def _explored(self, flow: Tensor, clips: Sequence[FlowClip], seeds: Tensor) -> Tensor:
        """Encoded samples (B, C, T, n, n), perturbed by their seeds (B,); visibility is kept."""
        encoding, found = self.policy.encoding, flow.clone()
        parts = zip(clips, flow.chunk(len(clips)), found.chunk(len(clips)), seeds.chunk(len(clips)), strict=True)
        for clip, encoded, target, own in parts:
            seen = clip.observation
            read = encoding.decode(encoded.float().cpu().numpy(), clip.points, seen.size_px)
            moved = perturbed(read, seen, own, self.exploration)
            written = encoding.encode(moved, np.repeat(clip.points[None], len(moved), 0), seen.size_px)
            target[:, :VISIBLE] = torch.from_numpy(written[:, :VISIBLE]).to(target)
        return found

    def samples(self, rollouts: Rollouts) -> MatchedSamples:
        """The samples."""
        payload = FlowPayload.of(rollouts)
        return MatchedSamples(payload.flow, payload.sigma, payload.noise_seed)

    def velocity(self, model: Any, rollouts: Rollouts, noisy: NoisyRows) -> Tensor:
        """Velocity (M, C, T, n, n) of a world model on noisy rows; each scene is encoded once.

        Gradient: into all trainable weights of the model.
        """
        scene = rollouts.group[noisy.image.to(rollouts.group.device)]
        found = model(FlowPayload.of(rollouts).scenes, noisy.latents, noisy.sigma, scene=scene)
        return self.process.velocity(found, noisy.latents, noisy.sigma)
