"""Control steps per second of the tabletop's physics: mujoco_warp on a GPU against MuJoCo in threads.

The same task, layouts and actions, with a look at the state at the end of each chunk. Before anything is timed an arm
plays motions that touch nothing and compares where they end with MuJoCo; with contacts the trajectories part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.harness import Arm, BenchOptions, check, comparison, ratio, run_arms
from benchmarks.measure import Stopwatch, repeat
from robotics.scenes.batch import BatchSettings, TabletopBatch
from robotics.scenes.control import ACTION_SIZE
from robotics.sim.episodes import EpisodeSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

ARM_FUNCTION = "benchmarks.robotics.warp_steps:warp_arm"
TASK = "push"
FULL: dict[str, Any] = {"environments": (16, 256, 2048), "steps": 48, "chunk": 8}
QUICK: dict[str, Any] = {"environments": (2,), "steps": 4, "chunk": 2}
TOLERANCE = 1e-3
"""Metres and radians between the ends of free motions in float32 and in float64."""


def compare_warp(options: BenchOptions) -> dict[str, Any]:
    """Compare the two at several numbers of environments."""
    sizes: dict[str, Any] = QUICK if options.quick else FULL
    common = {"steps": sizes["steps"], "chunk": sizes["chunk"], "repetitions": options.repetitions}
    arms = [
        Arm(f"{name}, {count}", ARM_FUNCTION, common | {"physics": name, "environments": count}, memory=False)
        for count in sizes["environments"]
        for name in ("mujoco", "warp")
    ]
    runs = run_arms("physics of many scenes", arms, options)
    found = {
        f"warp, {count}, steps per second over mujoco, {count}": ratio(
            runs, f"mujoco, {count}", f"warp, {count}", "wall_s"
        )
        for count in sizes["environments"]
    }
    timed = {name: run for name, run in runs.items() if "wall_s" in run}
    steps = {name: run["counts"]["control_steps"] / run["wall_s"]["total"] for name, run in timed.items()}
    notes = [
        f"an episode of {sizes['steps']} control steps of {TASK} in each environment, states only, chunks of "
        f"{sizes['chunk']} actions; in both, resets, scores and observations are computed on the CPU and are timed",
        "mujoco: mujoco.rollout in as many threads as there are usable cores; warp: mujoco_warp in float32",
    ]
    return comparison(runs, ratios=found, floor={"control_steps_per_second": steps}, notes=notes)


def warp_arm(arm: dict[str, Any]) -> dict[str, Any]:
    """Compare free motions with MuJoCo's, then time episodes."""
    rows, steps = arm["environments"], arm["steps"]
    chunks = np.split(_actions(rows, steps), steps // arm["chunk"], axis=1)
    with _open(arm) as sim:
        checks = {"state after free motion, difference to MuJoCo": check(_free_difference(sim, arm), TOLERANCE)}

        def once(watch: Stopwatch) -> None:
            sim.reset([EpisodeSpec(TASK, "", layout) for layout in range(rows)])
            for actions in chunks:
                if len(sim.live):
                    sim.step_chunk(actions[sim.live])

        measured = repeat(once, arm["repetitions"])
    return measured | {"counts": {"control_steps": rows * steps}, "checks": checks}


def _open(arm: dict[str, Any]) -> TabletopBatch:
    warp = arm["physics"] == "warp"
    settings = BatchSettings(
        image_size=None, horizon=arm["steps"], physics=arm["physics"], device=arm["device"] if warp else None
    )
    return TabletopBatch((TASK,), settings=settings)


def _free_difference(sim: TabletopBatch, arm: dict[str, Any]) -> float:
    """Largest difference of the states of two rows after a chunk upwards."""
    actions = _actions(2, 4)
    actions[:, :, 2] = np.abs(actions[:, :, 2])
    with _open(arm | {"physics": "mujoco"}) as other:
        ends = [_end_of(one, actions) for one in (sim, other)]
    return float(np.abs(ends[0] - ends[1]).max())


def _end_of(sim: TabletopBatch, actions: NDArray[np.float64]) -> NDArray[np.float32]:
    sim.reset([EpisodeSpec(TASK, "", layout) for layout in range(len(actions))])
    return sim.step_chunk(actions).observation.state


def _actions(rows: int, steps: int) -> NDArray[np.float64]:
    return np.random.default_rng(0).uniform(-1.0, 1.0, (rows, steps, ACTION_SIZE))
