"""A simulator whose reward is a formula of signal temporal logic, for any recipe that runs episodes.

    sim:
      kind: robotics.contrib.stl_sim:open_stl
      state: full
      options:
        formula: "eventually[0:15](to_green < 0.06 and eventually[0:20](to_red < 0.06))"
        signals: {to_red: "norm(grip_x - first_x, grip_y - first_y)", to_green: "norm(grip_x - second_x, ...)"}
        kind: tabletop                  # the simulator that runs the episodes, with the other options

The signals are the entries of the observed state by name (`state_names` of the simulator, else state_0, state_1, ...).
An episode earns its robustness (`robotics.contrib.stl`) with its last control step, and is a success if that is above
0. With `reward: return`, robot_grpo and robot_ppo learn from it.

Shapes: R rows, L of them live, K control steps of a chunk, S entries of the state.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.errors import UserError
from robotics.contrib.stl import Formula, parse
from robotics.sim.episodes import ChunkResult, EpisodeSpec, RobotObservation, RobotSim
from robotics.sim.opening import SimConfig, open_sim

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

PARTS = ("success", "terminated", "truncated", "failed", "object_poses", "full_state")
"""Fields of `ChunkResult` of which the last control step of a row counts."""


class StlSim:
    """Episodes of another simulator, with a reward from a formula.

    Args:
        sim: runs the episodes; `close` closes it.
        formula: text of the formula.
        signals: further signals, expressions of the state's entries.

    Raises:
        UserError: the formula cannot be read, or looks further ahead than an episode lasts.
    """

    potential_rewards = False

    def __init__(self, sim: RobotSim, formula: str, signals: Mapping[str, str] | None = None) -> None:
        self._sim = sim
        names = getattr(sim, "state_names", None) or [f"state_{index}" for index in range(sim.state_size)]
        self.names = [str(name) for name in names]
        """Names of the entries of the other simulator's state."""
        self.text = formula
        self.formula: Formula = parse(formula, self.names, signals)
        if self.formula.reach(0) > sim.horizon:
            raise UserError(
                f"the formula looks {self.formula.reach(0)} control steps ahead, but an episode has {sim.horizon}"
            )
        self._traces: dict[int, list[NDArray[np.float32]]] = {}

    def __getattr__(self, name: str) -> Any:
        # cameras, tasks, layouts, bounds of actions and the like are those of the other simulator
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._sim, name)

    def reset(self, episodes: Sequence[EpisodeSpec]) -> ChunkResult:
        """Begin episodes; see `RobotSim`."""
        result = self._sim.reset(episodes)
        self._traces = {row: [result.observation.state[row].copy()] for row in range(len(episodes))}
        return self._shown(result)

    def step_chunk(self, actions: ArrayLike, record: Collection[int] = ()) -> ChunkResult:
        """Step the live rows, one control step at a time, so that the formula sees each; see `RobotSim`."""
        rows, moves = np.array(self._sim.live), np.asarray(actions)
        merged: ChunkResult | None = None
        for step in range(moves.shape[1]):
            live = np.array(self._sim.live)
            if not len(live):
                break
            wanted = [row for row in record if row in live]
            found = self._sim.step_chunk(moves[np.searchsorted(rows, live), step : step + 1], record=wanted)
            found = self._shown(self._judged(found))
            merged = _widened(found, moves.shape[1]) if merged is None else _merged(merged, found, step)
        assert merged is not None
        return merged

    def describe(self) -> Mapping[str, Any]:
        """Everything that a measurement depends on."""
        return {**self._sim.describe(), "formula": self.text}

    def robustness(self, row: int) -> float:
        """Robustness of a row's episode so far."""
        return float(self.formula.robustness(self.signals(row))[0])

    def signals(self, row: int) -> dict[str, NDArray[np.float64]]:
        """Values (T + 1,) of the entries of the state in a row."""
        trace = np.stack(self._traces[row]).astype(np.float64)
        return dict(zip(self.names, trace.T, strict=True))

    def reward(self, row: int, over: bool) -> float:
        """Reward of the last control step of a row."""
        return self.robustness(row) if over else 0.0

    def _shown(self, result: ChunkResult) -> ChunkResult:
        """The result as the policy sees it."""
        return result

    def _judged(self, result: ChunkResult) -> ChunkResult:
        """A control step with the reward of the formula, and its success at the end of the episode."""
        rewards, success = np.array(result.rewards), np.zeros(len(result.rows), bool)
        for at, row in enumerate(result.rows.tolist()):
            if result.failed[at]:
                continue
            self._traces[row].append(result.observation.state[at].copy())
            over = bool(result.terminated[at] or result.truncated[at])
            rewards[at, 0] = self.reward(row, over)
            success[at] = over and self.robustness(row) > 0
        return replace(result, rewards=rewards, success=success)


def open_stl(config: SimConfig) -> StlSim:
    """Start a simulator with a formula; a function for `sim.kind`.

    Raises:
        UserError: there is no formula, or it does not fit the simulator.
    """
    options = dict(config.options)
    if "formula" not in options:
        raise UserError("sim.options.formula is missing; set it to a formula such as 'eventually(to_red < 0.05)'")
    formula, signals = options.pop("formula"), options.pop("signals", None)
    sim = open_sim(replace(config, kind=options.pop("kind", "tabletop"), options=options))
    try:
        return StlSim(sim, formula, signals)
    except UserError:
        sim.close()
        raise


def _widened(result: ChunkResult, length: int) -> ChunkResult:
    """The first control step of a chunk of K."""
    rewards = np.zeros((len(result.rows), length))
    rewards[:, :1] = result.rewards
    # an environment that failed has no reward at all
    rewards[result.failed] = np.nan
    return replace(result, rewards=rewards, steps=np.array(result.steps))


def _merged(merged: ChunkResult, found: ChunkResult, step: int) -> ChunkResult:
    """A chunk with one more control step of the rows that were live."""
    at = np.searchsorted(merged.rows, found.rows)

    def written(whole: Any, part: Any) -> Any:
        if whole is None or part is None:
            return whole
        whole = np.array(whole)
        whole[at] = part
        return whole

    rewards, steps = np.array(merged.rewards), np.array(merged.steps)
    rewards[at, step], steps[at] = found.rewards[:, 0], steps[at] + found.steps
    rewards[at[found.failed]], steps[at[found.failed]] = np.nan, 0
    observed = {
        item.name: written(getattr(merged.observation, item.name), getattr(found.observation, item.name))
        for item in fields(RobotObservation)
        if item.name != "rows"
    }
    frames = dict(merged.frames)
    for row, film in found.frames.items():
        frames[row] = np.concatenate([frames[row], film]) if row in frames else film
    changes = {name: written(getattr(merged, name), getattr(found, name)) for name in PARTS}
    return replace(
        merged,
        rewards=rewards,
        steps=steps,
        observation=RobotObservation(merged.observation.rows, **observed),
        reasons={**merged.reasons, **found.reasons},
        frames=frames,
        **changes,
    )
