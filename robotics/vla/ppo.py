"""PPO on episodes with a critic that sees the simulator's full state: credit for every chunk of actions.

    r_k = w_s success_k + w_p (R_k - R_{k-1}),    R_k the simulator's own reward after chunk k,  R_{-1} = 0,
    A_k = sum_{l >= k} (gamma lambda)^(l - k) (r_l + gamma V(s_{l+1}) - V(s_l)),
    loss = mean of max(-A_k rho, -A_k clip(rho, 1 - 0.2, 1 + 0.28)) + c (V(s_k) - (A_k + V_old(s_k)))^2 / 2.

An episode's 0/1 reward, shared by all its decisions as in GRPO, says little about each of some hundred of them. Here
all decisions of a chunk share the chunk's own advantage, and rho is the ratio of each decision. gamma and lambda count
chunks. The critic is asked only in training, so it reads the poses of all pieces and the time that has gone by, and no
image; a time limit is therefore a state that it knows, and ends an episode like any other end.

`reward.success` pays the chunk that solves the task, `reward.progress` what a chunk added to the simulator's reward
(hand-written in the tabletop tasks, from 0 to 1). `shuffle_success` is the control: the successes of a batch are
shuffled among the episodes of a task, so what is learned with it does not come from success. A success ends its
episode, and what is paid early is discounted less, so short episodes would still look better; the control therefore
pays as if at the horizon, r gamma^(C - 1 - k) in chunk k of the C that there can be.

Source: PPO, arXiv 1707.06347; GAE, arXiv 1506.02438; critic of the full state: arXiv 1710.06542; PPO for
vision-language-action policies with values by chunk: RLinf-VLA, arXiv 2510.06710.

Differences: RLinf's critic reads the hidden state of the policy's own network; this one is apart and reads the
simulator.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from mmrl.core.aggregation import Denominators
from mmrl.core.objective import PolicyOutputs
from mmrl.core.rollouts import Rollouts
from mmrl.fields import bounded, rare
from mmrl.training.loop.objectives import ObjectiveConfig
from mmrl.training.loop.settings import TrainerConfig
from mmrl.training.loop.terms import LossTerm, Passes, Step, TermLoss
from robotics.sim.episodes import RobotSim
from robotics.vla.critic import CriticConfig, PolicyWithCritic, StateCritic, critic_inputs
from robotics.vla.payload import EpisodePayload
from robotics.vla.policy import ActionPolicy
from robotics.vla.recipe import SCORES, RobotConfig, RobotRecipe


def _objective() -> ObjectiveConfig:
    return ObjectiveConfig(
        preset="ppo",
        advantage={"kind": "gae_turn", "gamma": 0.99, "lam": 0.95, "truncation": "terminate"},
        scaling={"whiten": "turns"},
        clip={"low": 0.2, "high": 0.28},
        kl={"coef": 0.0},
        value={"coef": 0.5, "clip": None},
    )


@dataclass
class ChunkRewardConfig:
    """What a chunk of actions is paid for."""

    success: float = rare(bounded(1.0, at_least=0))
    """Solving the task."""
    progress: float = rare(bounded(0.0, at_least=0))
    """What it added to the simulator's own reward."""

    def validate(self) -> None:
        """Refuse a reward of nothing; raises ValueError."""
        if self.success == 0 and self.progress == 0:
            raise ValueError("reward.success and reward.progress are both 0; nothing would be rewarded")


@dataclass
class RobotPpoConfig(RobotConfig):
    """A PPO run of a robot policy."""

    scored_outputs: ClassVar[tuple[str, ...]] = (*SCORES, "values", "turns")
    reward: ChunkRewardConfig = field(default_factory=ChunkRewardConfig)
    """What a chunk is paid for."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """The critic."""
    shuffle_success: bool = False
    """Control: deal the successes out at random among the episodes of a task; metrics still count the real ones."""
    objective: ObjectiveConfig = field(default_factory=_objective)
    """Credit, clip range and value loss; the advantage needs a critic."""
    trainer: TrainerConfig = field(
        default_factory=lambda: TrainerConfig(old_logp="sampler", samples_per_task=1, tasks_per_step=64, epochs=2)
    )
    """Batch sizes, optimiser and guards; a critic needs no group, so every episode may start elsewhere."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        super().validate()
        if self.shuffle_success and self.reward.progress:
            raise ValueError(
                f"shuffle_success deals successes out at random, but reward.progress is {self.reward.progress:g} and "
                "would still pay real progress; set it to 0"
            )


class ChunkCritic(LossTerm):
    """Values of the critic before the update, whose inputs are scaled by the first episodes; adds nothing to the loss.

    The critic is asked apart from the policy, so that the images are not encoded once more.
    """

    name = "chunk_critic"
    gradient = "never"

    def __init__(self, recipe: RobotPpoRecipe) -> None:
        self.recipe = recipe

    def provides(self, step: Step) -> frozenset[str]:
        """The values."""
        return frozenset({"values"})

    def prepare(self, passes: Passes, rollouts: Rollouts, step: Step) -> Rollouts:
        """Scale the critic's inputs in the first step, and ask it."""
        recipe = self.recipe
        seen = EpisodePayload.of(rollouts).steps > 0
        recipe.policy.critic.fit_scale(recipe.critic_inputs(rollouts)[seen])
        with torch.no_grad():
            return rollouts.replace(values=recipe.values(passes.policy, rollouts))

    def __call__(
        self, policy: nn.Module, minibatch: Rollouts, scores: PolicyOutputs, counts: Denominators, step: Step
    ) -> TermLoss:
        """Nothing; the objective has the critic's loss."""
        return TermLoss()


class RobotPpoRecipe(RobotRecipe):
    """Rewards by chunk and a critic; see the module."""

    config: RobotPpoConfig
    policy: PolicyWithCritic

    def __init__(self, config: RobotPpoConfig, policy: ActionPolicy | None = None, sim: RobotSim | None = None) -> None:
        super().__init__(config, policy, sim)
        self.task_names = list(self.sim.tasks())
        size = getattr(self.sim, "full_state_size", self.sim.state_size) + 1 + len(self.task_names)
        critic = StateCritic(size, config.critic.width, config.seed)
        acting: Any = self.policy
        self.policy = PolicyWithCritic(acting, critic, config.critic.factor(config.trainer.learning_rate))
        self.terms = [ChunkCritic(self)]

    def rollout(self, policy: ActionPolicy, tasks: Sequence[Any], generator: torch.Generator, step: Step) -> Rollouts:
        """See `RobotRecipe.rollout`; the chunks are the turns, with a reward each."""
        rollouts = super().rollout(policy, tasks, generator, step)
        payload = EpisodePayload.of(rollouts)
        chunks = torch.arange(payload.steps.shape[1], device=rollouts.mask.device)
        turn = chunks.repeat_interleave(self._decisions_of_chunk)
        rewards = self._shuffled_rewards(rollouts, generator) if self.config.shuffle_success else self._rewards(payload)
        return rollouts.replace(
            turn=turn.expand_as(rollouts.mask).contiguous(),
            extras={"decision_reward": _at_last_decisions(rewards, rollouts.mask)},
        )

    def _rewards(self, payload: EpisodePayload) -> Tensor:
        return chunk_rewards(payload, self.config.reward.success, self.config.reward.progress)

    def _shuffled_rewards(self, rollouts: Rollouts, generator: torch.Generator) -> Tensor:
        """(B, C) rewards of the control; equal returns from any chunk, whenever the episode ended."""
        payload = EpisodePayload.of(rollouts)
        tasks = [payload.episodes[index].task for index in rollouts.group.tolist()]
        shuffled = shuffled_successes(payload.success, payload.failed, tasks, generator)
        rewards = self._rewards(dataclasses.replace(payload, success=shuffled))
        gamma = getattr(self.objective.advantage, "gamma", 1.0)
        last = math.ceil(self.sim.horizon / (self.config.acting.n_action_steps or self.policy.chunk)) - 1
        return rewards * gamma ** (last - torch.arange(rewards.shape[1], device=rewards.device))

    def rewards(self, rollouts: Rollouts, step: Step) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum of the chunks' rewards; the simulator's own at the end is reported."""
        return rollouts.extras["decision_reward"].sum(1), {"dense": EpisodePayload.of(rollouts).progress}

    def scores(self, policy: nn.Module, rollouts: Rollouts, outputs: frozenset[str]) -> PolicyOutputs:
        """See `RobotRecipe.scores`; each decision has the value of its chunk."""
        found = super().scores(policy, rollouts, outputs)
        return dataclasses.replace(found, values=self.values(policy, rollouts)) if "values" in outputs else found

    def advantages(self, rollouts: Rollouts, accelerator: Accelerator, step: Step) -> Rollouts:
        """Advantages as usual; logs how much of the returns the critic knew before the update."""
        found = super().advantages(rollouts, accelerator, step)
        self.noted["critic/explained"] = _explained(found)
        return found

    def values(self, policy: nn.Module, rollouts: Rollouts) -> Tensor:
        """(B, T) value of each decision's chunk."""
        values = policy("values", self.critic_inputs(rollouts))
        return values.repeat_interleave(self._decisions_of_chunk, 1)[:, : rollouts.num_decisions]

    @property
    def _decisions_of_chunk(self) -> int:
        return self.policy.decisions if self.config.logp_level == "token" else 1

    def critic_inputs(self, rollouts: Rollouts) -> Tensor:
        """What the critic is given before each chunk (B, C, ...)."""
        payload = EpisodePayload.of(rollouts)
        return critic_inputs(payload, rollouts.group, self.task_names, self.sim.horizon)


def chunk_rewards(payload: EpisodePayload, success: float, progress: float) -> Tensor:
    """Reward of each chunk: for solving the task, and for what it added to the environment's own reward.

    Returns:
        (B, C) float32, 0 for chunks that were not reached and for rows whose environment failed.
    """
    assert payload.chunk_rewards is not None
    reached = payload.steps > 0
    later = nn.functional.pad(reached[:, 1:], (0, 1))
    gain = payload.chunk_rewards - nn.functional.pad(payload.chunk_rewards[:, :-1], (1, 0))
    solved = (reached & ~later & payload.success[:, None]).to(gain.dtype)
    found = success * solved + (progress * gain if progress else 0.0)
    return torch.where(reached & ~payload.failed[:, None], found, 0.0)


def shuffled_successes(success: Tensor, failed: Tensor, tasks: Sequence[str], generator: torch.Generator) -> Tensor:
    """Deal the successes out among the episodes of a task at random, the control of a reward for success.

    Args:
        success: (B,) bool.
        failed: (B,) bool, episodes whose environment failed; they keep what they have.
        tasks: name of each episode's task.
        generator: of the permutations.

    Returns:
        (B,) bool, with as many successes of each task as before.
    """
    shuffled = success.clone()
    for task in dict.fromkeys(tasks):
        rows = torch.tensor([here == task for here in tasks], device=shuffled.device) & ~failed
        places = rows.nonzero()[:, 0]
        order = torch.randperm(len(places), generator=generator, device=generator.device).to(places.device)
        shuffled[places] = success[places[order]]
    return shuffled


def _at_last_decisions(rewards: Tensor, mask: Tensor) -> Tensor:
    """(B, T) with the rewards (B, C) at the last trained decision of each chunk."""
    each = mask.shape[1] // rewards.shape[1]
    trained = mask.unflatten(1, (rewards.shape[1], each)) > 0
    last = trained & ~nn.functional.pad(trained[..., 1:], (0, 1))
    return (rewards[..., None] * last).flatten(1)


def _explained(rollouts: Rollouts) -> float:
    """Share of the variance of the returns that the critic explained; NaN where they do not differ."""
    assert rollouts.returns is not None
    assert rollouts.values is not None
    kept = rollouts.loss_mask > 0
    returns, missed = rollouts.returns[kept], (rollouts.returns - rollouts.values)[kept]
    spread = float(returns.var(correction=0)) if len(returns) else 0.0
    return 1 - float(missed.var(correction=0)) / spread if spread else float("nan")
