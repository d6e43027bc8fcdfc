"""Behaviour cloning: the warm start of a policy from demonstrations, in the RL training loop.

A row is one transition of a demonstration: an observation and the chunk of K actions that followed; control steps
after the end of the episode are masked. The loss is the policy's own (cross-entropy of action tokens, density of a
Gaussian head, flow matching of a flow head), averaged over the control steps. With `acting.scale: bounds_q99` the
policy learns actions normalised by the quantiles of the demonstrations. The simulator only evaluates held-out initial
states.

Source: ALVINN (Pomerleau, 1988); action chunks: ACT, arXiv 2304.13705.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.core.loss import Denominators, Metric
from mmrl.core.objectives.objective import LossOutput, PolicyOutputs
from mmrl.core.payload import Payload, per_row
from mmrl.core.rollouts import Rollouts
from mmrl.errors import UserError
from mmrl.training.processes import Streams
from mmrl.training.recipe import Step
from mmrl.training.settings import BaseRunConfig, BaseTrainerConfig
from mmrl.training.supervised import SupervisedRecipe
from robotics.episodes.collect import action_scale
from robotics.episodes.demonstrations import DemonstrationConfig, Demonstrations, load_demonstrations
from robotics.episodes.episode_evaluation import RobotEvaluationConfig
from robotics.methods.robot_recipe import RobotDomain, RobotParts
from robotics.policies.base.action_policy import ActionPolicy, PolicyInputs
from robotics.policies.base.action_statistics import StateStatistics
from robotics.policies.base.action_tokens import RowGenerators
from robotics.rewards.judged_sim import open_run_sim
from robotics.sim.episodes import RobotSim, views_of
from robotics.sim.interface import interface_of, read_sizes

LOGGER = logging.getLogger("mmrl")


def _trainer() -> BaseTrainerConfig:
    return BaseTrainerConfig(steps=1000, tasks_per_step=64, learning_rate=1e-3, schedule="cosine", warmup_steps=20)


@dataclass
class TransitionPayload(Payload):
    """B transitions of demonstrations."""

    inputs: PolicyInputs = per_row()
    """Observations of the robot."""
    actions: Tensor = per_row()
    """(B, K, A) float32, in the policy's -1..1."""
    mask: Tensor = per_row()
    """(B, K) float32, 1 while the episode was running."""
    noise_seed: Tensor = per_row()
    """(B,) int64; the first one seeds the noise of a policy that learns from noisy actions."""


@dataclass
class CloneConfig(RobotParts, BaseRunConfig):
    """A behaviour-cloning run."""

    demonstrations: DemonstrationConfig = field(default_factory=DemonstrationConfig)
    """The demonstrations."""
    evaluation: RobotEvaluationConfig = field(default_factory=RobotEvaluationConfig)
    """Evaluation over fixed initial states."""
    trainer: BaseTrainerConfig = field(default_factory=_trainer)
    """Batch sizes, optimiser and guards."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        super().validate()
        self.check_parts(self.evaluation, self.held_out())
        if self.sim.randomization.per != "group":
            raise ValueError(
                "sim.randomization.per is 'episode', but no episodes are sampled during training; leave it out"
            )
        if self.demonstrations.unscaled and self.acting.scale == "none":
            raise ValueError(
                "demonstrations.unscaled has no effect with acting.scale=none; set acting.scale=bounds_q99"
            )


class CloneRecipe(RobotDomain, SupervisedRecipe[ActionPolicy, Any]):
    """Imitates demonstrations; see the module."""

    config: CloneConfig
    policy: ActionPolicy
    own_loss = "behaviour_cloning"

    def __init__(self, config: CloneConfig, policy: ActionPolicy | None = None, sim: RobotSim | None = None) -> None:
        super().__init__(config)
        # before the simulator is opened, which may start processes
        read = load_demonstrations(config.demonstrations)
        sim = open_run_sim(config.sim, config.success) if sim is None else sim
        try:  # before a policy is loaded
            self.demonstrations: Demonstrations = read.fitted(config.demonstrations, sim, config.model.accept_other)
        except UserError:
            sim.close()
            raise
        self.open(config, policy, sim)
        self._check_views()
        scaled = config.acting.scale != "none"
        self.policy.statistics = self.demonstrations.statistics(config.demonstrations.unscaled) if scaled else None
        # the statistics are saved with the policy, which normalises in the simulator as it did here
        self.policy.scale_states(self._state_statistics())
        self.scale = action_scale(self.policy, config.acting)

    def check_data(self) -> None:
        """Reject actions of another length than the simulator's; raises UserError."""
        found = self.demonstrations.actions[0].shape[1]
        if found != self.sim.action_size:
            raise UserError(
                f"the actions of {self.config.demonstrations.path} have {found} entries, but the simulator's have "
                f"{self.sim.action_size}"
            )

    def _state_statistics(self) -> StateStatistics:
        """Statistics of the demonstrations' states; raises UserError for a minimum that the policy would not use."""
        found, minimum = self.demonstrations.state_statistics(), self.config.demonstrations.min_state_std
        if type(self.policy).scale_states is ActionPolicy.scale_states:
            if minimum:
                raise UserError(
                    f"demonstrations.min_state_std is {minimum:g}, but a {type(self.policy).__name__} standardises its "
                    "states itself; remove it"
                )
            return found
        quiet = [] if minimum else found.quiet()
        if quiet and getattr(read_sizes(self.policy), "state_size", 0) is not None:
            names = interface_of(self.sim).state or [f"entry {number}" for number in range(found.size)]
            LOGGER.warning(
                "state entries that hardly move in the demonstrations: %s (standard deviation at most %.2g); small "
                "changes of them will look large to the policy, so set demonstrations.min_state_std, such as 0.05 for "
                "metres and radians, or record demonstrations with noise",
                *(", ".join(names[number] for number in quiet), found.std[quiet].max()),
            )
        return found.at_least(minimum)

    def _check_views(self) -> None:
        found, wanted = len(self.config.demonstrations.views), self.policy.views
        if found != (len(views_of(self.sim)) if wanted is None else wanted):
            raise UserError(
                f"demonstrations.views lists {found} cameras in addition to demonstrations.camera, but the policy "
                f"uses {len(views_of(self.sim)) if wanted is None else wanted} in addition to its first one"
            )

    def load_train_tasks(self) -> Sequence[Any]:
        """Every transition of the demonstrations."""
        return self.demonstrations.transitions

    def data_digest(self) -> str:
        """Digest of the demonstrations: all states, actions and instructions, and some of the images."""
        return self.demonstrations.digest()

    def batch(self, policy: ActionPolicy, tasks: Sequence[Any], streams: Streams, step: Step) -> Rollouts:
        """Look up observations and actions; nothing is simulated."""
        device = policy.device
        observed = self.demonstrations.observations(tasks, policy.past)
        done, mask = (torch.from_numpy(part) for part in self.demonstrations.chunks(tasks, policy.chunk))
        actions = done if self.scale is None else self.scale.normalise(done)
        rows = len(tasks)
        # one per row: the noise of a row depends neither on the minibatch nor on the process
        seeds = streams.seeds(rows, 1)
        payload = TransitionPayload(observed, actions, mask, seeds).to(device)
        zeros = torch.zeros_like(payload.mask)
        return Rollouts(
            group=torch.arange(rows, device=device),
            # the loss mask; the payload's mask still has the steps of unusable chunks
            mask=_trained_steps(policy, payload.mask),
            logp_old=zeros,
            reward=zeros[:, 0],
            advantage=zeros,
            payload=payload,
        )

    def scores(self, policy: nn.Module, rollouts: Rollouts, outputs: frozenset[str]) -> PolicyOutputs:
        """Not defined: demonstrations are only used by the policy's own loss."""
        raise NotImplementedError("behaviour cloning has no log-probabilities of decisions")

    def loss(self, policy: nn.Module, minibatch: Rollouts, denominators: Denominators, step: Step) -> LossOutput:
        """The policy's cloning loss, averaged over the control steps of the optimiser step."""
        payload = TransitionPayload.of(minibatch)
        generator = RowGenerators.seeded(payload.noise_seed.tolist())
        loss, metrics = policy("bc_loss", payload.inputs, payload.actions, payload.mask, generator)
        count = float(minibatch.loss_mask.sum())
        # a mean over this minibatch becomes its part of the mean over the whole optimiser step
        share = count / denominators.tokens
        found = {"loss/total": Metric.summed(loss.detach() * share)}
        found |= {name: Metric(value * count, count) for name, value in metrics.items()}
        return LossOutput(loss * share, found)

    def describe(self) -> str:
        """Name of the loss."""
        return f"behaviour cloning of {self.demonstrations.num_transitions} transitions"

    def describe_row(self, rollouts: Rollouts, row: int) -> None:
        """Demonstrations give no samples."""
        return None

    def step_metrics(self, rollouts: Rollouts) -> dict[str, float | Metric]:
        """Number of transitions and of skipped demonstrations."""
        return {
            "data/transitions": float(self.demonstrations.num_transitions),
            "data/skipped": float(self.demonstrations.skipped),
        }


def _trained_steps(policy: ActionPolicy, mask: Tensor) -> Tensor:
    """(B, K) control steps over which the policy's loss is averaged; 0 in chunks that it cannot use."""
    # a single log-probability of a chunk has no value for its first steps alone, see `ModuleAdapter.bc_loss`
    return mask * mask.prod(1, keepdim=True) if policy.decisions == 1 else mask
