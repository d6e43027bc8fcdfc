"""Samples of a world model as rollouts: K flows of each scene, and the model's velocity on noisy versions of them.

Exploration perturbs samples if a world model is nearly certain. AWM's loss depends on where a sample is, not on how it
was drawn, so it may be off the model's distribution. A sample is moved as one rigid body, by a translation and a
rotation about the mean of its points that grow linearly up to the last frame, so that a rigid, smooth flow stays so.

Shapes: N scenes, B = N * K samples, T' noisy versions of each, C x T x N x N one encoded flow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diffusion.matching.losses import NoisyRows
from diffusion.matching.times import TimestepConfig, draw_times
from diffusion.matching.velocity import MatchedSamples, VelocityMatching
from diffusion.sampling.latent_sampler import row_noise
from mmrl.core.payload import Payload, per_decision, per_group, per_row, to_device
from mmrl.core.rollouts import Rollouts
from mmrl.errors import UserError
from mmrl.fields import bounded, rare
from mmrl.training.processes import Streams
from robotics.flow3d.clip import VISIBLE, FlowClip, Observation
from robotics.flow3d.geometry import FloatArray, lift, project
from robotics.flow3d.model.context import FlowInputs
from robotics.flow3d.model.processes import RectifiedProcess, sigma_grid
from robotics.flow3d.model.world_model import FlowWorldModel


@dataclass(frozen=True)
class ExplorationConfig:
    """Random rigid perturbation of training samples; evaluation samples are never perturbed."""

    shift_cm: float = bounded(0.0, at_least=0)
    """Standard deviation along each axis of the shift in the last frame, in centimetres."""
    turn_deg: float = rare(bounded(0.0, at_least=0))
    """Standard deviation about each axis of the rotation in the last frame, in degrees."""

    @property
    def on(self) -> bool:
        """Whether samples are perturbed."""
        return self.shift_cm > 0 or self.turn_deg > 0


def perturbed(flow: FloatArray, observation: Observation, seeds: Tensor, config: ExplorationConfig) -> FloatArray:
    """Move each of a scene's flows (K, T, N, N, 4) rigidly, as its own seed (K,) int64 determines.

    Visibility is kept, and so is a flow with points behind the camera before or after the motion.
    """
    from scipy.spatial.transform import Rotation

    # each sample has its own seed: it does not depend on how many are drawn with it
    drawn = row_noise(seeds, 2, (3,)).double().numpy()
    frames = flow.shape[1]
    share = np.arange(1, frames + 1) / frames
    found = flow.copy()
    for number, (shift, turn) in enumerate(drawn):
        points = lift(flow[number, ..., :VISIBLE], observation.K).reshape(frames, -1, 3)
        middle = points.mean(1, keepdims=True)
        turns = Rotation.from_rotvec(share[:, None] * math.radians(config.turn_deg) * turn).as_matrix()
        shift_m = (share[:, None] * config.shift_cm / 100 * shift)[:, None]
        moved = np.einsum("tij,tnj->tni", turns, points - middle) + middle + shift_m
        # a point behind the camera has no projection
        if (points[..., 2] > 0).all() and (moved[..., 2] > 0).all():
            found[number, ..., :VISIBLE] = project(moved, observation.K).reshape(*flow.shape[1:4], VISIBLE)
    return found


@dataclass
class SampledFlows(Payload):
    """N scenes, each stored once, and B sampled flows of their object."""

    clips: list[FlowClip] = per_group()
    """The clip of each scene; only evaluations read its true flow."""
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
    """Samples flows and noisy versions of them, and evaluates world models on these, without guidance."""

    def __init__(
        self, policy: FlowWorldModel, timesteps: TimestepConfig, exploration: ExplorationConfig | None = None
    ) -> None:
        super().__init__(timesteps)
        if not isinstance(policy.process, RectifiedProcess):
            raise UserError(
                f"AWM matches velocities of rectified flow; this world model has model.process.kind "
                f"{policy.config.process.kind}"
            )
        self.policy = policy
        self.process = policy.process
        self.exploration = exploration or ExplorationConfig()
        self._grid = sigma_grid(policy.config.process.steps)
        # a trial draw, so that timesteps that do not fit fail before the first step
        draw_times(timesteps, self._grid, 1, 1, Streams(0))

    def draw(self, policy: FlowWorldModel, clips: Sequence[FlowClip], group_size: int, streams: Streams) -> Rollouts:
        """Sample K flows of each scene, and draw the times and noises of their training."""
        rows = len(clips) * group_size
        inputs = policy.inputs_of([clip.observation for clip in clips], [clip.points for clip in clips])
        seeds = streams.seeds(len(clips), group_size, purpose="sample")
        flow = policy.sample(inputs, seeds, guidance=1.0)
        device, zeros = flow.device, torch.zeros(rows, self.timesteps.count, device=flow.device)
        noise_seed = streams.seeds(len(clips), group_size, purpose="noise")
        if self.timesteps.share_noise:
            # the samples of a scene are compared under the same noise
            noise_seed = noise_seed[::group_size].repeat_interleave(group_size)
        sigma = to_device(draw_times(self.timesteps, self._grid, len(clips), group_size, streams), device)
        if self.exploration.on:
            # drawn last and from its own stream: without exploration all other draws stay the same
            flow = self._explored(flow, clips, streams.seeds(len(clips), group_size, purpose="explore"))
        return Rollouts(
            group=torch.arange(len(clips), device=device).repeat_interleave(group_size),
            mask=torch.ones_like(zeros),
            logp_old=zeros,
            reward=torch.full((rows,), float("nan"), device=device),
            payload=SampledFlows(
                clips=list(clips),
                images=to_device(inputs.images, device),
                points=to_device(inputs.points, device),
                instructions=inputs.instructions,
                flow=flow,
                sigma=sigma,
                noise_seed=to_device(noise_seed, device),
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
            # only positions are replaced: decoding clips the visibility
            target[:, :VISIBLE] = torch.from_numpy(written[:, :VISIBLE]).to(target)
        return found

    def samples(self, rollouts: Rollouts) -> MatchedSamples:
        """The samples."""
        payload = SampledFlows.of(rollouts)
        return MatchedSamples(payload.flow, payload.sigma, payload.noise_seed)

    def velocity(self, model: Any, rollouts: Rollouts, noisy: NoisyRows) -> Tensor:
        """Velocity (M, C, T, n, n) of a world model on noisy rows; each scene is encoded once.

        Gradient: into all trainable weights of the model.
        """
        # rows of one scene share its encoding
        scene = rollouts.group[noisy.image.to(rollouts.group.device)]
        found = model(SampledFlows.of(rollouts).scenes, noisy.latents, noisy.sigma, scene=scene)
        return self.process.velocity(found, noisy.latents, noisy.sigma)
