"""Episodes of a policy that an overseer watches: one control step after the other, with its owner.

Shapes: L live rows, A entries of an action, S entries of the state, T control steps of an episode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from robotics.episodes.collect import ActingSettings, action_scale, inputs_of, sim_actions
from robotics.episodes.recording import Demonstration
from robotics.interventions.devices import FAILURE, QUIT, REDO, SUCCESS
from robotics.interventions.overseers import Overseer, Verdict
from robotics.policies.base.action_policy import ActionPolicy
from robotics.policies.base.action_tokens import RowGenerators
from robotics.sim.episodes import EpisodeSpec, RobotObservation, RobotSim, begin_episodes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from robotics.sim.episodes import ChunkResult


@dataclass
class WatchedEpisode(Demonstration):
    """One episode of T control steps, whoever chose the actions."""

    episode: EpisodeSpec = field(kw_only=True)
    by_person: list[bool] = field(default_factory=list)
    """Whether the overseer chose the action."""
    last_state: NDArray[np.float32] | None = None
    """(S,) at the end."""
    last_full: NDArray[np.float32] | None = None
    """(F,) full state at the end; None if the simulator does not report it."""
    terminated: bool = False
    """Whether the task or a person ended the episode; otherwise a time limit did."""
    press: str = ""
    """redo or quit if the person ended the episode so."""

    def __len__(self) -> int:
        return len(self.actions)

    @property
    def starts(self) -> int:
        """Number of interventions: how often the overseer took over."""
        return sum(now and not before for before, now in zip([False, *self.by_person], self.by_person, strict=False))

    def counts(self) -> dict[str, Any]:
        """Entries that `InterventionRecord` and `round_metrics` have of an attempt."""
        done = {"steps": len(self), "person_steps": sum(self.by_person), "starts": self.starts}
        return {"episode_index": None if self.failed else 0, **done, "success": self.success}


def intervention_rewards(by_person: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Rewards (T,) of an episode that only say when an overseer took over.

    -1 for a step of the policy after which the overseer takes over, 0 for all others. A task reward is not needed. An
    overseer who acts from the first step on did not take over from anybody.

    Args:
        by_person: (T,) whether the overseer chose the action of each control step of the episode.

    Source: RLIF, arXiv 2311.12996. pd-perry/RLIF examples/train_rlif_main.py has the same rewards, but drops
        the last step of each episode and all but the last step of an intervention.
    """
    follows = np.append(by_person[1:], False)
    return -(follows & ~by_person).astype(np.float32)


class _Plans:
    """The policy's chunks of actions, row by row; a row plans again when its chunk is used up or was interrupted."""

    def __init__(
        self, policy: ActionPolicy, episodes: Sequence[EpisodeSpec], settings: ActingSettings, seeds: Sequence[int]
    ) -> None:
        self._policy, self._episodes, self._settings = policy, episodes, settings
        self.greedy = True
        self._scale = action_scale(policy, settings)
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self._left: list[list[NDArray[np.float32]]] = [[] for _ in episodes]

    def proposed(self, observation: RobotObservation) -> NDArray[np.float32]:
        """(L, A) actions of this control step, which are taken from the plans."""
        rows = observation.rows.tolist()
        new = [row for row in rows if not self._left[row]]
        if new:
            inputs = inputs_of(observation.of(new), self._episodes, self._policy.device)
            draws = RowGenerators([self._generators[row] for row in new])
            with torch.no_grad():
                choice = self._policy.act(inputs, draws, temperature=self._settings.temperature, greedy=self.greedy)
            actions = sim_actions(choice.actions.float().cpu().numpy(), self._scale).clip(-1, 1)
            for row, chunk in zip(new, actions, strict=True):
                self._left[row] = list(chunk[: self._settings.n_action_steps or None])
        return np.stack([self._left[row].pop(0) for row in rows])

    def drop(self, rows: NDArray[np.int64]) -> None:
        """Forget what was planned before an intervention, as it does not continue after it."""
        for row in rows:
            self._left[row] = []


def run_watched(
    policy: ActionPolicy,
    sim: RobotSim,
    episodes: Sequence[EpisodeSpec],
    overseer: Overseer,
    settings: ActingSettings,
    seeds: Sequence[int],
    *,
    before_step: Callable[[], None] | None = None,
    show: Callable[[RobotObservation, str], None] | None = None,
    note: Callable[[Verdict], None] | None = None,
    recalled: Sequence[Verdict] = (),
    greedy: bool = True,
) -> list[WatchedEpisode]:
    """Run R episodes to their ends under an overseer, whose action replaces the policy's where it acts.

    The policy observes again when a chunk of it is used up, and after each control step of the overseer.

    Args:
        policy: in evaluation mode.
        sim: the simulator, of a capacity of at least R.
        episodes: R initial states.
        overseer: watches them.
        settings: how the policy's actions are executed.
        seeds: R seeds, of the policy's and the overseer's random numbers.
        before_step: called before each control step, such as `Pacer.wait`.
        show: called with each observation and a line of text.
        note: called with each control step before it is executed.
        recalled: the first control steps, as `note` was called with. They are executed again, whatever policy and
            overseer would do now.
        greedy: whether the policy takes its most likely actions; otherwise it draws them.

    Returns:
        The episodes. One whose environment failed is marked; its control steps so far are kept.
    """
    seen = [WatchedEpisode(episode=episode) for episode in episodes]
    result = begin_episodes(sim, episodes, policy.past)
    for row in np.flatnonzero(result.failed).tolist():
        seen[row].failed, seen[row].reason = True, result.reasons.get(row, "")
    overseer.begin(sim, episodes, seeds)
    plans, journal = _Plans(policy, episodes, settings, seeds), iter(recalled)
    plans.greedy = greedy
    while len(sim.live):
        observation = result.observation.of(sim.live.copy())
        full_state = sim.full_state() if hasattr(sim, "full_state") else None
        proposed, known = plans.proposed(observation), next(journal, None)
        if known is None and before_step is not None:
            before_step()
        verdict = overseer.watch(proposed, known)
        if QUIT in verdict.presses or REDO in verdict.presses:
            seen[0].press = REDO if REDO in verdict.presses else QUIT
            break
        executed = known or replace(verdict, actions=np.where(verdict.acts[:, None], verdict.actions, proposed))
        if known is None and note is not None:
            note(executed)
        result = sim.step_chunk(executed.actions[:, None])
        if result.executed is not None and result.by_person is not None:
            executed = replace(executed, actions=result.executed[:, 0], acts=result.by_person[:, 0])
        _keep(seen, observation, full_state, executed, result)
        plans.drop(result.rows[executed.acts])
        if show is not None:
            show(result.observation, _status(seen[0]))
        if SUCCESS in executed.presses or FAILURE in executed.presses:
            seen[0].success, seen[0].terminated = SUCCESS in executed.presses, True
            break
    return seen


def _keep(
    seen: Sequence[WatchedEpisode],
    observation: RobotObservation,
    full_state: NDArray[np.float32] | None,
    executed: Verdict,
    result: ChunkResult,
) -> None:
    """Add a control step of the live rows: what was observed before it, and what came of it."""
    for place, row in enumerate(result.rows.tolist()):
        one = seen[row]
        if result.failed[place]:
            # a step of a failed environment has no result
            one.failed, one.reason = True, result.reasons.get(row, "no reason given")
            continue
        one.states.append(observation.state[place])
        one.images += [] if observation.images is None else [observation.images[place]]
        one.views += [] if observation.views is None else [observation.views[place]]
        one.full += [] if full_state is None else [full_state[place]]
        one.actions.append(executed.actions[place])
        one.by_person.append(bool(executed.acts[place]))
        one.rewards.append(float(result.rewards[place, 0]))
        one.success |= bool(result.success[place])
        one.terminated |= bool(result.terminated[place])
        one.last_state = result.observation.state[place]
        one.last_full = None if result.full_state is None else result.full_state[place]


def _status(one: WatchedEpisode) -> str:
    owner = "YOU" if one.by_person and one.by_person[-1] else "policy"
    return f"step {len(one)}: {owner} | {one.episode.instruction or one.episode.task}"
