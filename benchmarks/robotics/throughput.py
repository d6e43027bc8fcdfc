"""Control steps per second of different methods to run many tabletop episodes, with and without images.

The same task, layouts, actions and number of environments for our processes (`SubprocessSim`), our threads
(`TabletopBatch`), Gymnasium's `AsyncVectorEnv` over the same environment class, and `mujoco.rollout` with the physics
alone, which is the floor. A policy with action chunks needs to look only at the end of a chunk; `AsyncVectorEnv` knows
no chunks and looks after every control step, so ours is also measured with a call and a look for each step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.harness import Arm, BenchOptions, comparison, ratio, run_arms

ARM_FUNCTION = "benchmarks.robotics.throughput_arms:throughput_arm"
SHORT_REPETITIONS = 5
"""Repetitions, each of which takes at most a second."""

FULL: dict[str, Any] = {"environments": 4, "workers": 4, "steps": 48, "chunk": 8}
QUICK: dict[str, Any] = {"environments": 2, "workers": 2, "steps": 4, "chunk": 2}
THEIRS, FLOOR = "AsyncVectorEnv", "mujoco.rollout"
POOL_STEPS, POOL_CHUNKS = "SubprocessSim, every step", "SubprocessSim, end of chunk"
BATCH_STEPS, BATCH_CHUNKS = "TabletopBatch, every step", "TabletopBatch, end of chunk"
OURS = (POOL_STEPS, POOL_CHUNKS, BATCH_STEPS, BATCH_CHUNKS)


def compare_throughput(options: BenchOptions, backend: str, size_px: int) -> dict[str, Any]:
    """Compare the simulators at one size of images."""
    common: dict[str, Any] = (QUICK if options.quick else FULL) | {"size_px": size_px, "backend": backend}
    common |= {"repetitions": options.repetitions if options.quick else max(SHORT_REPETITIONS, options.repetitions)}
    ways: dict[str, dict[str, Any]] = {
        THEIRS: {"simulator": "AsyncVectorEnv", "chunk": 1},
        POOL_STEPS: {"simulator": "SubprocessSim", "chunk": 1},
        POOL_CHUNKS: {"simulator": "SubprocessSim"},
        BATCH_STEPS: {"simulator": "TabletopBatch", "chunk": 1},
        BATCH_CHUNKS: {"simulator": "TabletopBatch"},
        FLOOR: {"simulator": "mujoco.rollout"},
    }
    arms = [Arm(name, ARM_FUNCTION, common | way, memory=False) for name, way in ways.items()]
    runs = run_arms(f"throughput, {f'{size_px} px' if size_px else 'states'}", arms, options)
    return comparison(runs, ratios=_ratios(runs), floor=_floor(runs), notes=_notes(common))


def _ratios(runs: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The steps are the same in all arms, so ratios of time are those of steps per second upside down."""
    found: dict[str, dict[str, Any]] = {}
    for name in OURS:
        found[f"{name}, steps per second over {THEIRS}"] = ratio(runs, THEIRS, name, "wall_s")
        found[f"{name}, steps per CPU second over {THEIRS}"] = ratio(runs, THEIRS, name)
    for name in (THEIRS, *OURS):
        found[f"{name}, steps per second over {FLOOR}"] = ratio(runs, FLOOR, name, "wall_s")
        found[f"{name}, steps per CPU second over {FLOOR}"] = ratio(runs, FLOOR, name)
    return found


def _floor(runs: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    timed = {name: run for name, run in runs.items() if "wall_s" in run}
    return {
        "counts": {name: run["counts"] for name, run in timed.items()},
        "physics_cpu_s": runs[FLOOR].get("cpu_s", {}).get("total"),
        "control_steps_per_second": {
            name: run["counts"]["control_steps"] / run["wall_s"]["total"] for name, run in timed.items()
        },
    }


def _notes(common: Mapping[str, Any]) -> list[str]:
    sights = f"states and images of {common['size_px']} px" if common["size_px"] else "states"
    return [
        f"{common['environments']} environments, an episode of {common['steps']} control steps in each, {sights}; "
        f"one process per environment, or {common['workers']} threads; chunks of {common['chunk']} actions",
        "AsyncVectorEnv has no chunks: it gets an action and observes at every control step; our `every step` does "
        "the same work, and `end of chunk` is what a policy with action chunks needs",
        "every episode is cut off by the horizon at its last step and none ends earlier; a repetition is a reset of "
        "all environments, with its observation, and these steps; AsyncVectorEnv adds no reset of its own",
        "mujoco.rollout only runs the physics, with the same joint targets, in one call: no inverse kinematics, "
        "rewards, observations or images",
        "CPU seconds include all processes; memory only covers the calling process",
    ]
