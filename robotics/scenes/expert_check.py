"""Success of a simulator's scripted experts: the first check of an installation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmrl.errors import UserError
from mmrl.runs.statistics import wilson_interval
from robotics.sim.episodes import EpisodeSpec, RobotSim

Chooser = Callable[[], NDArray[np.floating]]


def check_experts(sim: RobotSim, episodes: int = 5, split: str = "train") -> Iterator[tuple[str, int, int, int]]:
    """Run every task's expert.

    Args:
        sim: a simulator whose tasks have scripted experts, else UserError.
        episodes: number of episodes per task.
        split: split of the layouts.

    Yields:
        Task, successes, episodes with a result, and episodes whose environment failed.
    """
    for task in sim.tasks():
        wanted = _episodes(sim, task, episodes, split)
        results = [run_expert(sim, part) for part in _batches(sim, wanted)]
        success, failed = (np.concatenate([result[part] for result in results]) for part in (0, 1))
        yield task, int(success.sum()), int((~failed).sum()), int(failed.sum())


def run_expert(
    sim: RobotSim, episodes: Sequence[EpisodeSpec], motions: NDArray[np.float32] | None = None
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Run R episodes of one task with its expert; returns (R,) success and (R,) whether the environment failed.

    Actions are written to motions (R, horizon, A), zeros at first; after the end the fingers stay as they are.
    """
    choose = experts_of(sim, episodes)
    begun = sim.reset(episodes)
    success, failed = np.zeros(len(episodes), bool), begun.failed.copy()
    step = 0
    while len(sim.live):
        live, actions = sim.live, np.clip(choose(), -1, 1)
        if motions is not None:
            motions[live, step] = actions
            # an episode may end at any step; the fingers must not open in the rest of a replay
            motions[live, step + 1 :, -1] = actions[:, -1:]
        result = sim.step_chunk(actions[:, None])
        success[result.rows] |= result.success
        failed[result.rows] |= result.failed
        step += 1
    return success, failed


def replay_experts(sim: RobotSim, task: str, episodes: int = 20, split: str = "train") -> NDArray[np.float64]:
    """Replay the expert's actions of one episode in all others, open loop.

    Args:
        sim: a simulator whose tasks have scripted experts.
        task: name of the task.
        episodes: R, at least 2, each with a different layout.
        split: split of the layouts.

    Returns:
        (R, R): 1 if the actions of episode i solve episode j, else 0; NaN if an environment failed. After its
        last action an expert rests, with the fingers as they are.
    """
    if episodes < 2:
        raise UserError(f"episodes is {episodes}; a replay needs at least 2, so that one can be replayed in another")
    wanted = _episodes(sim, task, episodes, split)
    motions = np.zeros((episodes, sim.horizon, sim.action_size), np.float32)
    known = np.concatenate(
        [~run_expert(sim, part, motions[part[0].layout : part[-1].layout + 1])[1] for part in _batches(sim, wanted)]
    )
    solved = np.full((episodes, episodes), np.nan)
    for row in np.flatnonzero(known):
        solved[row] = np.concatenate([_replay(sim, part, motions[row]) for part in _batches(sim, wanted)])
    return solved


def replay_line(solved: NDArray[np.float64]) -> str:
    """Summary of `replay_experts`: how often one motion solves other episodes."""
    # a replay in its own episode says nothing
    others = np.where(np.eye(len(solved), dtype=bool), np.nan, solved)
    failed = int(np.isnan(solved).sum())
    means = [float(np.nanmean(row)) for row in others if not np.isnan(row).all()]
    if not means:
        return "  replayed in the other episodes: every environment failed"
    text = f"  replayed in the other episodes: {np.nanmean(others):.3f} on average, {max(means):.3f} at best"
    return text + (f"; {failed} of {solved.size} replays without a result" if failed else "")


def _replay(sim: RobotSim, episodes: Sequence[EpisodeSpec], motion: NDArray[np.float32]) -> NDArray[np.float64]:
    """(R,) 1 if a motion (T, A) solves the episode, else 0; NaN if the environment failed."""
    begun = sim.reset(episodes)
    solved = np.where(begun.failed, np.nan, 0.0)
    if len(sim.live):
        result = sim.step_chunk(np.broadcast_to(motion, (len(sim.live), *motion.shape)))
        solved[result.rows] = np.where(result.failed, np.nan, result.success)
    return solved


def _episodes(sim: RobotSim, task: str, count: int, split: str) -> list[EpisodeSpec]:
    return [EpisodeSpec(task, sim.tasks()[task], layout, split) for layout in range(count)]


def _batches(sim: RobotSim, episodes: Sequence[EpisodeSpec]) -> list[Sequence[EpisodeSpec]]:
    """Cut episodes into batches of the simulator's capacity."""
    size = sim.capacity or len(episodes)
    return [episodes[start : start + size] for start in range(0, len(episodes), size)]


def experts_of(sim: RobotSim, episodes: Sequence[EpisodeSpec]) -> Chooser:
    """Function that returns the experts' actions (L, A) of the live rows of some episodes."""
    known: Any = sim
    if hasattr(known, "expert_actions"):
        return known.expert_actions
    raise UserError(
        f"{type(sim).__name__} has no scripted experts; with sim.kind gymnasium set sim.options.adapter.expert"
    )


def summary_lines(rows: Sequence[tuple[str, int, int, int]]) -> list[str]:
    """Summary: how often the tasks were solved."""
    always = sum(done == count and count > 0 for _, done, count, _ in rows)
    mostly = sum(count > 0 and done / count >= MOSTLY for _, done, count, _ in rows)
    done, count = sum(row[1] for row in rows), sum(row[2] for row in rows)
    low, high = wilson_interval(done, count)
    return [
        f"all episodes: {done} of {count} solved, {done / max(count, 1):.3f} [{low:.3f}, {high:.3f}]",
        f"tasks always solved: {always} of {len(rows)}; solved in at least {100 * MOSTLY:.0f}% of the episodes: "
        f"{mostly}",
    ]


MOSTLY = 0.8
