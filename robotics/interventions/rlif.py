"""RLIF: reinforcement learning from the interventions of an overseer, without any reward of the task.

    r_t = -1 if the policy chose the action of step t and the overseer takes over at t + 1, else 0

It is RLPD with episodes that an overseer watches. The replay gets all steps. The half of a batch that is of
demonstrations, whose reward is 0, is drawn from them and from the overseer's steps so far. What is learned is to avoid
interventions, so an overseer may be far from an expert. Success ends an episode and pays nothing.

Source: RLIF, arXiv 2311.12996; pd-perry/RLIF examples/train_rlif_main.py. Differences: all steps have these rewards
    (that loop drops the last one of an episode, and all but the last one of an intervention), and the overseer's steps
    are in both halves, as in HIL-SERL.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmrl.core.loss import Metric
from mmrl.core.payload import per_row
from mmrl.core.rollouts import Rollouts
from mmrl.errors import UserError
from mmrl.training.processes import Streams
from mmrl.training.recipe import Step
from robotics.episodes.collect import Episodes
from robotics.episodes.payload import EpisodePayload
from robotics.interventions.hg_dagger import round_metrics
from robotics.interventions.overseers import INSIDE, PEOPLE, RULES, OverseerConfig, open_overseer
from robotics.interventions.watched import WatchedEpisode, intervention_rewards, run_watched
from robotics.methods.ppo import ChunkRewardConfig, ChunkWeights
from robotics.methods.robot_recipe import check_usable, pack_episodes
from robotics.offpolicy.presets import RobotRlpdConfig
from robotics.offpolicy.sac import RobotSacRecipe
from robotics.offpolicy.transitions import Experience, TransitionBatch, prior_count
from robotics.policies.base.action_policy import ActionPolicy
from robotics.sim.episodes import RobotSim


@dataclass
class RobotRlifConfig(RobotRlpdConfig):
    """A run of RLIF on a robot; `prior.path` is required."""

    overseer: OverseerConfig = field(default_factory=OverseerConfig)
    """The script that watches the policy, distance or random; or environment."""

    def validate(self) -> None:
        """Reject options without an effect; raises ValueError."""
        super().validate()
        if self.reward != ChunkRewardConfig():
            raise ValueError("reward has no effect in robot_rlif, which only learns from interventions; leave it out")
        if self.overseer.kind in PEOPLE:
            raise ValueError(f"overseer.kind is {self.overseer.kind}; robot_rlif takes {', '.join((*RULES, INSIDE))}")
        if self.warmup != "policy":
            raise ValueError(f"warmup is {self.warmup}, but an overseer watches the policy; set it to policy")


@dataclass
class WatchedPayload(EpisodePayload):
    """Episodes whose decisions are control steps; their content is in `watched` alone."""

    watched: list[WatchedEpisode] = per_row(default_factory=list)
    """The episode of each row."""


class RobotRlifRecipe(RobotSacRecipe):
    """Avoids interventions; see the module."""

    config: RobotRlifConfig
    watched = True

    def __init__(
        self, config: RobotRlifConfig, policy: ActionPolicy | None = None, sim: RobotSim | None = None
    ) -> None:
        self._overseer = open_overseer(config.overseer)
        super().__init__(config, policy, sim)
        if self.policy.chunk != 1:
            raise UserError(f"the policy's chunk is {self.policy.chunk}; robot_rlif needs model.chunk=1")
        self.weights = ChunkWeights(success=0.0, environment=1.0, potential=0.0)

    def rollout(self, policy: ActionPolicy, tasks: Sequence[Any], streams: Streams, step: Step) -> Rollouts:
        """Run a watched episode from each initial state."""
        seeds, size = streams.seeds(len(tasks), 1).tolist(), self.sim.capacity or len(tasks)
        seen: list[WatchedEpisode] = []
        for start in range(0, len(tasks), size):
            some = tasks[start : start + size], self._overseer, self.config.acting, seeds[start : start + size]
            seen += run_watched(policy, self.sim, *some, greedy=False)
        lengths = torch.tensor([len(one) for one in seen])
        steps = (torch.arange(max(1, int(lengths.max()))) < lengths[:, None]).long()
        success, terminated, failed = (
            torch.tensor([getattr(one, name) for one in seen]) for name in ("success", "terminated", "failed")
        )
        none = torch.zeros(*steps.shape, 0)
        payload = WatchedPayload(
            episodes=list(tasks),
            states=none,
            decisions=none,
            steps=steps,
            success=success,
            terminated=terminated,
            failed=failed,
            last_reward=torch.tensor([one.rewards[-1] if one.rewards else torch.nan for one in seen]),
            last_state=none[:, 0],
            reasons=[one.reason for one in seen],
            watched=seen,
        )
        payload = payload.to(self.policy.device)
        self._note(payload)
        logp = torch.zeros(*steps.shape, 1, device=self.policy.device)
        rollouts = pack_episodes(Episodes(payload, logp), torch.arange(len(tasks)), policy)
        check_usable(rollouts)
        return rollouts

    def experiences(self, rollouts: Rollouts, step: Step) -> list[Experience]:
        """The episodes of a step whose environment did not fail."""
        return [self._experience(one) for one in WatchedPayload.of(rollouts).watched if not one.failed]

    def _experience(self, one: WatchedEpisode) -> Experience:
        full: list[Any] = [*one.full, one.last_full] if self.form.full else [np.zeros(0, np.float32)] * (len(one) + 1)
        owner, states = np.array(one.by_person), [*one.states, *([] if one.last_state is None else [one.last_state])]
        return Experience(
            states=np.stack(states),
            full=np.stack(full),
            actions=np.stack(one.actions)[:, None].clip(-1, 1),
            rewards=intervention_rewards(owner)[:, None],
            steps=np.ones(len(one), np.int32),
            task=list(self.tasks).index(one.episode.task),
            instruction=one.episode.instruction,
            terminated=one.terminated,
            success=one.success,
            by_overseer=owner,
        )

    def rewards(self, rollouts: Rollouts, step: Step) -> tuple[Tensor, dict[str, Tensor]]:
        """Minus the number of times that an overseer interrupts the policy."""
        owners = [np.array(one.by_person, bool) for one in WatchedPayload.of(rollouts).watched]
        return torch.tensor([float(intervention_rewards(owner).sum()) for owner in owners]).to(rollouts.reward), {}

    def draw(self, generator: torch.Generator) -> TransitionBatch:
        """A batch from the replay, and from demonstrations and the overseer's steps."""
        config, replay = self.config, self.replay.index
        assert self.prior is not None
        count = prior_count(config.batch, config.prior.ratio)
        online = replay.draw(config.batch - count, generator, config.capacity)
        first = max(0, len(replay) - config.capacity)
        own = first + np.flatnonzero(replay.records["by_overseer"][first:])
        places = torch.randint(len(self.prior) + len(own), (count,), generator=generator).numpy()
        given = places < len(self.prior)
        corrections = replay.records[own[places[~given] - len(self.prior)]]
        return self.batch(np.concatenate([online, self.prior.records[places[given]], corrections]), count)

    def step_metrics(self, rollouts: Rollouts) -> dict[str, float | Metric]:
        """Interventions in the step's episodes, whose successes are not the policy's own."""
        watched = WatchedPayload.of(rollouts).watched
        found = super().step_metrics(rollouts) | round_metrics([one.counts() for one in watched])
        return {name: value for name, value in found.items() if not name.startswith("episode/success")}

    def describe(self) -> str:
        """The losses, and the reward."""
        return f"{super().describe()}\n  R is -1 for a step of the policy before the overseer takes over, else 0"
