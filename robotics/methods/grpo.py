"""GRPO on episodes: the reward is success alone, a hand-written dense reward, or progress along a predicted flow.

    A_i = (R_i - mean_group R) / (std_group R + eps),
    loss = mean over episodes of the mean over their decisions of max(-A r, -A clip(r, 1 - 0.2, 1 + 0.28)),

with the dual clip 3 for negative advantages, no KL and no critic; groups whose episodes all have the same reward have
no gradient, and minibatches of such groups alone take no optimiser step. `reward: sparse` is 1 for success and else 0.
`reward: dense` is the simulator's own reward at the end of the episode (in the tabletop tasks a number from 0 to 1 that
grows with progress, 1 at success), on its own scale. `reward: flow` is the progress of the object along a flow that a
world model, or the simulator, predicts from the first image, and 1 for success; see `robotics.flow3d.reward.following`.

Source: SimpleVLA-RL (arXiv 2509.09674, PRIME-RL/SimpleVLA-RL) and the GRPO arm of SRPO (arXiv 2511.15605,
sii-research/siiRL examples/embodied_srpo_trainer) for clip range, aggregation and filter.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from mmrl.core.rollouts import Rollouts
from mmrl.errors import RunError
from mmrl.fields import choice
from mmrl.runs.run_log import stopwatch
from mmrl.training.objectives import ObjectiveConfig
from mmrl.training.processes import sum_over_processes
from mmrl.training.recipe import Step, Tally
from robotics.episodes.payload import EpisodePayload
from robotics.flow3d.reward.following import FlowFollowing, FlowRewardConfig
from robotics.methods.progress import rank_agreement
from robotics.methods.recipe import RobotConfig, RobotRecipe
from robotics.policies.base.policy import ActionPolicy
from robotics.sim.episodes import RobotSim

REWARDS = ("sparse", "dense", "flow")
FAILURES = ("predictions", "tracks")


@dataclass
class RobotGrpoConfig(RobotConfig):
    """A GRPO run of a robot policy."""

    reward: str = choice("sparse", REWARDS)
    """sparse: 1 for success, else 0; dense: the simulator's reward at the end of the episode; flow: progress of the
    object along a predicted flow, and 1 for success."""
    flow: FlowRewardConfig = field(default_factory=FlowRewardConfig)
    """Source of the flow; read by `reward: flow`."""
    objective: ObjectiveConfig = field(default_factory=lambda: ObjectiveConfig(preset="srpo"))
    """Advantage, clip range and aggregation; those of SRPO, so that only the reward differs."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        super().validate()
        if self.reward != "flow" and self.flow != FlowRewardConfig():
            raise ValueError(f"flow is set, but reward is {self.reward}; use reward: flow or leave flow out")


class RobotGrpoRecipe(RobotRecipe):
    """Success, a dense reward or progress along a flow; see the module."""

    config: RobotGrpoConfig

    def __init__(
        self, config: RobotGrpoConfig, policy: ActionPolicy | None = None, sim: RobotSim | None = None
    ) -> None:
        super().__init__(config, policy, sim)
        self._following: FlowFollowing | None = None
        if config.reward == "flow":
            tasks = dict.fromkeys(episode.task for episode in self.train_tasks)
            self._following = FlowFollowing(config.flow, config.sim, list(tasks), config.seed)
            self._following.failures = self.parts["flow_failures"] = Tally()

    def rewards(self, rollouts: Rollouts, step: Step) -> tuple[Tensor, dict[str, Tensor]]:
        """The chosen reward; success and the dense reward are both reported."""
        payload = EpisodePayload.of(rollouts)
        terms = {"dense": payload.progress}
        if self._following is not None:
            return self._flow_rewards(self._following, rollouts, terms)
        return payload.success.float() if self.config.reward == "sparse" else payload.progress, terms

    def close(self) -> None:
        """End the simulator and free the renderers of first images."""
        super().close()
        if self._following is not None:
            self._following.close()

    def _flow_rewards(
        self, following: FlowFollowing, rollouts: Rollouts, terms: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        payload, groups = EpisodePayload.of(rollouts), rollouts.group.cpu().numpy()
        with stopwatch("flow"):
            found = following.score(payload, groups.tolist())
        if not np.isfinite(found.reward).any():
            raise RunError(
                "no episode of this step could be compared with a flow; the first reason is in the log above"
            )
        failures = ~payload.success.cpu().numpy() & np.isfinite(found.reward)
        dense = payload.progress.cpu().numpy()
        self.noted["flow/agreement"] = rank_agreement(found.reward[failures], dense[failures], groups[failures])
        lost = sum_over_processes({name: float(following.failures[name]) for name in FAILURES})
        self.noted |= {f"flow/failed_{name}": lost[name] for name in FAILURES}
        columns = (found.reward, found.reached, found.off_m)
        reward, reached, off_m = (torch.from_numpy(column).to(rollouts.reward) for column in columns)
        return reward, terms | {"flow_reached": reached, "flow_off_m": off_m}
