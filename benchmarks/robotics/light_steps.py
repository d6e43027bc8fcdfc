"""Steps of light environments: the cost of a vector environment when the environment itself takes microseconds.

`PoolVectorEnv` and `SubprocessSim` against Gymnasium's `AsyncVectorEnv`, the same environments, seeds and actions, a
call and a look at every step. Before anything is timed an arm plays the steps once and compares each observation with
those of `SyncVectorEnv` in this process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.harness import Arm, BenchOptions, check, comparison, ratio, run_arms
from benchmarks.measure import Stopwatch, repeat
from benchmarks.robotics.throughput_arms import cpu_seconds

if TYPE_CHECKING:
    from numpy.typing import NDArray

ARM_FUNCTION = "benchmarks.robotics.light_steps:light_arm"
FULL: dict[str, Any] = {"environments": 4, "steps": 1000}
QUICK: dict[str, Any] = {"environments": 2, "steps": 10}
THEIRS, OURS, EACH, CHUNKS = "AsyncVectorEnv", "PoolVectorEnv", "PoolVectorEnv, a process each", "SubprocessSim"
SLOWER = 1.2
"""Maximum time of a step relative to `AsyncVectorEnv`."""
LIGHT = {"cartpole": "CartPole-v1", "pendulum": "Pendulum-v1"}
Player = tuple[Callable[["NDArray[Any]"], "NDArray[np.float32]"], list[int]]
"""Plays the steps from a reset with seed 0 and returns (1 + steps, N, S) observations, and its processes."""


def compare_light_steps(options: BenchOptions, name: str) -> dict[str, Any]:
    """Compare the vector environments on one environment."""
    common: dict[str, Any] = (QUICK if options.quick else FULL) | {"env": LIGHT[name]}
    common |= {"repetitions": options.repetitions}
    ways = [THEIRS, OURS, EACH, *([CHUNKS] if name == "pendulum" else [])]  # it has continuous actions only
    arms = [Arm(way, ARM_FUNCTION, common | {"way": way}, memory=False) for way in ways]
    runs = run_arms(f"light steps, {name}", arms, options)
    found: dict[str, Any] = {}
    for way in ways[1:]:
        least = 1 / SLOWER if way == OURS else None
        found[f"{way}, steps per second over {THEIRS}"] = ratio(runs, THEIRS, way, "wall_s", minimum=least)
        found[f"{way}, steps per CPU second over {THEIRS}"] = ratio(runs, THEIRS, way)
    timed = {way: run for way, run in runs.items() if "wall_s" in run}
    steps = {way: run["counts"]["steps"] / run["wall_s"]["total"] for way, run in timed.items()}
    notes = [
        f"{common['environments']} environments of {LIGHT[name]}, {common['steps']} steps of each, in one process "
        f"per environment; {OURS} shares as many processes as there are usable cores, its default; the reset is "
        "timed too",
        f"a ratio of at least {1 / SLOWER:.2f} means that a step takes at most {SLOWER} times as long",
    ]
    return comparison(runs, ratios=found, floor={"environment_steps_per_second": steps}, notes=notes)


def light_arm(arm: dict[str, Any]) -> dict[str, Any]:
    """Run the steps with one method, compare them, then time them.

    Returns:
        What `repeat` measured, CPU seconds being those of all processes, with counts and checks.
    """
    actions = _actions(arm)
    expected = _play_in_this_process(arm, actions)
    with WAYS[arm["way"]](arm) as (play, processes):
        difference = float(np.abs(play(actions) - expected).max())
        moved = float(np.abs(expected[-1] - expected[0]).max())

        def once(watch: Stopwatch) -> None:
            play(actions)

        measured = repeat(once, arm["repetitions"], cpu_clock=partial(cpu_seconds, processes))
    checks = {
        "observations, difference to SyncVectorEnv": check(difference, 0.0),
        "observations, difference to the start": check(moved, 1e-3, above=True),
    }
    return measured | {"counts": {"steps": arm["environments"] * arm["steps"]}, "checks": checks}


def _play(envs: Any, actions: NDArray[Any]) -> NDArray[np.float32]:
    seen = [envs.reset(seed=0)[0]]
    seen.extend(envs.step(action)[0] for action in actions)
    return np.array(seen, np.float32)


def _play_in_this_process(arm: dict[str, Any], actions: NDArray[Any]) -> NDArray[np.float32]:
    import gymnasium
    from gymnasium.vector import SyncVectorEnv

    envs = SyncVectorEnv([partial(gymnasium.make, **_env_options(arm))] * arm["environments"])
    seen = _play(envs, actions)
    envs.close()
    return seen


@contextmanager
def _async(arm: dict[str, Any]) -> Iterator[Player]:
    import gymnasium
    from gymnasium.vector import AsyncVectorEnv

    envs = AsyncVectorEnv([partial(gymnasium.make, **_env_options(arm))] * arm["environments"])
    yield partial(_play, envs), [process.pid for process in envs.processes if process.pid is not None]
    envs.close()


@contextmanager
def _pool(arm: dict[str, Any]) -> Iterator[Player]:
    from mmrl.workers import PoolVectorEnv, VectorSettings

    options = _env_options(arm)
    count = arm["environments"] if arm["way"] == EACH else None
    envs = PoolVectorEnv(options.pop("id"), arm["environments"], kwargs=options, settings=VectorSettings(workers=count))
    yield partial(_play, envs), envs.processes()
    envs.close()


@contextmanager
def _subprocess_sim(arm: dict[str, Any]) -> Iterator[Player]:
    from robotics.sim.episodes import EpisodeSpec
    from robotics.sim.subprocess_sim import SubprocessSettings, SubprocessSim

    adapter = {"success_key": "", "horizon": arm["steps"], "task": "light"}
    settings = SubprocessSettings(
        "gymnasium:make", _env_options(arm), adapter, workers=arm["environments"], images=False
    )
    episodes = [EpisodeSpec("light", "", seed) for seed in range(arm["environments"])]
    with SubprocessSim(settings) as sim:

        def play(actions: NDArray[Any]) -> NDArray[np.float32]:
            seen = [sim.reset(episodes).observation.state]
            # The adapter scales -1..1 to the bounds of the actions, 2 to either side.
            seen.extend(sim.step_chunk(action[:, None] / 2).observation.state for action in actions)
            return np.array(seen)

        yield play, sim.processes()


def _env_options(arm: dict[str, Any]) -> dict[str, Any]:
    return {"id": arm["env"], "max_episode_steps": arm["steps"] + (arm["env"] == LIGHT["pendulum"])}


def _actions(arm: dict[str, Any]) -> NDArray[Any]:
    """(steps, N) pushes to the left or right, or (steps, N, 1) torques in eighths, which no scaling rounds."""
    rng, shape = np.random.default_rng(0), (arm["steps"], arm["environments"])
    if arm["env"] == LIGHT["cartpole"]:
        return rng.integers(0, 2, shape)
    return (rng.integers(-8, 9, (*shape, 1)) / 8).astype(np.float32)


WAYS: dict[str, Callable[[dict[str, Any]], AbstractContextManager[Player]]] = {
    THEIRS: _async,
    OURS: _pool,
    EACH: _pool,
    CHUNKS: _subprocess_sim,
}
