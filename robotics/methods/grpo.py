"""GRPO on episodes: the reward is success, the environment's own return or potential, or progress along a flow.

    A_i = (R_i - mean_group R) / (std_group R + eps),
    loss = mean over episodes of the mean over their decisions of max(-A r, -A clip(r, 1 - 0.2, 1 + 0.28)),

with the dual clip 3 for negative advantages, no KL and no critic; groups whose episodes all have the same reward have
no gradient, and minibatches of such groups alone take no optimiser step. `reward: sparse` is 1 for success and else 0.
`reward: return` is the sum of the environment's own rewards over the control steps of the episode, undiscounted.
`reward: potential` is the environment's own reward at the last control step alone, for simulators whose reward says how
far the task has come (in the tabletop tasks a number from 0 to 1, 1 at success). `reward: flow` is the progress of the
object along a flow that a world model, or the simulator, predicts from the first image, and 1 for success; see
`robotics.flow3d.reward.following`.

Source: SimpleVLA-RL (arXiv 2509.09674, PRIME-RL/SimpleVLA-RL) and the GRPO arm of SRPO (arXiv 2511.15605,
sii-research/siiRL examples/embodied_srpo_trainer) for clip range, aggregation and filter.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from torch import Tensor

from mmrl.core.loss import Metric
from mmrl.core.rollouts import Rollouts
from mmrl.core.state import Tally
from mmrl.errors import RunError
from mmrl.fields import choice, only_with
from mmrl.runs.run_log import stopwatch
from mmrl.training.objectives import ObjectiveConfig
from mmrl.training.processes import from_all
from mmrl.training.recipe import Step
from robotics.episodes.payload import EpisodePayload
from robotics.flow3d.reward.following import FlowFollowing, FlowRewardConfig
from robotics.methods.progress import rank_agreement
from robotics.methods.robot_recipe import RobotConfig, RobotRecipe
from robotics.policies.base.action_policy import ActionPolicy
from robotics.sim.episodes import RobotSim

REWARDS = ("sparse", "return", "potential", "flow")
FAILURES = ("predictions", "tracks")


@dataclass
class EpisodeRewardParts:
    """Reward of an episode; inherit from this before `RobotConfig`."""

    reward: str | None = choice(None, REWARDS)
    """sparse: 1 for success, otherwise 0; return: sum of the environment's own rewards over all control steps;
    potential: the environment's reward at the last control step only, for simulators whose reward measures progress,
    such as the tabletop; flow: progress of the object along a predicted flow, and 1 for success. Default: return with
    sim.kind gymnasium, otherwise sparse."""
    flow: FlowRewardConfig = only_with(field(default_factory=FlowRewardConfig), reward="flow")
    """Source of the flow; used by `reward: flow`."""

    @property
    def chosen_reward(self) -> str:
        """`reward`, or its default for the simulator."""
        return self.reward or ("return" if self.sim.kind == "gymnasium" else "sparse")  # type: ignore[attr-defined]


@dataclass
class RobotGrpoConfig(EpisodeRewardParts, RobotConfig):
    """A GRPO run of a robot policy."""

    objective: ObjectiveConfig = field(default_factory=lambda: ObjectiveConfig(preset="srpo"))
    """Advantage, clip range and aggregation; same as for SRPO, so that only the reward differs."""


class RobotGrpoRecipe(RobotRecipe):
    """Success, the environment's own reward or progress along a flow; see the module."""

    config: Any

    def __init__(self, config: Any, policy: ActionPolicy | None = None, sim: RobotSim | None = None) -> None:
        super().__init__(config, policy, sim)
        self._following: FlowFollowing | None = None
        self._lost = Tally()
        if config.chosen_reward == "return":
            self.refuse_returns("reward is return; use potential")
        if config.chosen_reward == "flow":
            tasks = dict.fromkeys(episode.task for episode in self.train_tasks)
            self._following = FlowFollowing(config.flow, config.sim, list(tasks), config.seed)
            self.opened.callback(self._following.close)
            self._following.failures = self.parts["flow_failures"] = self.added["flow_failures"] = self._lost
            self.scores_apart = False  # the agreement of flow and own reward is that of the step

    def rewards(self, rollouts: Rollouts, step: Step) -> tuple[Tensor, dict[str, Tensor]]:
        """The chosen reward; success and the environment's own reward are both reported."""
        payload = EpisodePayload.of(rollouts)
        terms = {self.own_term: self.own_reward(payload)}
        if self._following is not None:
            return self._flow_rewards(self._following, rollouts, terms)
        if self.config.chosen_reward == "sparse":
            return payload.success.float(), terms
        return payload.returns if self.config.chosen_reward == "return" else payload.last_reward, terms

    def step_metrics(self, rollouts: Rollouts) -> dict[str, float | Metric]:
        """Adds the number of initial states and episodes without a flow reward."""
        kinds = FAILURES if self._following is not None else ()
        return super().step_metrics(rollouts) | {f"flow/failed_{name}": float(self._lost[name]) for name in kinds}

    def _flow_rewards(
        self, following: FlowFollowing, rollouts: Rollouts, terms: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        payload, groups = EpisodePayload.of(rollouts), rollouts.group.cpu().numpy()
        with stopwatch("flow"):
            found = following.score(payload, groups.tolist())
        failures = ~payload.success.cpu().numpy() & np.isfinite(found.reward)
        own, parts = self.own_reward(payload).cpu().numpy(), PartialState()
        # groups are numbered per process; this keeps equal numbers apart
        groups = groups * parts.num_processes + parts.process_index
        mine = np.stack([found.reward[failures], own[failures], groups[failures]])
        everywhere = from_all((mine, bool(np.isfinite(found.reward).any())))
        # judged over all processes, so that all of them raise
        if not any(known for _, known in everywhere):
            raise RunError(
                "no episode of this step could be compared with a flow; the first reason is in the log above"
            )
        self.noted["flow/agreement"] = rank_agreement(*np.concatenate([rows for rows, _ in everywhere], axis=1))
        columns = (found.reward, found.reached, found.off_m)
        reward, reached, off_m = (torch.from_numpy(column).to(rollouts.reward) for column in columns)
        return reward, terms | {"flow_reached": reached, "flow_off_m": off_m}
