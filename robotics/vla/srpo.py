"""SRPO, Self-Referential Policy Optimization (arXiv 2511.15605; public code sii-research/siiRL).

GRPO in which the reward of a failed episode is not 0 but its progress: how close its latent comes to those of the same
policy's successes at the same task in the same batch.

    z_i = latent of episode i,   C = centres of the DBSCAN clusters of the task's successes (their mean if none),
    d_i = min_c |z_i - c|,       u_i = (d_i - min d) / (max d - min d) over the task's failures,
    reward = 1 for success, 0.6 / (1 + exp(-10 (0.5 - u_i))) for failure, 0 where the task had no success.

References are common to a task, advantages to an initial state. The batch is that of all processes.

Differences from the public code: DBSCAN's radius grows with the square root of the latent's size (at the published 0.5
no cluster is ever found; `progress.eps_mode: absolute` is the published one); images belong to one episode (there the
samples of a prompt share a buffer); an episode without a latent is counted and left out instead of getting 0; groups
in which all fail stay if their task has a reference, because there the reward tells most (`filter.key: success` with
bounds drops them as the release does). V-JEPA 2 is `latent.kind: vjepa2`; the default is a small video encoder trained
on the demonstrations' own images.

`srpo/agreement` measures a latent: Spearman's rank correlation of the reward with the environment's own reward over the
failures of an initial state. It is NaN where the environment's reward is the same for all failures, as success is.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from torch import Tensor

from mmrl.core.rollouts import Rollouts
from mmrl.errors import RunError, UserError
from mmrl.training.loop.distributed import sum_over_processes
from mmrl.training.loop.objectives import ObjectiveConfig
from mmrl.training.record.stopwatch import stopwatch
from robotics.sim.episodes import RobotSim
from robotics.vla.latents import LatentConfig, StateLatent, make_latent
from robotics.vla.payload import EpisodePayload
from robotics.vla.policy import ActionPolicy
from robotics.vla.progress import ProgressOutcome, ProgressSettings, SuccessMemory, progress_rewards, rank_agreement
from robotics.vla.recipe import RobotConfig, RobotRecipe

__all__ = ["SrpoConfig", "SrpoRecipe"]

LOGGER = logging.getLogger("mmrl")


@dataclass
class SrpoConfig(RobotConfig):
    """An SRPO run."""

    progress: ProgressSettings = field(default_factory=ProgressSettings)
    """How distances become rewards."""
    latent: LatentConfig = field(default_factory=LatentConfig)
    """Latent by which episodes are compared."""
    objective: ObjectiveConfig = field(default_factory=lambda: ObjectiveConfig(preset="srpo"))
    """Advantage, clip range and aggregation."""


class SrpoRecipe(RobotRecipe):
    """The progress reward; see the module."""

    config: SrpoConfig

    def __init__(self, config: SrpoConfig, policy: ActionPolicy | None = None, sim: RobotSim | None = None) -> None:
        super().__init__(config, policy, sim)
        if config.latent.kind != "state" and self.sim.image_size is None:
            raise UserError(
                f"latent.kind is '{config.latent.kind}', but the simulator renders no images; set sim.image_size, or "
                "use latent.kind=state"
            )
        self.latent = make_latent(config.latent)
        if isinstance(self.latent, StateLatent) and self.latent.state_size != self.sim.state_size:
            source = config.latent.path or "latent.options"
            raise UserError(
                f"latent.kind=state was scaled to the {self.latent.state_size} entries of {source}; the simulator's "
                f"state has {self.sim.state_size}"
            )
        self.memory = SuccessMemory(config.progress.memory)
        self.invalid = self._invalid_now = 0
        self.outcome: ProgressOutcome | None = None
        self.agreement = math.nan
        self._first_reason = ""

    @property
    def needs_every_frame(self) -> bool:
        """Whether the latent is computed from the images of all control steps."""
        return self.config.latent.frames == "step" and self.config.latent.kind != "state"

    def rewards(self, rollouts: Rollouts) -> tuple[Tensor, dict[str, Tensor]]:
        """1 for success, else the progress reward."""
        payload = EpisodePayload.of(rollouts)
        with stopwatch("latents"):
            latents, valid = self._embed(payload)
        groups = rollouts.group.cpu().numpy()
        mine = self._progress_rewards(
            _Rows(
                latents=latents,
                valid=valid,
                success=payload.success.cpu().numpy(),
                tasks=np.array([payload.episodes[group].task for group in groups.tolist()]),
                env_reward=payload.progress.cpu().numpy(),
                groups=groups,
            )
        )
        progress = torch.from_numpy(mine).to(rollouts.reward)
        return progress, {"progress": torch.where(payload.success, torch.nan, progress)}

    def step_metrics(self, rollouts: Rollouts) -> dict[str, float]:
        """Clusters, tasks without a reference, missing latents and agreement, with those of every robot recipe."""
        self.invalid += int(sum_over_processes({"now": self._invalid_now})["now"])
        self._invalid_now = 0
        found = super().step_metrics(rollouts) | {"srpo/invalid_latents": float(self.invalid)}
        if self.outcome is None:
            return found
        return found | {
            "srpo/clusters": float(self.outcome.clusters),
            "srpo/noise_fraction": float(self.outcome.noise_fraction),
            "srpo/tasks_without_reference": self.outcome.fraction_without_reference,
            "srpo/agreement": self.agreement,
        }

    def state_dict(self) -> dict[str, Any]:
        """Counts and remembered successes."""
        return super().state_dict() | {"memory": self.memory.state_dict(), "invalid": self.invalid}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        super().load_state_dict(state)
        self.memory.load_state_dict(state["memory"])
        self.invalid = int(state["invalid"])

    def _embed(self, payload: EpisodePayload) -> tuple[np.ndarray, np.ndarray]:
        """Latents (B, E) and which rows have one."""
        rows = len(payload.steps)
        sound = [row for row in range(rows) if not bool(payload.failed[row])]
        found = self.latent.embed([payload.frames_of(row) for row in sound], [payload.path(row) for row in sound])
        latents = np.zeros((rows, found.latents.shape[1]), np.float32)
        valid = np.zeros(rows, bool)
        latents[sound], valid[sound] = found.latents, found.valid
        self._invalid_now += int((~found.valid).sum())
        if found.reasons and not self._first_reason:
            self._first_reason = next(iter(found.reasons.values()))
            LOGGER.warning("an episode has no latent and is left out of the update: %s", self._first_reason)
        return latents, valid

    def _progress_rewards(self, mine: _Rows) -> np.ndarray:
        """Rewards (B,) of these rows among those of all processes.

        A failure is compared with the successes of its task on any process, so the rows of all processes are gathered,
        their groups numbered anew, and all rewards computed on every process, which then keeps its own part.
        """
        state = PartialState()
        parts = [mine] if state.num_processes == 1 else list(gather_object([mine]))
        rank = state.process_index if len(parts) > 1 else 0
        apart = np.cumsum([0, *(int(part.groups.max()) + 1 for part in parts[:-1])])
        parts = [part._replace(groups=part.groups + first) for part, first in zip(parts, apart, strict=True)]
        rows = _Rows(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
        if not rows.valid.any():
            raise RunError(
                f"no episode of this step has a latent: {self._first_reason or 'see the log of the first process'}; "
                f"latent.kind is {self.config.latent.kind}"
            )
        names = rows.tasks.tolist()
        self.outcome = progress_rewards(
            rows.latents, rows.success, rows.valid, names, self.config.progress, self.memory.references()
        )
        self.memory.add(rows.latents, rows.success & rows.valid, names)
        failures = ~rows.success & np.isfinite(self.outcome.distance)
        self.agreement = rank_agreement(self.outcome.reward[failures], rows.env_reward[failures], rows.groups[failures])
        start = sum(len(part.valid) for part in parts[:rank])
        return self.outcome.reward[start : start + len(mine.valid)]


class _Rows(NamedTuple):
    """Episodes of one process or of all processes."""

    latents: np.ndarray
    """(B, E)."""
    valid: np.ndarray
    """(B,) bool, whether there is a latent."""
    success: np.ndarray
    """(B,) bool."""
    tasks: np.ndarray
    """(B,) names."""
    env_reward: np.ndarray
    """(B,) the environment's own reward at the last step."""
    groups: np.ndarray
    """(B,) int64."""
