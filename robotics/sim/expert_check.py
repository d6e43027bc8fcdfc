"""Do the scripted experts of a simulator solve its tasks here? The first thing to ask of an installation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmrl.errors import UserError
from mmrl.training.record.statistics import wilson_interval
from robotics.sim.episodes import EpisodeSpec, RobotSim

__all__ = ["check_experts", "expert_of", "replay_experts", "run_expert"]

Chooser = Callable[[], NDArray[np.floating]]


def check_experts(sim: RobotSim, episodes: int = 5, split: str = "train") -> Iterator[tuple[str, int, int, int]]:
    """Run every task's expert.

    Args:
        sim: a simulator whose tasks have scripted experts.
        episodes: of each task.
        split: where their layouts come from.

    Yields:
        Task, successes, episodes with a result, and episodes whose environment failed; as they come.

    Raises:
        UserError: the simulator has no experts.
    """
    for task, instruction in sim.tasks().items():
        wanted = [EpisodeSpec(task, instruction, layout, split) for layout in range(episodes)]
        size = sim.capacity or episodes
        results = [run_expert(sim, wanted[start : start + size]) for start in range(0, episodes, size)]
        success, failed = (np.concatenate([result[part] for result in results]) for part in (0, 1))
        yield task, int(success.sum()), int((~failed).sum()), int(failed.sum())


def run_expert(sim: RobotSim, episodes: Sequence[EpisodeSpec]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Run episodes of one task with its expert, a control step at a time.

    Args:
        sim: the simulator.
        episodes: R of them, at most its capacity.

    Returns:
        (R,) whether each succeeded, and (R,) whether its environment failed.
    """
    choose = expert_of(sim, episodes[0].task)
    begun = sim.reset(episodes)
    success, failed = np.zeros(len(episodes), bool), begun.failed.copy()
    while len(sim.live):
        result = sim.step_chunk(np.clip(choose(), -1, 1)[:, None])
        success[result.rows] |= result.success
        failed[result.rows] |= result.failed
    return success, failed


def replay_experts(sim: RobotSim, task: str, episodes: int = 20, split: str = "train") -> NDArray[np.bool_]:
    """Replay what the expert did in one episode in all others, without observing: what needs no looking.

    Args:
        sim: a simulator whose tasks have scripted experts, with room for all episodes at a time.
        task: name of the task.
        episodes: R of them, each with a layout of its own.
        split: where the layouts come from.

    Returns:
        (R, R) whether the actions of episode i solve episode j; a failed environment solves nothing. After its last
        action an expert rests, with the fingers as they are.

    Raises:
        UserError: the simulator has no experts, or there are fewer than two episodes.
    """
    if episodes < 2:
        raise UserError(f"episodes is {episodes}; must be at least 2, one to replay in another")
    wanted = [EpisodeSpec(task, sim.tasks()[task], layout, split) for layout in range(episodes)]
    choose = expert_of(sim, task)
    sim.reset(wanted)
    actions = np.zeros((episodes, sim.horizon, sim.action_size), np.float32)
    for step in range(sim.horizon):
        if not len(sim.live):
            break
        live = sim.live
        actions[live, step] = np.clip(choose(), -1, 1)
        actions[live, step + 1 :, -1] = actions[live, step, -1][:, None]
        sim.step_chunk(actions[live, step][:, None])
    solved = np.zeros((episodes, episodes), bool)
    for row, motion in enumerate(actions):
        sim.reset(wanted)
        if len(sim.live):
            result = sim.step_chunk(np.broadcast_to(motion, (len(sim.live), *motion.shape)))
            solved[row, result.rows] = result.success
    return solved


def expert_of(sim: RobotSim, task: str) -> Chooser:
    """The expert of a task as a function that gives the actions (L, A) of the live rows.

    Raises:
        UserError: the simulator has none.
    """
    known: Any = sim
    if hasattr(known, "full_state"):
        from robotics.sim.experts import Expert

        expert = Expert(task)
        return lambda: expert.act(known.full_state())
    if hasattr(known, "expert_actions"):
        return known.expert_actions  # type: ignore[no-any-return]
    raise UserError(f"{type(sim).__name__} has no scripted experts")


def summary_lines(rows: Sequence[tuple[str, int, int, int]]) -> list[str]:
    """Lines that tell how many tasks were solved how often."""
    always = sum(done == count and count > 0 for _, done, count, _ in rows)
    mostly = sum(count > 0 and done / count >= MOSTLY for _, done, count, _ in rows)
    done, count = sum(row[1] for row in rows), sum(row[2] for row in rows)
    low, high = wilson_interval(done, count)
    return [
        f"all episodes: {done} of {count} solved, {done / max(count, 1):.3f} [{low:.3f}, {high:.3f}]",
        f"tasks solved always: {always} of {len(rows)}; in at least {100 * MOSTLY:.0f} % of the episodes: {mostly}",
    ]


def replay_line(solved: NDArray[np.bool_]) -> str:
    """Line that tells how far one motion gets, from what `replay_experts` returns."""
    others = (solved.sum(1) - solved.diagonal()) / (len(solved) - 1)
    return f"  replayed in the other episodes: {others.mean():.3f} in the mean, {others.max():.3f} at best"


MOSTLY = 0.8
