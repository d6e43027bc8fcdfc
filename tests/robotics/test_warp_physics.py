"""The tabletop's episodes with mujoco_warp against MuJoCo, on warp's CPU device, which needs no GPU and is slow.

The first run compiles warp's kernels, a minute or two.
"""

import numpy as np
import pytest

from mmrl.errors import UserError
from mmrl.fields import check_config
from robotics.scenes.batch import BatchSettings, TabletopBatch
from robotics.scenes.experts import Expert
from robotics.sim.episodes import EpisodeSpec
from robotics.sim.opening import SimConfig, open_sim
from robotics.sim.randomization import RandomizationConfig

pytest.importorskip("mujoco", reason="needs pip install 'mmrl-suite[sim]'")
TASKS = ("push", "drawer", "stack")
EPISODES = [EpisodeSpec(task, "", layout) for task in TASKS for layout in (0, 1)]


def settings(**options) -> BatchSettings:
    return BatchSettings(**{"image_size": None, "reward": "dense", **options})


def warp(**options) -> BatchSettings:
    return settings(physics="warp", device="cpu", **options)


def upwards(rows: int, steps: int) -> np.ndarray:
    """Motions without contact."""
    actions = np.random.default_rng(0).uniform(-1.0, 1.0, (rows, steps, 5))
    actions[:, :, 2] = np.abs(actions[:, :, 2])
    return actions


@pytest.fixture
def installed():
    pytest.importorskip("mujoco_warp", reason="needs pip install 'mmrl-suite[warp]'")


@pytest.mark.slow
@pytest.mark.usefixtures("installed")
def test_free_motion_is_that_of_mujoco():
    actions, results = upwards(len(EPISODES), 6), {}
    for name, chosen in (("mujoco", settings()), ("warp", warp())):
        with TabletopBatch(TASKS, settings=chosen) as sim:
            start = sim.reset(EPISODES)
            results[name] = [start, sim.step_chunk(actions[:, :2]), sim.step_chunk(actions[:, 2:])]
    for ours, theirs in zip(results["warp"], results["mujoco"], strict=True):
        # float32 through 150 physics steps; states are metres and radians
        np.testing.assert_allclose(ours.observation.state, theirs.observation.state, atol=2e-4)
        np.testing.assert_allclose(ours.rewards, theirs.rewards, atol=1e-3)
        np.testing.assert_allclose(ours.object_poses, theirs.object_poses, atol=1e-3, equal_nan=True)
        assert np.array_equal(ours.steps, theirs.steps)
        assert np.array_equal(ours.success, theirs.success)
    moved = results["warp"][2].observation.state[:, :3] - results["warp"][0].observation.state[:, :3]
    assert np.abs(moved).max() > 0.05


@pytest.mark.slow
@pytest.mark.usefixtures("installed")
def test_experts_solve_the_tasks_and_rows_restart():
    solved = {}
    with TabletopBatch(("push", "drawer"), settings=warp()) as sim:
        sim.reset([EpisodeSpec("push", "", 0), EpisodeSpec("drawer", "", 0)])
        experts = [Expert("push"), Expert("drawer")]
        while len(sim.live):
            state = sim.full_state()
            chosen = [experts[row].act(state[place : place + 1])[0] for place, row in enumerate(sim.live)]
            chunk = sim.step_chunk(np.array(chosen)[:, None])
            solved |= dict(zip(chunk.rows.tolist(), chunk.success.tolist(), strict=True))
            assert not chunk.failed.any()
        assert solved == {0: True, 1: True}
        again = sim.restart({1: EpisodeSpec("drawer", "", 0)})
        assert sim.live.tolist() == [1]
        with TabletopBatch(("drawer",), settings=settings()) as other:
            np.testing.assert_array_equal(
                again.observation.state[0], other.reset([EpisodeSpec("drawer", "", 0)]).observation.state[0]
            )


@pytest.mark.slow
@pytest.mark.usefixtures("installed")
def test_masses_gains_and_friction_of_the_variants_count():
    episodes = [EpisodeSpec("push", "", 0, draw=draw) for draw in (0, 1)]
    ranges = RandomizationConfig(servo_gain=[0.1, 0.9], mass=[0.5, 2.0], friction=[0.5, 2.0])
    actions = np.tile(upwards(1, 4), (2, 1, 1))
    seen = {}
    for name, make in (("mujoco", settings), ("warp", warp)):
        with TabletopBatch(("push",), settings=make(randomization=ranges)) as sim:
            sim.reset(episodes)
            seen[name] = sim.step_chunk(actions).observation.state
    np.testing.assert_allclose(seen["warp"], seen["mujoco"], atol=1e-5)
    assert np.abs(seen["warp"][0] - seen["warp"][1]).max() > 2e-4  # the two arms follow differently


@pytest.mark.slow
@pytest.mark.usefixtures("installed")
def test_a_scene_that_diverges_fails_alone():
    with TabletopBatch(("push",), settings=warp()) as sim:
        sim.reset([EpisodeSpec("push", "", 0), EpisodeSpec("push", "", 1)])
        (group,) = sim._groups
        group.rollout.data(0).qvel[:] = np.nan
        chunk = sim.step_chunk(upwards(2, 2))
        assert chunk.failed.tolist() == [True, False]
        assert np.isnan(chunk.rewards[0]).all()
        assert np.isfinite(chunk.rewards[1]).all()
        assert sim.live.tolist() == [1]
        assert sim.counts["diverged"] == 1


@pytest.mark.slow
@pytest.mark.usefixtures("installed")
def test_a_full_buffer_is_a_failure_and_not_a_trajectory(monkeypatch):
    from robotics.scenes.arms import find_arm
    from robotics.scenes.tabletop import PHYSICS_STEPS
    from robotics.scenes.tabletop_tasks import TabletopScene, find_task
    from robotics.sim import warp_physics
    from robotics.sim.rollout import ImageRollout

    monkeypatch.setattr(warp_physics, "CONTACTS", 16)
    monkeypatch.setattr(warp_physics, "CONSTRAINTS", 34)
    scene = TabletopScene(find_task("stack"), find_arm("panda"))
    physics = warp_physics.WarpPhysics(scene.model, 1, PHYSICS_STEPS, "cpu")
    with ImageRollout(scene.model, scene, 1, None, substeps=PHYSICS_STEPS, physics=physics) as sim:
        sim.reset([0])
        held = np.repeat(sim.data(0).ctrl[None, None], 1, axis=1)
        assert sim.step_chunk(held).failed.tolist() == [False]  # two cubes lie there, with 4 contacts of 4 rows each
        pressed = np.repeat(held, 8, axis=1)
        pressed[:, :, 1] += 1.0
        assert sim.step_chunk(pressed).failed.tolist() == [True]


@pytest.mark.slow
@pytest.mark.usefixtures("installed")
def test_the_device_is_in_the_record_and_must_exist():
    with open_sim(SimConfig(tasks=["push"], image_size=0, physics="warp")) as sim:
        assert "mujoco_warp" in sim.describe()["physics"]
    with pytest.raises(UserError, match="warp has no device 'cuda:7'; available: cpu"):
        TabletopBatch(("push",), settings=settings(physics="warp", device="cuda:7"))


def test_without_mujoco_warp_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "mujoco_warp", None)
    with pytest.raises(UserError, match=r"pip install 'mmrl-suite\[warp\]'"):
        TabletopBatch(("push",), settings=settings(physics="warp"))


def test_only_the_tabletop_has_a_choice_of_physics():
    with pytest.raises(ValueError, match=r"it has no effect while sim\.kind is 'metaworld'"):
        check_config(SimConfig(kind="metaworld", physics="warp"), "sim")
    with pytest.raises(UserError, match=r"it has no effect while .*physics is 'mujoco'"):
        TabletopBatch(("push",), settings=settings(device="cpu"))
