"""The arms of the throughput comparisons: one episode in each of N environments, with equal layouts and actions.

Before anything is timed an arm plays the episodes once and compares how they end with a `TabletopEnv` that runs alone
in this process. Then a repetition is a reset and the control steps up to the horizon, which cuts every episode off with
the same step.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.harness import check
from benchmarks.measure import Stopwatch, repeat
from mmrl.errors import RunError
from robotics.scenes.arms import find_arm
from robotics.scenes.batch import BatchSettings, TabletopBatch
from robotics.scenes.control import ACTION_SIZE, CartesianController
from robotics.scenes.envs import TabletopEnv
from robotics.scenes.tabletop import PHYSICS_STEPS
from robotics.scenes.tabletop_tasks import LAYOUTS
from robotics.sim.episodes import EpisodeSpec, RobotSim
from robotics.sim.subprocess_sim import SubprocessSettings, SubprocessSim

if TYPE_CHECKING:
    from numpy.typing import NDArray

TASK, ARM = "push", "panda"
MOVED = 0.01
"""Minimum difference of some entry of each final state from its start; otherwise equality would prove nothing."""

Final = dict[str, Any]
"""Arrays with a row for each environment at the end of its episode: state, image and physics, as far as known."""
Player = tuple[Callable[[], Final], Sequence[int]]
"""Function that plays all episodes once, and the other processes that take part."""


def throughput_arm(arm: dict[str, Any]) -> dict[str, Any]:
    """Play the episodes with one simulator, compare their ends, then time them.

    Args:
        arm: simulator (key in `SIMULATORS`), environments, steps of an episode, chunk, workers, size_px (0 for states
            only), backend and repetitions.

    Returns:
        What `repeat` measured, CPU seconds being those of all processes, with counts and checks.
    """
    with SIMULATORS[arm["simulator"]](arm) as (play, processes):
        checks = _compare(play(), *_play_alone(arm))

        def once(watch: Stopwatch) -> None:
            play()

        measured = repeat(once, arm["repetitions"], cpu_clock=partial(cpu_seconds, list(processes)))
    return measured | {"counts": _counts(arm), "checks": checks}


@contextlib.contextmanager
def _worker_pool(arm: dict[str, Any]) -> Iterator[Player]:
    """A process an environment; a seed is what each draws its layout from, as with Gymnasium's."""
    size = (arm["size_px"], arm["size_px"])
    drawing = {"render_mode": "rgb_array", "render_size": size} if arm["size_px"] else {}
    settings = SubprocessSettings(
        "robotics.scenes.envs:TabletopEnv",
        {"task": TASK, "arm": ARM, "observation": "state", "horizon": arm["steps"], **drawing},
        {"task": TASK, "horizon": arm["steps"]},
        workers=arm["environments"],
        images=bool(arm["size_px"]),
        renderer=arm["backend"],
    )
    episodes = [EpisodeSpec(TASK, "", seed) for seed in range(arm["environments"])]
    with SubprocessSim(settings) as sim:
        yield partial(_play_chunks, sim, episodes, _chunks(arm)), sim.processes()


@contextlib.contextmanager
def _tabletop_batch(arm: dict[str, Any]) -> Iterator[Player]:
    """Threads of this process."""
    size = (arm["size_px"], arm["size_px"]) if arm["size_px"] else None
    settings = BatchSettings(image_size=size, horizon=arm["steps"])
    episodes = [EpisodeSpec(TASK, "", _drawn_layout(seed)) for seed in range(arm["environments"])]
    with TabletopBatch((TASK,), ARM, settings, workers=arm["workers"], backend=arm["backend"]) as sim:
        yield partial(_play_chunks, sim, episodes, _chunks(arm)), ()


@contextlib.contextmanager
def _async_vector_env(arm: dict[str, Any]) -> Iterator[Player]:
    """Gymnasium's processes with its defaults, but without the reset that it adds to an episode's end."""
    from gymnasium.vector import AsyncVectorEnv, AutoresetMode

    kinds, size = (("state", "rgb"), (arm["size_px"],) * 2) if arm["size_px"] else (("state",), (64, 64))
    make = partial(TabletopEnv, TASK, ARM, kinds, size, horizon=arm["steps"])
    # A fork of a process that holds threads and OpenGL may hang; the workers of the pool are no forks either.
    envs = AsyncVectorEnv([make] * arm["environments"], context="spawn", autoreset_mode=AutoresetMode.DISABLED)
    steps = _actions(arm).swapaxes(0, 1).astype(np.float32)

    def play() -> Final:
        seen, _ = envs.reset(seed=list(range(arm["environments"])))
        for actions in steps:
            seen, _, _, truncated, _ = envs.step(actions)
        _check_ends(truncated, arm["environments"])
        return {"state": seen["state"]} | ({"image": seen["rgb"]} if "rgb" in seen else {})

    try:
        yield play, [process.pid for process in envs.processes if process.pid is not None]
    finally:
        envs.close()


@contextlib.contextmanager
def _mujoco_rollout(arm: dict[str, Any]) -> Iterator[Player]:
    """The physics alone in one call: joint targets known before, no rewards, no observations, no images."""
    import mujoco
    from mujoco import rollout

    rows, env = range(arm["environments"]), TabletopEnv(TASK, ARM, "state")
    starts, accelerations = [], []
    for seed in rows:
        env.reset(seed=seed)
        starts.append(_physics_of(env))
        accelerations.append(env.data.qacc_warmstart.copy())
    controller = CartesianController(find_arm(ARM))
    controller.reset(len(rows))
    controls = np.repeat(controller.plan(rows, _actions(arm)).controls, PHYSICS_STEPS, axis=1)
    workspace = [mujoco.MjData(env.model) for _ in range(arm["workers"])]
    with rollout.Rollout(nthread=arm["workers"]) as pool:

        def play() -> Final:
            states, _ = pool.rollout(
                env.model, workspace, np.array(starts), controls, initial_warmstart=np.array(accelerations)
            )
            return {"physics": states[:, -1]}

        yield play, ()


def _play_chunks(sim: RobotSim, episodes: Sequence[EpisodeSpec], chunks: Sequence[NDArray[np.float64]]) -> Final:
    result = sim.reset(episodes)
    for actions in chunks:
        result = sim.step_chunk(actions[sim.live])
    _check_ends(result.truncated, len(episodes))
    seen = result.observation
    return {"state": seen.state} | ({} if seen.images is None else {"image": seen.images})


def _check_ends(truncated: NDArray[np.bool_], environments: int) -> None:
    """Raise where an episode did not last to the horizon: the arms would not have done the same work."""
    reached = int(np.count_nonzero(truncated))
    if reached < environments:
        raise RunError(f"{reached} of {environments} episodes reached the horizon; expected all of them")


def _play_alone(arm: dict[str, Any]) -> tuple[Final, NDArray[np.float32]]:
    """Ends and (N, 22) starting states of the episodes in one environment of this process, one after the other."""
    size = max(arm["size_px"], 1)
    mode = "rgb_array" if arm["size_px"] else None
    env = TabletopEnv(
        TASK, ARM, "state", horizon=arm["steps"], render_mode=mode, render_size=(size, size), render_look="policy"
    )
    ends: dict[str, list[Any]] = {"state": [], "physics": []} | ({"image": []} if mode else {})
    starts = []
    for seed, actions in enumerate(_actions(arm)):
        starts.append(env.reset(seed=seed)[0]["state"])
        for action in actions:
            seen, *_ = env.step(action)
        ends["state"].append(seen["state"])
        ends["physics"].append(_physics_of(env))
        if mode:
            ends["image"].append(env.render())
    env.close()
    return {name: np.array(rows) for name, rows in ends.items()}, np.array(starts)


def _compare(final: Final, alone: Final, starts: NDArray[np.float32]) -> dict[str, dict[str, Any]]:
    differences = {name: np.abs(rows - alone[name].astype(np.float64)).max() for name, rows in final.items()}
    moved = np.abs(alone["state"] - starts).max(axis=1).min()
    return {f"{name}, difference to TabletopEnv alone": check(float(gap), 0.0) for name, gap in differences.items()} | {
        "state, difference to its start": check(float(moved), MOVED, above=True)
    }


def _actions(arm: dict[str, Any]) -> NDArray[np.float64]:
    """(N, steps, 5) in -1..1, multiples of 1/1024: no rounding to float32 and no scaling on the way changes them."""
    shape = (arm["environments"], arm["steps"], ACTION_SIZE)
    return np.random.default_rng(0).integers(-1024, 1025, shape) / 1024


def _chunks(arm: dict[str, Any]) -> list[NDArray[np.float64]]:
    return np.split(_actions(arm), arm["steps"] // arm["chunk"], axis=1)


def _drawn_layout(seed: int) -> int:
    """The layout that a TabletopEnv draws when it is reset with a seed and no layout."""
    from gymnasium.utils.seeding import np_random

    return int(np_random(seed)[0].integers(LAYOUTS))


def _physics_of(env: TabletopEnv) -> NDArray[np.float64]:
    import mujoco

    full = int(mujoco.mjtState.mjSTATE_FULLPHYSICS)
    state = np.empty(mujoco.mj_stateSize(env.model, full))
    mujoco.mj_getState(env.model, env.data, state, full)
    return state


def cpu_seconds(processes: Sequence[int]) -> float:
    """CPU seconds so far of this process and of others; NaN if the system does not report other processes."""
    if processes and sys.platform != "linux":
        return float("nan")
    # The number of a process's clock as clock_getcpuclockid(3) makes it; /proc counts in steps of 10 ms only.
    return time.process_time() + sum(time.clock_gettime((~process << 3) | 2) for process in processes)


def _counts(arm: dict[str, Any]) -> dict[str, int]:
    steps = arm["environments"] * arm["steps"]
    looks = arm["environments"] * (1 + arm["steps"] // arm["chunk"])
    images = looks if arm["size_px"] and arm["simulator"] != "mujoco.rollout" else 0
    return {
        "control_steps": steps,
        "physics_steps": steps * PHYSICS_STEPS,
        "images": images,
        "bytes": images * arm["size_px"] ** 2 * 3,
    }


SIMULATORS: dict[str, Callable[[dict[str, Any]], AbstractContextManager[Player]]] = {
    "SubprocessSim": _worker_pool,
    "TabletopBatch": _tabletop_batch,
    "AsyncVectorEnv": _async_vector_env,
    "mujoco.rollout": _mujoco_rollout,
}
