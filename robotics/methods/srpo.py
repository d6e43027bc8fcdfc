"""SRPO, Self-Referential Policy Optimization (arXiv 2511.15605; public code sii-research/siiRL).

GRPO in which the reward of a failed episode is not 0 but its progress: how close its latent comes to those of the same
policy's successes at the same task in the same batch.

    z_i = latent of episode i,   C = centres of the DBSCAN clusters of the task's successes (their mean if none),
    d_i = min_c |z_i - c|,       u_i = (d_i - min d) / (max d - min d) over the task's failures,
    reward = 1 for success, 0.6 / (1 + exp(-10 (0.5 - u_i))) for failure, 0 where the task had no success.

References are common to a task, advantages to an initial state. The batch is that of all processes.

`progress.preset: published` is the public code's reward. The default differs in DBSCAN's radius, which grows with the
square root of the latent's size (at the published 0.5 no cluster is ever found), and in an episode without a latent,
which is counted and left out instead of getting 0. In both, images belong to one episode (in the public code the
samples of a prompt share a buffer), and groups in which all fail stay if their task has a reference, because there the
reward is most informative (`filter.key: success` with bounds drops them as the release does).

`progress.preset: initial_state` is for initial states that recur, as in LIBERO's suites: references are the last 32
successes of the same initial state, kept from step to step, and a failure earns 0.6 clip(1 - d_i / d_i0, 0, 1) with
d_i0 the distance of the episode's first frame. `objective.advantage.kind: group_outcome_std` scales advantages by the
deviation of success alone, so that a rare success keeps its weight among failures that earn a reward.
`progress.task_fallback` compares the failures of a state that was never solved with successes from other states of its
task.

V-JEPA 2 is `latent.kind: vjepa2`; the default is a small video encoder trained on the demonstrations' own images.

Two metrics compare the reward with the environment's own; both are NaN if that is the same for all failures, as success
is: `srpo/agreement`, Spearman's rank correlation over the failures of an initial state, and
`srpo/advantage_correlation`, between the advantages and those that the environment's reward would give.
`shuffle_failures` is the control: the rewards of an initial state's failures are shuffled among them.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast_object_list
from torch import Tensor

from mmrl.core.loss import Metric
from mmrl.core.rollouts import Rollouts
from mmrl.core.state import Tally
from mmrl.errors import RunError, UserError
from mmrl.runs.run_log import stopwatch
from mmrl.training.objectives import ObjectiveConfig
from mmrl.training.processes import from_all, global_advantages, stream_seed
from mmrl.training.recipe import Step
from robotics.episodes.dataset_fit import check_state
from robotics.episodes.payload import EpisodePayload, episode_id
from robotics.methods.latents import LATENTS, LatentConfig, StateLatent, make_latent
from robotics.methods.progress import (
    ProgressSettings,
    SuccessMemory,
    advantage_correlation,
    progress_rewards,
    rank_agreement,
    shuffled_failures,
)
from robotics.methods.robot_recipe import RobotConfig, RobotRecipe
from robotics.policies.base.action_policy import ActionPolicy
from robotics.sim.episodes import EpisodeSpec, RobotSim

LOGGER = logging.getLogger("mmrl")


@dataclass
class SrpoConfig(RobotConfig):
    """An SRPO run."""

    progress: ProgressSettings = field(default_factory=ProgressSettings)
    """Conversion of distances to rewards."""
    latent: LatentConfig = field(default_factory=LatentConfig)
    """Latent used to compare episodes."""
    shuffle_failures: bool = False
    """Control: shuffle the rewards among the failures of each initial state."""
    objective: ObjectiveConfig = field(default_factory=lambda: ObjectiveConfig(preset="srpo"))
    """Advantage, clip range and aggregation."""


class SrpoRecipe(RobotRecipe):
    """The progress reward; see the module."""

    config: SrpoConfig
    scores_apart = False  # failures are compared with the successes of the whole step

    def __init__(self, config: SrpoConfig, policy: ActionPolicy | None = None, sim: RobotSim | None = None) -> None:
        super().__init__(config, policy, sim)
        # before the first episode, which may take minutes
        if LATENTS[config.latent.kind][1].needs_images and self.sim.image_size is None:
            raise UserError(
                f"latent.kind is '{config.latent.kind}', but the simulator renders no images; set sim.image_size, or "
                "use latent.kind=state"
            )
        self.latent = self.parts["latent"] = make_latent(config.latent)
        if isinstance(self.latent, StateLatent) and self.latent.state_size not in (0, self.sim.state_size):
            source = config.latent.path or "latent.options"
            raise UserError(
                f"latent.kind=state was scaled to the {self.latent.state_size} entries of {source}, but the "
                f"simulator's state has {self.sim.state_size}"
            )
        if isinstance(self.latent, StateLatent) and config.latent.path:
            check_state(config.latent.path, self.sim, config.model.accept_other)
        self.form = config.progress.form
        self.memory = self.parts["memory"] = SuccessMemory(self.form.memory)
        # a part, so that the count survives a resume; added up over processes in a checkpoint
        self.invalid = self.parts["invalid"] = self.added["invalid"] = Tally()
        self._first_reason = ""

    @property
    def needs_every_frame(self) -> bool:
        """Whether the latent is computed from the images of all control steps."""
        return self.config.latent.frames == "step" and self.latent.needs_images

    def rewards(self, rollouts: Rollouts, step: Step) -> tuple[Tensor, dict[str, Tensor]]:
        """1 for success, otherwise the progress reward."""
        payload, groups = EpisodePayload.of(rollouts), rollouts.group.cpu().numpy()
        with stopwatch("latents"):
            self._fit_latent(payload)
            latents, first, valid = self._embed(payload)
        # an environment that failed has no latent either, but that is not the latent's fault
        self.invalid["episodes"] += int((~valid & ~payload.failed.cpu().numpy()).sum())
        mine = self._progress_rewards(
            _ProgressRows(
                latents=latents,
                first=first,
                valid=valid,
                success=payload.success.cpu().numpy(),
                labels=np.array([self._label(payload.episodes[group]) for group in groups.tolist()]),
                env_reward=self.own_reward(payload).cpu().numpy(),
                groups=groups,
            ),
            step,
        )
        progress = torch.from_numpy(mine).to(rollouts.reward)
        # the term shows the failures only; the 1 of each success would hide them
        return progress, {"progress": torch.where(payload.success, torch.nan, progress)}

    def advantages(self, rollouts: Rollouts, accelerator: Accelerator, step: Step) -> Rollouts:
        """Compute advantages, and log their correlation with those from the environment's own reward."""
        found = super().advantages(rollouts, accelerator, step)
        payload = EpisodePayload.of(rollouts)
        own_reward = self.own_reward(payload)
        # rows without a progress reward are left out on both sides, so that the same rows are compared
        own = rollouts.replace(reward=torch.where(torch.isfinite(rollouts.reward), own_reward, torch.nan))
        other = global_advantages(self.objective.compute_advantages, own, accelerator)
        failed = (~payload.success).to(rollouts.mask)
        # one value per episode: episodes of different lengths count the same
        columns = [_row_means(part.advantage, rollouts.loss_mask) for part in (found, other)]
        # correlations cannot be averaged over processes, so the rows are gathered
        rows = from_all(torch.stack([*columns, own_reward, failed]).cpu().numpy())
        self.noted["srpo/advantage_correlation"] = advantage_correlation(*np.concatenate(rows, axis=1))
        return found

    def step_metrics(self, rollouts: Rollouts) -> dict[str, float | Metric]:
        """Adds the number of episodes without a latent so far."""
        return super().step_metrics(rollouts) | {"srpo/invalid_latents": float(self.invalid["episodes"])}

    def _label(self, episode: EpisodeSpec) -> str:
        """Label of the successes that an episode is compared with."""
        return episode.task if self.form.references == "task" else episode_id(episode)

    def _fit_latent(self, payload: EpisodePayload) -> None:
        """Fit a latent that has no scale yet to the first step's episodes of all processes."""
        if self.latent.size:
            return
        _, paths, _ = self._videos_and_paths(payload)
        # every process fits, so that all of them raise an error; rounding may differ between machines
        self.latent.fit([path for part in from_all(paths) for path in part])
        if PartialState().num_processes > 1:
            self.latent.load_state_dict(broadcast_object_list([self.latent.state_dict()])[0])

    def _videos_and_paths(self, payload: EpisodePayload) -> tuple[list[np.ndarray | None], list[np.ndarray], list[int]]:
        """Videos and states that the latent reads, for the rows whose environment did not fail, and these rows."""
        # a failed environment has no trajectory to embed
        sound = [row for row in range(len(payload.steps)) if not bool(payload.failed[row])]
        # frames are decoded only for a latent that looks at them
        videos = [payload.frames_of(row) if self.latent.needs_images else None for row in sound]
        if self.latent.looks_at == "robot":
            return videos, [payload.path(row) for row in sound], sound
        places = [payload.object_path(row) for row in sound]
        # all or none: a simulator either reports the object's pose or does not
        known = [place for place in places if place is not None]
        if len(known) < len(places):
            raise UserError(
                f"latent.kind is '{self.config.latent.kind}', but this simulator does not report the object's pose; "
                "use another latent"
            )
        return videos, known, sound

    def _embed(self, payload: EpisodePayload) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Latents (B, E), those of the first frames alone if the norm needs them, and which rows have them."""
        videos, paths, sound = self._videos_and_paths(payload)
        # whole episodes never repeat, first frames do: only these are worth caching
        found = self.latent.embed(videos, paths, reuse=False)
        begun = found
        if self.form.norm == "initial":
            videos = [None if video is None else video[:1] for video in videos]
            # one by one: the same first frame must have the same bits in every batch
            begun = self.latent.embed(videos, [path[:1] for path in paths], one_by_one=True)
        # invalid rows keep zeros; `valid` keeps them out of every comparison
        latents, first = np.zeros((2, len(payload.steps), found.latents.shape[1]), np.float32)
        valid = np.zeros(len(payload.steps), bool)
        latents[sound] = found.latents
        first[sound] = begun.latents
        valid[sound] = found.valid & begun.valid
        # one warning per run; the metric counts the rest
        reasons = found.reasons or begun.reasons
        if reasons and not self._first_reason:
            self._first_reason = next(iter(reasons.values()))
            LOGGER.warning("an episode has no latent and is excluded from the update: %s", self._first_reason)
        return latents, first, valid

    def _progress_rewards(self, mine: _ProgressRows, step: Step) -> np.ndarray:
        """Rewards (B,) of these rows among those of all processes.

        A failure is compared with the successes of its label on any process, so the rows of all processes are gathered,
        their groups renumbered, and all rewards computed on every process, which then keeps its own part.
        """
        state = PartialState()
        parts = from_all(mine)
        rank = state.process_index if len(parts) > 1 else 0
        # the groups of all processes in the order in which one process has them
        parts = [part._replace(groups=part.groups * len(parts) + place) for place, part in enumerate(parts)]
        order = np.argsort(np.concatenate([part.groups for part in parts]), kind="stable")
        rows = _ProgressRows(*(np.concatenate(columns)[order] for columns in zip(*parts, strict=True)))
        # judged over all processes, so that all of them raise
        if not rows.valid.any():
            raise RunError(
                f"no episode of this step has a latent: {self._first_reason or 'see the log of the first process'}; "
                f"latent.kind is {self.config.latent.kind}"
            )
        # labels of the gathered rows: a failure may only be comparable with another process's success
        labels = rows.labels.tolist()
        outcome = progress_rewards(
            rows.latents,
            rows.success,
            rows.valid,
            labels,
            self.config.progress,
            self.memory.references(),
            rows.first,
        )
        # after the rewards, which count the batch's own successes anyway
        self.memory.add(rows.latents, rows.success & rows.valid, labels)
        reward = outcome.reward
        if self.config.shuffle_failures:
            # the same stream on every process, because each computes all rewards
            draws = np.random.default_rng(stream_seed(self.config.seed, "shuffle", step.number))
            reward = shuffled_failures(reward, rows.success, rows.groups, draws)
        # failures with a reference; the others all have reward 0 and no order
        failures = ~rows.success & np.isfinite(outcome.distance)
        self.noted |= {
            "srpo/clusters": float(outcome.clusters),
            "srpo/noise_fraction": float(outcome.noise_fraction),
            "srpo/tasks_without_reference": outcome.fraction_without_reference,
            "srpo/tasks_with_fallback": outcome.fraction_with_fallback,
            "srpo/agreement": rank_agreement(reward[failures], rows.env_reward[failures], rows.groups[failures]),
        }
        # the inverse permutation finds this process's rows among the sorted ones
        start = sum(len(part.valid) for part in parts[:rank])
        return reward[np.argsort(order)[start : start + len(mine.valid)]]


def _row_means(advantage: Tensor | None, mask: Tensor) -> Tensor:
    """(B,) mean advantage over the decisions that are trained; NaN if there are none."""
    assert advantage is not None
    return (advantage * mask).sum(1) / torch.where(mask.sum(1) > 0, mask.sum(1), torch.nan)


class _ProgressRows(NamedTuple):
    """Episodes of one process or of all processes."""

    latents: np.ndarray
    """(B, E)."""
    first: np.ndarray
    """(B, E) of the first frames alone; used by the norm initial."""
    valid: np.ndarray
    """(B,) bool, whether there is a latent."""
    success: np.ndarray
    """(B,) bool."""
    labels: np.ndarray
    """(B,) names of tasks or initial states."""
    env_reward: np.ndarray
    """(B,) the environment's own reward of the episode."""
    groups: np.ndarray
    """(B,) int64."""
