"""Throughput of robot simulators: equal work in every arm, direction of the ratios, CPU time of other processes."""

import contextlib
import gc
import subprocess
import sys
import time
from importlib.util import find_spec

import numpy as np
import pytest

from benchmarks.harness import BenchOptions
from benchmarks.robotics import comparisons as sim
from benchmarks.robotics import throughput, throughput_arms
from mmrl.errors import RunError
from robotics.scenes.envs import TabletopEnv
from robotics.sim import find_backend

# mujoco itself must not be imported yet: it reads MUJOCO_GL then, which the conftest of tests/robotics sets
pytestmark = pytest.mark.skipif(find_spec("mujoco") is None, reason="needs pip install 'mmrl-suite[sim]'")


@pytest.fixture(scope="module", autouse=True)
def frozen():
    """Skips the arms' garbage collection, which would search everything that the tests have imported."""
    gc.freeze()


@pytest.fixture(scope="module")
def backend():
    """Name of a renderer that works here."""
    found = find_backend()
    if found is None:
        pytest.skip("no OpenGL renders without a screen here: sudo apt-get install libegl1 libosmesa6")
    return found.name


def small(simulator, **changes):
    base = {"simulator": simulator, "environments": 1, "workers": 1, "steps": 4, "chunk": 2, "size_px": 0}
    return base | {"backend": None, "repetitions": 1} | changes


@pytest.mark.slow
def test_every_arm_ends_where_the_environment_alone_does_and_draws_the_same(backend, monkeypatch):
    monkeypatch.setitem(throughput.QUICK, "environments", 1)
    found = throughput.compare_throughput(BenchOptions(quick=True), backend, 32)
    assert set(found["arms"]) == {throughput.THEIRS, *throughput.OURS, throughput.FLOOR}
    assert not found["failed"]
    equal = {name: entry["limit"] for name, entry in found["checks"].items() if "to TabletopEnv alone" in name}
    assert len(equal) == 2 * 5 + 1  # state and image, and the physics of the floor
    assert set(equal.values()) == {0.0}
    counts = {name: run["counts"] for name, run in found["arms"].items()}
    assert {(count["control_steps"], count["physics_steps"]) for count in counts.values()} == {(4, 100)}
    assert {name for name, count in counts.items() if count["images"] == 5} == {
        throughput.THEIRS,
        throughput.POOL_STEPS,
        throughput.BATCH_STEPS,
    }
    assert counts[throughput.POOL_CHUNKS] == counts[throughput.BATCH_CHUNKS]
    assert (counts[throughput.POOL_CHUNKS]["images"], counts[throughput.POOL_CHUNKS]["bytes"]) == (3, 3 * 32 * 32 * 3)
    assert all(entry["median"] > 0 for entry in found["ratios"].values())


@pytest.mark.parametrize("simulator", ["AsyncVectorEnv", "SubprocessSim", "TabletopBatch", "mujoco.rollout"])
def test_each_environment_has_its_own_layout_and_actions(simulator):
    found = throughput_arms.throughput_arm(small(simulator, environments=2, workers=2))
    assert all(entry["passed"] for entry in found["checks"].values())
    assert found["counts"] == {"control_steps": 8, "physics_steps": 200, "images": 0, "bytes": 0}
    assert found["cpu_s"]["total"] > 0


def test_the_command_offers_both_comparisons():
    assert {"throughput-states", "throughput-128"} <= set(sim.NAMES)


def test_other_actions_fail_the_check(monkeypatch):
    @contextlib.contextmanager
    def other(arm):
        env = TabletopEnv("push", observation="state")
        env.reset(seed=0)
        actions = throughput_arms._actions(arm)[0] + [0.0, 0.0, 0.0, 2.0**-10, 0.0]
        seen = [env.step(action)[0]["state"] for action in actions]
        yield lambda: {"state": seen[-1][None]}, ()

    monkeypatch.setitem(throughput_arms.SIMULATORS, "other", other)
    checks = throughput_arms.throughput_arm(small("other"))["checks"]
    assert not checks["state, difference to TabletopEnv alone"]["passed"]
    assert checks["state, difference to its start"]["passed"]


def test_an_arm_that_does_less_work_is_refused(monkeypatch):
    whole = throughput_arms._chunks
    monkeypatch.setattr(throughput_arms, "_chunks", lambda arm: whole(arm)[:-1])
    with pytest.raises(RunError, match="0 of 1 episodes reached the horizon"):
        throughput_arms.throughput_arm(small("TabletopBatch"))


def test_actions_survive_rounding_and_scaling():
    actions = throughput_arms._actions(small("SubprocessSim", environments=3, steps=50))
    scaled = -1.0 + (actions + 1.0) / 2.0 * 2.0
    assert np.array_equal(scaled.astype(np.float32).astype(np.float64), actions)
    assert np.abs(actions).max() <= 1.0
    assert np.array_equal(actions, throughput_arms._actions(small("TabletopBatch", environments=3, steps=50)))


def test_seeds_draw_the_layouts_that_the_batch_is_given():
    env = TabletopEnv("push", observation="state")
    assert [env.reset(seed=seed)[1]["layout"] for seed in range(3)] == [
        throughput_arms._drawn_layout(seed) for seed in range(3)
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the CPU time of other processes")
def test_cpu_seconds_count_other_processes():
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        before, own = throughput_arms.cpu_seconds([busy.pid]), time.process_time()
        deadline = time.monotonic() + 10.0
        while throughput_arms.cpu_seconds([busy.pid]) - before < 0.2 and time.monotonic() < deadline:
            time.sleep(0.02)
        spent, own = throughput_arms.cpu_seconds([busy.pid]) - before, time.process_time() - own
        busy.kill()
    assert spent >= 0.2
    assert own < spent, "mostly asleep meanwhile"
    before, found, after = time.process_time(), throughput_arms.cpu_seconds([]), time.process_time()
    assert before <= found <= after


def test_ratios_are_those_of_steps_per_second(monkeypatch):
    asked = {}

    def run_arms(title, arms, options):
        asked.update({arm.name: arm.options for arm in arms})
        seconds = {throughput.THEIRS: 4.0, throughput.POOL_CHUNKS: 2.0, throughput.FLOOR: 0.5}
        return {arm.name: measured(seconds.get(arm.name, 1.0)) for arm in arms}

    def measured(seconds):
        times = {"cpu_s": {"total": seconds}, "wall_s": {"total": 2.0 * seconds}}
        return times | {"blocks": [times], "counts": {"control_steps": 16}, "checks": {}}

    monkeypatch.setattr(throughput, "run_arms", run_arms)
    found = throughput.compare_throughput(BenchOptions(), "egl", 128)
    ratios = {name: entry["median"] for name, entry in found["ratios"].items()}
    assert ratios["SubprocessSim, end of chunk, steps per second over AsyncVectorEnv"] == 2.0
    assert ratios["TabletopBatch, every step, steps per CPU second over AsyncVectorEnv"] == 4.0
    assert ratios["AsyncVectorEnv, steps per second over mujoco.rollout"] == 0.125
    assert found["floor"]["control_steps_per_second"]["mujoco.rollout"] == 16.0
    assert {options["environments"] for options in asked.values()} == {4}
    assert {name for name, options in asked.items() if options["chunk"] == 1} == {
        throughput.THEIRS,
        throughput.POOL_STEPS,
        throughput.BATCH_STEPS,
    }
