"""PPO on episodes with a critic of the simulator's full state: each action chunk has its own advantage.

    r_k = w_s success_k + w_e sum_t r_t + w_p (R_k - R_{k-1}),    R_k the environment's reward at the end of chunk k,
    A_k = sum_{l >= k} (gamma lambda)^(l - k) (r_l + gamma V(s_{l+1}) - V(s_l)),
    loss = mean of max(-A_k rho, -A_k clip(rho, 1 - 0.2, 1 + 0.28)) + c (V(s_k) - (A_k + V_old(s_k)))^2 / 2.

An episode's 0/1 reward, shared by all its decisions as in GRPO, says little about each of some hundred of them. Here
all decisions of a chunk share the chunk's advantage, and rho is the ratio of each decision. gamma and lambda count
chunks. The critic is asymmetric: it is used in training only, so it reads the poses of all pieces and the elapsed time
from the simulator, and no image. A fixed time limit is therefore a state that it knows, and ends an episode like any
other end (`objective.advantage.truncation: terminate`). A limit that the critic cannot know, such as a watchdog of the
environment's own, or one that is not part of the task, is none of these: with `truncation: bootstrap` an episode that
was cut off, by the horizon or by the environment's `truncated`, ends in the critic's value of its last state. The
critic then reads no time, since what follows a cut does not depend on it.

r_t are the environment's own rewards of the chunk's control steps, and R_{-1} = 0. `reward.success` pays the chunk that
solves the task, `reward.environment` the environment's own rewards, and `reward.potential` what a chunk added to its
reward, for simulators whose reward says how far the task has come (in the tabletop tasks from 0 to 1).
`shuffle_success` is the control: the successes of a batch, of all processes, are shuffled among the episodes of a task,
so that learning with it does not come from success. A success ends its episode, and early pay is discounted less, so
short episodes would still look better; the control therefore pays as if at the horizon, r gamma^(C - 1 - k) in chunk k
of at most C.

Shapes: B episodes, C chunks, S entries of the full state, K task names.

Source: PPO, arXiv 1707.06347; GAE, arXiv 1506.02438; critic of the full state: Pinto et al., arXiv 1710.06542; PPO for
vision-language-action policies with values per chunk: RLinf-VLA, arXiv 2510.06710, whose critic reads the hidden state
of the policy's own network. Time limits: Pardo et al., arXiv 1712.00378, section 3 (a critic that knows the time) and
section 4 (partial-episode bootstrapping); Stable-Baselines3 on_policy_algorithm.py, collect_rollouts.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from accelerate import Accelerator, PartialState
from torch import Tensor, nn

from mmrl.core.objectives.objective import PolicyOutputs
from mmrl.core.payload import to_device, to_host
from mmrl.core.returns import explained_variance
from mmrl.core.rollouts import Rollouts
from mmrl.fields import bounded, rare
from mmrl.training.objectives import ObjectiveConfig, make_objective
from mmrl.training.processes import from_all, make_generator
from mmrl.training.recipe import LossTerm, Passes, Step
from mmrl.training.settings import TrainerConfig
from robotics.episodes.collect import Episodes
from robotics.episodes.payload import EpisodePayload
from robotics.methods import PPO_SCORES
from robotics.methods.critic import CriticConfig, StateCritic, critic_inputs, last_inputs
from robotics.methods.robot_recipe import RobotConfig, RobotRecipe
from robotics.policies.base.action_policy import ActionChoice, ActionPolicy
from robotics.policies.base.action_statistics import StateStatistics
from robotics.policies.base.saved import read_weights, write_weights
from robotics.sim.episodes import RobotSim
from robotics.sim.opening import SimConfig

LOGGER = logging.getLogger("mmrl")
CRITIC_FOLDER = "critic"


class PolicyWithCritic(ActionPolicy):
    """A policy and a critic that are trained and saved together; acting only needs the policy.

    `save_pretrained` writes the policy's own folder, which `open_policy` loads, and the critic into it.
    """

    critic_parts = ("critic",)

    def __init__(self, policy: ActionPolicy, critic: StateCritic, learning_rate_factor: float = 1.0) -> None:
        super().__init__()
        self.policy = policy
        self.critic = critic
        self.chunk = policy.chunk
        self.action_size = policy.action_size
        # copies: they are fixed by the policy's class and sizes
        self.decisions = policy.decisions
        self.by_step = policy.by_step
        self.learning_rate_factors = {"critic": learning_rate_factor}

    # properties, since cloning and loading set them on the policy later
    statistics = property(lambda self: self.policy.statistics)
    mixes = property(lambda self: self.policy.mixes)
    inpaints = property(lambda self: self.policy.inpaints)
    past = property(lambda self: self.policy.past)
    views = property(lambda self: self.policy.views)
    cameras = property(lambda self: self.policy.cameras)
    image_fit = property(lambda self: self.policy.image_fit)
    action_bounds = property(lambda self: self.policy.action_bounds)
    action_range = property(lambda self: self.policy.action_range)
    interface = property(lambda self: self.policy.interface)
    config = property(lambda self: getattr(self.policy, "config", None))

    def act(self, *arguments: Any, **options: Any) -> ActionChoice:
        return self.policy.act(*arguments, **options)

    def log_probs(self, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        return self.policy.log_probs(*arguments, **options)

    def bc_loss(self, *arguments: Any, **options: Any) -> tuple[Tensor, dict[str, float]]:
        return self.policy.bc_loss(*arguments, **options)

    def values(self, inputs: Tensor) -> Tensor:
        """Values (...) of inputs of `critic_inputs`.

        Gradient: into the critic.
        """
        return self.critic(inputs)

    def forward(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call `act`, `log_probs`, `bc_loss` or `values` by name."""
        # by name, since distributed wrappers only intercept `forward`
        return self.values(*arguments) if method == "values" else super().forward(method, *arguments, **options)

    def executed_mask(self, steps: Tensor) -> Tensor:
        return self.policy.executed_mask(steps)

    def scale_states(self, statistics: StateStatistics) -> None:
        self.policy.scale_states(statistics)

    def save_pretrained(self, path: Path | str) -> None:
        """Write the policy's folder and the critic into it."""
        self.policy.save_pretrained(path)
        # a subfolder, so that the policy's own files stay what `open_policy` expects
        write_weights(self.critic, Path(path) / CRITIC_FOLDER)

    def export(self, path: Path | str) -> None:
        """Write only the policy."""
        self.policy.export(path)

    def load_weights(self, path: Path | str) -> None:
        """Restore what `save_pretrained` wrote; raises UserError if the critic is missing or different."""
        self.policy.load_weights(path)
        read_weights(self.critic, Path(path) / CRITIC_FOLDER)


def _objective() -> ObjectiveConfig:
    return ObjectiveConfig(
        preset="ppo",
        advantage={"kind": "gae_turn", "gamma": 0.99, "lam": 0.95, "truncation": "terminate"},
        scaling={"whiten": "turns"},
        clip={"low": 0.2, "high": 0.28},
        kl={"coef": 0.0},
        value={"coef": 0.5, "clip": None},
    )


class ChunkWeights(NamedTuple):
    """Weights of the components of a chunk's reward, see `ChunkRewardConfig`."""

    success: float
    environment: float
    potential: float


@dataclass
class ChunkRewardConfig:
    """Reward of a chunk of actions.

    If no weight is set, `environment` is 1 with sim.kind gymnasium and `success` is 1 otherwise. If one is set, the
    others default to 0.
    """

    success: float | None = rare(bounded(None, at_least=0))
    """Reward for solving the task."""
    environment: float | None = rare(bounded(None, at_least=0))
    """Weight of the environment's own rewards, summed over the control steps of the chunk."""
    potential: float | None = rare(bounded(None, at_least=0))
    """Weight of the increase of the environment's reward from the end of one chunk to the next, for simulators whose
    reward measures progress, such as the tabletop."""

    def weights(self, kind: str) -> ChunkWeights:
        """The weights for a simulator of a kind."""
        given = (self.success, self.environment, self.potential)
        if given == (None, None, None):
            return ChunkWeights(0.0, 1.0, 0.0) if kind == "gymnasium" else ChunkWeights(1.0, 0.0, 0.0)
        return ChunkWeights(*(weight or 0.0 for weight in given))

    def check_end(self, sim: SimConfig) -> None:
        """Reject a paid success that does not end the episode, at whose end it is paid; raises ValueError."""
        options = {**sim.options, **(sim.options.get("settings") or {})}
        if self.weights(sim.kind).success and options.get("end_at_success") is False:
            raise ValueError(
                "reward.success is paid at the end of an episode, but sim.options has end_at_success: false, so the "
                "task may be solved long before; remove end_at_success, or set reward.success=0"
            )

    def validate(self) -> None:
        """Reject a reward that is always 0; raises ValueError."""
        if not any(self.weights("")):
            raise ValueError(
                "reward.success, reward.environment and reward.potential are all 0; nothing would be rewarded"
            )


@dataclass
class RobotPpoParts:
    """Options of PPO; inherit from this before `RobotConfig`."""

    scored_outputs: ClassVar[tuple[str, ...]] = PPO_SCORES
    reward: ChunkRewardConfig = field(default_factory=ChunkRewardConfig)
    """Reward of a chunk."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """The critic."""
    shuffle_success: bool = False
    """Control: shuffle the successes among the episodes of a task; metrics still use the real ones."""
    objective: ObjectiveConfig = field(default_factory=_objective)
    """Credit assignment, clip range and value loss; the advantage needs a critic."""
    trainer: TrainerConfig = field(
        default_factory=lambda: TrainerConfig(old_logp="auto", samples_per_task=1, tasks_per_step=64, epochs=2)
    )
    """Batch sizes, optimiser and guards; with a critic no groups are needed, so every episode may start from a
    different initial state."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        super().validate()  # type: ignore[misc]
        treatment = getattr(make_objective(self.objective).advantage, "truncation", "terminate")
        if self.shuffle_success and treatment != "terminate":
            raise ValueError(
                "shuffle_success rewards episodes as if each ended at the horizon, but "
                f"objective.advantage.truncation is '{treatment}'; set it to terminate"
            )
        sim: SimConfig = self.sim  # type: ignore[attr-defined]
        self.reward.check_end(sim)
        weights = self.reward.weights(sim.kind)
        real = {"environment": weights.environment, "potential": weights.potential}
        for name, weight in real.items():
            if self.shuffle_success and weight:
                raise ValueError(
                    f"shuffle_success shuffles successes, but reward.{name} is {weight:g} and would still reward the "
                    "real outcome; use only reward.success"
                )


@dataclass
class RobotPpoConfig(RobotPpoParts, RobotConfig):  # type: ignore[misc]
    """A PPO run of a robot policy."""


class ChunkCritic(LossTerm):
    """Values of the critic before the update; scales its inputs by the first episodes; adds nothing to the loss.

    The critic runs separately from the policy, so that the images are not encoded again.
    """

    name = "chunk_critic"
    gradient = "never"

    def __init__(self, recipe: RobotPpoRecipe) -> None:
        self.recipe = recipe

    def provides(self, step: Step) -> frozenset[str]:
        """The values."""
        return frozenset({"values"})

    def prepare(self, passes: Passes, rollouts: Rollouts, step: Step) -> Rollouts:
        """Scale the critic's inputs in the first step, and compute its values."""
        recipe = self.recipe
        # once: a scale that moved with the data would change what the critic's weights mean
        if not bool(recipe.policy.critic.fitted):  # on the episodes of all processes
            inputs, steps = to_host([recipe.critic_inputs(rollouts), EpisodePayload.of(rollouts).steps])
            # chunks that no episode reached hold padding, which would shift the scale
            parts = from_all(inputs[steps > 0])
            recipe.policy.critic.fit_scale(to_device(torch.cat(parts), rollouts.mask.device))
        with torch.no_grad():
            values = recipe.values(passes.policy, rollouts)
            if recipe.truncation != "bootstrap":
                return rollouts.replace(values=values)
            after = recipe.values_after(passes.policy, rollouts)
        return rollouts.replace(values=values, extras=rollouts.extras | {"bootstrap_value": after})


class RobotPpoRecipe(RobotRecipe):
    """Rewards by chunk and a critic; see the module."""

    config: Any
    policy: PolicyWithCritic

    def __init__(self, config: Any, policy: ActionPolicy | None = None, sim: RobotSim | None = None) -> None:
        super().__init__(config, policy, sim)
        self._weights = config.reward.weights(config.sim.kind)
        if self._weights.environment:
            self.refuse_returns(f"reward.environment is {self._weights.environment:g}; use reward.potential")
        # all tasks of the simulator, so that the inputs keep their order whichever tasks a batch has
        self.task_names = list(self.sim.tasks())
        # the state, the elapsed time and one entry per task name
        size = getattr(self.sim, "full_state_size", self.sim.state_size) + 1 + len(self.task_names)
        critic = StateCritic(size, config.critic.width, config.seed)
        acting: Any = self.policy
        # wrapped here, after `open` has checked the policy against the simulator
        self.policy = PolicyWithCritic(acting, critic, config.critic.factor(config.trainer.learning_rate))
        self.terms = [*self.terms, ChunkCritic(self)]
        self.truncation = getattr(self.objective.advantage, "truncation", "terminate")
        """Treatment of episodes that a time limit cut off."""
        # only with terminate: bootstrapping is right for limits that the critic does not know
        self._ages_cut: dict[str, int] | None = {} if self.truncation == "terminate" else None
        # the control shuffles over all rows of the step, so groups cannot be scored one by one
        self.scores_apart = not config.shuffle_success

    def pack(self, episodes: Episodes, group: Tensor, policy: ActionPolicy) -> Rollouts:
        """See `RobotRecipe.pack`; the chunks are the turns, with a reward each."""
        rollouts = super().pack(episodes, group, policy)
        payload = EpisodePayload.of(rollouts)
        self._warn_of_unknown_limits(payload, rollouts.host.group)
        chunks = torch.arange(payload.steps.shape[1], device=rollouts.mask.device)
        # a turn per chunk: GAE then adds up over chunks instead of decisions
        turn = chunks.repeat_interleave(self._decisions_of_chunk)
        rollouts = rollouts.replace(turn=turn.expand_as(rollouts.mask).contiguous())
        if payload.truncated is not None:
            rollouts = rollouts.replace(extras=rollouts.extras | {"truncated": payload.truncated.to(rollouts.mask)})
        return _paid(rollouts, self._rewards(payload))

    def score(self, rollouts: Rollouts, step: Step) -> Rollouts:
        """See `RobotRecipe.score`; the control pays shuffled successes."""
        if self.config.shuffle_success:
            # the same stream on every process, because each shuffles the rows of all
            generator = make_generator(self.config.seed, "shuffle", step.number)
            rollouts = _paid(rollouts, self._shuffled_rewards(rollouts, generator))
        return super().score(rollouts, step)

    def _rewards(self, payload: EpisodePayload) -> Tensor:
        return chunk_rewards(payload, self._weights)

    def _shuffled_rewards(self, rollouts: Rollouts, generator: torch.Generator) -> Tensor:
        """(B, C) rewards of the control; the return from a chunk does not depend on when the episode ended."""
        payload = EpisodePayload.of(rollouts)
        groups = rollouts.group.tolist()
        tasks = [payload.episodes[index].task for index in groups]
        rows = _Rows(payload.success.tolist(), payload.failed.tolist(), tasks, groups)
        # every process shuffles the rows of all and keeps its own
        shuffled = torch.tensor(_shuffled_everywhere(rows, generator), device=payload.success.device)
        # only the payment is shuffled: metrics read the payload's real successes
        rewards = self._rewards(dataclasses.replace(payload, success=shuffled))
        gamma = getattr(self.objective.advantage, "gamma", 1.0)
        # the last chunk that an episode could have, whichever chunk it ended in
        last = math.ceil(self.sim.horizon / (self.config.acting.n_action_steps or self.policy.chunk)) - 1
        # discounted from the horizon, so that the return from chunk 0 does not depend on when an episode ended
        return rewards * gamma ** (last - torch.arange(rewards.shape[1], device=rewards.device))

    def rewards(self, rollouts: Rollouts, step: Step) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum of the chunks' rewards; the environment's own is reported."""
        own = self.own_reward(EpisodePayload.of(rollouts))
        return rollouts.extras["decision_reward"].sum(1), {self.own_term: own}

    def scores(self, policy: nn.Module, rollouts: Rollouts, outputs: frozenset[str]) -> PolicyOutputs:
        """See `RobotRecipe.scores`; each decision has the value of its chunk."""
        found = super().scores(policy, rollouts, outputs)
        return dataclasses.replace(found, values=self.values(policy, rollouts)) if "values" in outputs else found

    def advantages(self, rollouts: Rollouts, accelerator: Accelerator, step: Step) -> Rollouts:
        """Advantages as usual; logs how much of the variance of the returns the critic explained before the update."""
        found = super().advantages(rollouts, accelerator, step)
        self.noted["critic/explained"] = _explained(found)
        return found

    def values(self, policy: nn.Module, rollouts: Rollouts) -> Tensor:
        """(B, T) value of each decision's chunk."""
        # all decisions of a chunk are made in one state, so they share its value
        values = policy("values", self.critic_inputs(rollouts))
        return values.repeat_interleave(self._decisions_of_chunk, 1)[:, : rollouts.num_decisions]

    def values_after(self, policy: nn.Module, rollouts: Rollouts) -> Tensor:
        """(B,) value of the last state of an episode that was cut off; 0 for others, NaN if it is not reported."""
        payload = EpisodePayload.of(rollouts)
        cut = rollouts.extras["truncated"] > 0
        # NaN, not 0: a missing state must show, since 0 would pay a cut like an end
        inputs = last_inputs(payload, rollouts.host.group, self.task_names)
        found = torch.full_like(rollouts.reward, math.nan) if inputs is None else policy("values", inputs)
        # episodes that ended by themselves have no future: 0
        return torch.where(cut, found, 0.0)

    @property
    def _decisions_of_chunk(self) -> int:
        return self.policy.decisions if self.config.logp_level == "token" else 1

    def critic_inputs(self, rollouts: Rollouts) -> Tensor:
        """Inputs of the critic before each chunk (B, C, ...); with the elapsed time if the horizon ends episodes."""
        payload = EpisodePayload.of(rollouts)
        # what follows a cut does not depend on the time, so a bootstrapping critic must not read it
        horizon = self.sim.horizon if self.truncation == "terminate" else None
        return critic_inputs(payload, rollouts.host.group, self.task_names, horizon)

    def _warn_of_unknown_limits(self, payload: EpisodePayload, group: Tensor) -> None:
        """Warn once about a time limit that the critic cannot know: it cuts off a task's episodes at different ages."""
        if self._ages_cut is None or payload.truncated is None:
            return
        truncated, lengths = to_host([payload.truncated, payload.lengths])
        for row in torch.nonzero(truncated)[:, 0].tolist():
            task, age = payload.episodes[int(group[row])].task, int(lengths[row])
            # a horizon that the critic knows cuts off all episodes of a task at the same age
            first = self._ages_cut.setdefault(task, age)
            if age != first:
                LOGGER.warning(
                    "episodes of %s were cut off after %d and after %d control steps: the critic cannot know this "
                    "limit, and objective.advantage.truncation is 'terminate', which ignores everything after it; "
                    "use bootstrap, which adds the critic's value of the last state",
                    *(task, first, age),
                )
                self._ages_cut = None
                return


def chunk_rewards(payload: EpisodePayload, weights: ChunkWeights) -> Tensor:
    """(B, C) reward of each chunk; 0 if it was not reached or the environment failed."""
    assert payload.chunk_returns is not None
    assert payload.chunk_last_rewards is not None
    reached = payload.steps > 0
    # the last chunk that was reached is the one that ended the episode, so success is paid there
    later = nn.functional.pad(reached[:, 1:], (0, 1))
    ends = payload.chunk_last_rewards
    # the potential before the first chunk counts as 0
    gain = ends - nn.functional.pad(ends[:, :-1], (1, 0))
    solved = (reached & ~later & payload.success[:, None]).to(gain.dtype)
    found = weights.success * solved + weights.environment * payload.chunk_returns + weights.potential * gain
    # without the mask, padding after the end would take back the last potential as a negative gain
    return torch.where(reached & ~payload.failed[:, None], found, 0.0)


def shuffled_successes(success: Tensor, failed: Tensor, tasks: Sequence[str], generator: torch.Generator) -> Tensor:
    """Shuffle the successes (B,) of each task, as a control; episodes whose environment failed (B,) keep theirs."""
    shuffled = success.clone()
    for task in dict.fromkeys(tasks):
        # per task: shuffled across tasks, an easy task would pay a hard one
        rows = torch.tensor([here == task for here in tasks], device=shuffled.device) & ~failed
        places = rows.nonzero()[:, 0]
        order = torch.randperm(len(places), generator=generator, device=generator.device).to(places.device)
        shuffled[places] = success[places[order]]
    return shuffled


class _Rows(NamedTuple):
    """Episodes of one process or of all processes, B entries each."""

    success: list[bool]
    failed: list[bool]
    """Whether the environment failed."""
    tasks: list[str]
    groups: list[int]


def _shuffled_everywhere(mine: _Rows, generator: torch.Generator) -> list[bool]:
    """Successes of these rows, shuffled among the rows of all processes in the order in which one process has them."""
    state = PartialState()
    parts = from_all(mine)
    # groups are dealt to processes in turn, so local group g of rank r is number g * processes + r
    places = [(group * len(parts) + rank, rank) for rank, part in enumerate(parts) for group in part.groups]
    # in the order of one process, so that the shuffle does not depend on the number of processes
    order = sorted(range(len(places)), key=places.__getitem__)
    episodes = [each for part in parts for each in zip(part.success, part.failed, part.tasks, strict=True)]
    found = shuffled_successes(
        torch.tensor([episodes[row][0] for row in order]),
        torch.tensor([episodes[row][1] for row in order]),
        [episodes[row][2] for row in order],
        generator,
    )
    own = state.process_index if len(parts) > 1 else 0
    # in the order of `_Rows`: sorting by group keeps a process's rows in their order
    return [value for row, value in zip(order, found.tolist(), strict=True) if places[row][1] == own]


def _paid(rollouts: Rollouts, rewards: Tensor) -> Rollouts:
    """The rollouts with the rewards (B, C) of their chunks."""
    return rollouts.replace(extras={**rollouts.extras, "decision_reward": _at_last_decisions(rewards, rollouts.mask)})


def _at_last_decisions(rewards: Tensor, mask: Tensor) -> Tensor:
    """(B, T) with the rewards (B, C) at the last trained decision of each chunk."""
    each = mask.shape[1] // rewards.shape[1]
    trained = mask.unflatten(1, (rewards.shape[1], each)) > 0
    # a chunk that was cut short ends in masked decisions, and a reward there would be lost
    last = trained & ~nn.functional.pad(trained[..., 1:], (0, 1))
    return (rewards[..., None] * last).flatten(1)


def _explained(rollouts: Rollouts) -> float:
    """Fraction of the variance of all processes' returns that the critic explained."""
    assert rollouts.returns is not None
    assert rollouts.values is not None
    returns, values, mask = to_host([rollouts.returns, rollouts.values, rollouts.loss_mask])
    # over all processes, because a ratio of variances cannot be averaged
    rows = from_all((returns[mask > 0], values[mask > 0]))
    return explained_variance(*map(torch.cat, zip(*rows, strict=True)))
