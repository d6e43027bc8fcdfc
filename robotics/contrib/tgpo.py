"""TGPO: a signal temporal logic formula, grounded in times that a policy must keep, on PPO with a critic.

    recipe: tgpo
    sim: {kind: tabletop, tasks: [reach], state: full, image_size: 0}
    tgpo:
      signals: {to_red: "norm(grip_x - first_x, grip_y - first_y)", to_green: "norm(grip_x - second_x, ...)"}
      formula: "eventually[0:20](to_green < 0.08 and eventually[1:20](to_red < 0.08))"

The formula is taken apart into subgoals, each of which has to hold at one time, and invariants, which hold during an
interval (`robotics.contrib.stl.ground`). The high level proposes the times, the plan of an episode; the low level is a
policy that sees the plan. The state gains the elapsed fraction of the episode and, for each subgoal, the time until it
is due and whether it still is, the time until it must be kept and whether it must be (all times as fractions of the
episode). The reward is dense: a control step earns

    progress (m_t - m_(t-1)) of the subgoal that is due next, m its margin,
    arrival / K at the time of each of the K subgoals, if it holds then,
    - violation / n at each of the n control steps of an invariant that is broken,
    satisfaction with the last control step, if the whole formula holds (robustness above 0).

In training the plan of an episode comes from a Metropolis-Hastings chain under the critic: a plan z' drawn again,
uniform in the windows of the formula, replaces z with probability min(1, exp((V(s_0, z') - V(s_0, z)) / temperature)),
`draws` times; `search: uniform` draws one plan without the critic. A share `explore` of the episodes is uniform anyway.
In evaluation, `candidates` plans are drawn and the critic chooses the best. Success is that of the formula.

The authors' code is not public, and the reward's exact terms and constants are not in what we could read of the paper:
decomposition, dense stage-wise rewards, time-conditioned PPO, chain and choice of the best plan follow its abstract and
summaries; the terms above, their weights and the proposal are ours.

Shapes: R rows, P subgoals, F entries of the critic's state.

Source: Meng et al., TGPO, arXiv 2510.00225.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from mmrl.core.payload import to_device
from mmrl.core.rollouts import Rollouts
from mmrl.errors import ConfigError
from mmrl.fields import bounded, choice, only_with, rare
from mmrl.training.processes import Streams
from mmrl.training.recipe import Step
from robotics.contrib.stl import Formula, Plan, ground, subgoals
from robotics.contrib.stl_sim import StlSim
from robotics.methods.ppo import ChunkRewardConfig, RobotPpoParts, RobotPpoRecipe
from robotics.methods.robot_recipe import RobotConfig
from robotics.policies.base.action_policy import ActionPolicy
from robotics.rewards.judged_sim import open_run_sim
from robotics.sim.episodes import ChunkResult, EpisodeSpec, RobotSim

if TYPE_CHECKING:
    from numpy.typing import NDArray

ENTRIES = 4
"""Entries that a subgoal adds to the state."""
Chooser = Callable[[Sequence[EpisodeSpec], "Proposals"], list[Plan]]


@dataclass
class StageRewardConfig:
    """Weights of the components of a control step's reward."""

    progress: float = bounded(1.0, at_least=0)
    """Weight of the change in the margin of the next subgoal, in the units of the formula's signals."""
    arrival: float = bounded(1.0, at_least=0)
    """Weight of the fraction of subgoals that hold at their times."""
    violation: float = bounded(1.0, at_least=0)
    """Weight of the fraction of an invariant's control steps at which it is violated."""
    satisfaction: float = bounded(1.0, at_least=0)
    """Weight of satisfying the whole formula, at the end of the episode."""


@dataclass
class TgpoSettings:
    """The formula, and the search for times."""

    formula: str = ""
    """Signal temporal logic formula over the state's entries, see `robotics.contrib.stl`."""
    signals: dict[str, str] = field(default_factory=dict)
    """Additional signals by name, as expressions of the state's entries."""
    search: str = choice("metropolis", ("metropolis", "uniform"))
    """How training plans are drawn: metropolis (a Markov chain guided by the critic) or uniform within the formula's
    windows."""
    draws: int = rare(only_with(bounded(10, at_least=1), search="metropolis"))
    """Number of steps of the Markov chain."""
    temperature: float = rare(only_with(bounded(0.3, above=0), search="metropolis"))
    """Difference of values at which a worse plan is accepted with probability 1/e."""
    explore: float = rare(only_with(bounded(0.3, at_least=0, at_most=1), search="metropolis"))
    """Fraction of training episodes whose plan is uniform regardless of `search`."""
    candidates: int = bounded(32, at_least=1)
    """Number of plans per evaluation episode, of which the critic selects the best."""
    reward: StageRewardConfig = field(default_factory=StageRewardConfig)
    """Reward of a control step."""

    def validate(self) -> None:
        """Reject a missing formula; raises ConfigError."""
        if not self.formula.strip():
            raise ConfigError("tgpo.formula is empty; set a formula, such as 'eventually[0:20](to_red < 0.05)'")


@dataclass
class TgpoConfig(RobotPpoParts, RobotConfig):  # type: ignore[misc]
    """A TGPO run."""

    tgpo: TgpoSettings = field(default_factory=TgpoSettings)
    """The formula, and the search for times."""
    reward: ChunkRewardConfig = field(default_factory=lambda: ChunkRewardConfig(environment=1.0))
    """Reward of a chunk; the environment's part is `tgpo.reward`."""


@dataclass(frozen=True)
class Proposals:
    """Plans for the episodes that begin, and how the critic evaluates them."""

    draw: Callable[[Sequence[np.random.Generator]], list[Plan]]
    """One plan for each row, by generators of the rows."""
    states: Callable[[Sequence[Plan]], NDArray[np.float32]]
    """(R, F) states at the beginning, with plans of the rows."""


class GroundedSim(StlSim):
    """Episodes with plans, which are part of the state and determine the reward; `chooser` makes the plans.

    Args:
        sim: runs the episodes.
        formula: text of the formula.
        signals: further signals.
        weights: of the parts of the reward.

    Raises:
        UserError: the formula cannot be read or planned.
    """

    def __init__(self, sim: RobotSim, formula: str, signals: Mapping[str, str], weights: StageRewardConfig) -> None:
        super().__init__(sim, formula, signals)
        self.goals: list[Formula] = subgoals(self.formula)
        self.weights = weights
        self.plans: dict[int, Plan] = {}
        self.chooser: Chooser = lambda episodes, proposals: proposals.draw(
            [np.random.default_rng([episode.layout]) for episode in episodes]
        )
        added = 1 + ENTRIES * len(self.goals)
        self.state_size = sim.state_size + added
        parts = [f"{part}_{number}" for number in range(len(self.goals)) for part in ("due", "ahead", "kept", "keep")]
        self.state_names = [*self.names, "elapsed", *parts]
        if hasattr(sim, "full_state"):
            self.full_state_size = getattr(sim, "full_state_size", sim.state_size) + added
            self.full_state = self._full_state

    def reset(self, episodes: Sequence[EpisodeSpec]) -> ChunkResult:
        """Begin episodes with a plan each."""
        self.plans = {}
        result = super().reset(episodes)
        rows = [int(row) for row in result.rows]
        # of rows that could not start too, whose states are zeros
        start = self._sim.full_state() if hasattr(self._sim, "full_state") else result.observation.state
        state = np.zeros((len(rows), start.shape[1]), np.float32)
        state[self._sim.live if len(start) < len(rows) else slice(None)] = start

        def draw(rngs: Sequence[np.random.Generator]) -> list[Plan]:
            return [ground(self.formula, self.goals, self.horizon, rng) for rng in rngs]

        def states(plans: Sequence[Plan]) -> NDArray[np.float32]:
            return np.concatenate([state, np.stack([self.features(plan, 0) for plan in plans])], 1)

        chosen = self.chooser(episodes, Proposals(draw, states)) if rows else []
        self.plans = dict(zip(rows, chosen, strict=True))
        return self._shown(result)

    def features(self, plan: Plan, time: int) -> NDArray[np.float32]:
        """(1 + 4 P,) what the policy sees of a plan at a control step."""
        found = np.zeros((len(self.goals), ENTRIES), np.float32)
        for at, goal in reversed(plan.reaches):  # the next one stays
            if at >= time:
                found[goal, :2] = (at - time) / self.horizon, 1.0
        for first, last, goal in reversed(plan.invariants):
            if last >= time:
                found[goal, 2:] = max(first - time, 0) / self.horizon, 1.0
        return np.concatenate([[time / self.horizon], found.flatten()]).astype(np.float32)

    def reward(self, row: int, over: bool) -> float:
        """Dense reward of the last control step; see the module."""
        plan, weights, signals = self.plans[row], self.weights, self.signals(row)
        # the last two control steps are all that the margins of subgoals need
        recent = {name: values[-2:] for name, values in signals.items()}
        margins = np.stack([goal.robustness(recent) for goal in self.goals], 1)
        time = len(self._traces[row]) - 1
        due = next((goal for at, goal in plan.reaches if at >= time), None)
        earned = 0.0 if due is None else weights.progress * float(margins[1, due] - margins[0, due])
        count = max(len(plan.reaches), 1)
        earned += weights.arrival / count * sum(at == time and margins[1, goal] > 0 for at, goal in plan.reaches)
        for first, last, goal in plan.invariants:
            broken = first <= time <= last and margins[1, goal] <= 0
            earned -= weights.violation * broken / (last - first + 1)
        return earned + weights.satisfaction * float(over and self.robustness(row) > 0)

    def _shown(self, result: ChunkResult) -> ChunkResult:
        """States with what the policy sees of the plans."""
        if not self.plans:  # before they are made
            return result
        rows = [int(row) for row in result.rows]
        seen = self._seen(rows)
        observed = replace(result.observation, state=np.concatenate([result.observation.state, seen], 1))
        full = None if result.full_state is None else np.concatenate([result.full_state, seen], 1)
        return replace(result, observation=observed, full_state=full)

    def _seen(self, rows: Sequence[int]) -> NDArray[np.float32]:
        if not rows:
            return np.zeros((0, self.state_size - self._sim.state_size), np.float32)
        return np.stack([self.features(self.plans[row], len(self._traces[row]) - 1) for row in rows])

    def _full_state(self) -> NDArray[np.float32]:
        """Full state of the live rows."""
        inner: Any = self._sim
        return np.concatenate([inner.full_state(), self._seen(inner.live.tolist())], 1)


class TgpoRecipe(RobotPpoRecipe):
    """PPO on episodes with plans; see the module."""

    config: TgpoConfig

    def __init__(self, config: TgpoConfig, policy: ActionPolicy | None = None, sim: RobotSim | None = None) -> None:
        opened = open_run_sim(config.sim, config.success) if sim is None else sim
        settings = config.tgpo
        try:
            grounded = GroundedSim(opened, settings.formula, settings.signals, settings.reward)
        except Exception:
            opened.close()
            raise
        super().__init__(config, policy, grounded)
        self.grounded = grounded
        grounded.chooser = self._best

    def rollout(self, policy: ActionPolicy, tasks: Sequence[Any], streams: Streams, step: Step) -> Rollouts:
        """Run episodes whose plans come from the chain."""
        self.grounded.chooser = lambda episodes, proposals: self._chain(policy, episodes, proposals, step)
        try:
            return super().rollout(policy, tasks, streams, step)
        finally:
            self.grounded.chooser = self._best

    def describe(self) -> str:
        """The objective's formula, that of the task, and its subgoals."""
        weights = self.config.tgpo.reward
        names = ", ".join(str(getattr(goal, "text", "a part without time")) for goal in self.grounded.goals)
        return (
            f"{super().describe()}\nformula: {self.config.tgpo.formula}\nsubgoals: {names}\nreward: "
            f"{weights.progress:g} progress + {weights.arrival:g} arrivals - {weights.violation:g} violations + "
            f"{weights.satisfaction:g} satisfaction; plans: {self.config.tgpo.search}"
        )

    def _chain(
        self, policy: nn.Module, episodes: Sequence[EpisodeSpec], proposals: Proposals, step: Step
    ) -> list[Plan]:
        """Plans of training."""
        settings = self.config.tgpo
        rngs = [self._generator(episode, "train", step.number) for episode in episodes]
        plans = proposals.draw(rngs)
        if settings.search == "uniform":
            return plans
        explored = [rng.random() < settings.explore for rng in rngs]
        values = self._values(policy, episodes, proposals.states(plans))
        for _ in range(settings.draws):
            others = proposals.draw(rngs)
            better = self._values(policy, episodes, proposals.states(others))
            # of log-probabilities: the exponential of a large gain would overflow
            gains = (better - values) / settings.temperature
            taken = [np.log(rng.random()) < gain for rng, gain in zip(rngs, gains, strict=True)]
            taken = [moves and not uniform for moves, uniform in zip(taken, explored, strict=True)]
            plans = [new if moves else old for new, old, moves in zip(others, plans, taken, strict=True)]
            values = np.where(taken, better, values)
        return plans

    def _best(self, episodes: Sequence[EpisodeSpec], proposals: Proposals) -> list[Plan]:
        """Plans of evaluation, the best of some by the critic."""
        rngs = [self._generator(episode, "eval", 0) for episode in episodes]
        drawn = [proposals.draw(rngs) for _ in range(self.config.tgpo.candidates)]
        values = np.stack([self._values(self.policy, episodes, proposals.states(plans)) for plans in drawn])
        return [drawn[choice][row] for row, choice in enumerate(values.argmax(0).tolist())]

    def _generator(self, episode: EpisodeSpec, purpose: str, step: int) -> np.random.Generator:
        """Random numbers that follow from run, step and initial state alone: equal episodes have equal plans."""
        draw = -1 if episode.draw is None else episode.draw
        name = zlib.crc32(f"{purpose}/{episode.task}/{episode.split}".encode())
        return np.random.default_rng([self.config.seed, step, name, episode.layout, draw + 1])

    def _values(
        self, policy: nn.Module, episodes: Sequence[EpisodeSpec], states: NDArray[np.float32]
    ) -> NDArray[np.float64]:
        """(R,) values of the critic at the beginning of episodes, by their states (R, F)."""
        number = torch.tensor([self.task_names.index(episode.task) for episode in episodes])
        task = nn.functional.one_hot(number, len(self.task_names)).to(torch.float32)
        # no time has elapsed, as in `robotics.methods.critic.critic_inputs`
        inputs = torch.cat([torch.from_numpy(states), torch.zeros(len(states), 1), task], 1)
        with torch.no_grad():
            values = policy("values", to_device(inputs, next(policy.parameters()).device))
        return values.double().cpu().numpy()
