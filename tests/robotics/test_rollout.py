import copy

import numpy as np
import pytest

from mmrl.errors import UserError
from robotics.sim import FrameRenderer, ImageRollout, RenderSettings, rendering, update_poses
from robotics.toy.arm_cubes import ReachCube

mujoco = pytest.importorskip("mujoco", reason="needs pip install 'mmrl-suite[sim]'")
SUBSTEPS = 4
# A pile that keeps colliding, and a solver that stops before it has converged: where it starts shows in the result.
PILE = """
<mujoco>
  <visual><quality shadowsize="256"/></visual>
  <option solver="CG" iterations="3"/>
  <worldbody>
    <light pos="0 0 2"/>
    <geom type="plane" size="1 1 0.1"/>
    <body name="hand" mocap="true" pos="0 0 0.02"><geom type="box" size="0.02 0.02 0.02"/></body>
    {boxes}
  </worldbody>
  <actuator><motor joint="hinge" gear="0.01"/></actuator>
  <sensor><framepos objtype="body" objname="box0"/></sensor>
</mujoco>
"""
BOX = """<body name="box{0}" pos="{1} 0 {2}" euler="{3} 20 0"><{4}/><geom type="box" size="0.05 0.04 0.03"/></body>"""


class Tumble:
    """Boxes thrown at each other; the episode ends in a control step that the test chooses."""

    def __init__(self, ends_at: dict[int, float] | None = None):
        self.ends_at = ends_at or {}

    def reset(self, model, data, rng):
        data.qvel[:] = rng.normal(0.0, 1.0, model.nv)
        data.mocap_pos[0] = rng.uniform(-0.05, 0.05, 3)
        data.xfrc_applied[2, :3] = rng.normal(0.0, 0.1, 3)

    def score(self, steps):
        heights = steps.sensordata[:, 2]
        marks = steps.actions[:, 0]
        return heights, np.isin(marks, list(self.ends_at))


def boxes() -> str:
    joints = ["freejoint", "freejoint", 'joint name="hinge" type="hinge"']
    return "\n".join(BOX.format(i, 0.03 * i, 0.1 + 0.08 * i, 30 * i, joint) for i, joint in enumerate(joints))


@pytest.fixture(scope="module")
def pile():
    return mujoco.MjModel.from_xml_string(PILE.format(boxes=boxes()))


def random_actions(scenes: int, steps: int, nu: int = 1, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0.0, 1.0, (scenes, steps, nu))


def state_of(data) -> np.ndarray:
    return np.concatenate([[data.time], data.qpos, data.qvel, data.qacc_warmstart])


def loop(model, task, seed: int, actions, cold_every: int = 0) -> tuple[np.ndarray, list[np.ndarray]]:
    """State at the end of a plain mj_step loop, and sensor values of the state after each control step."""
    data = mujoco.MjData(model)
    task.reset(model, data, np.random.default_rng(seed))
    mujoco.mj_forward(model, data)
    sensors = []
    for number, action in enumerate(actions):
        if cold_every and number % cold_every == 0:
            data.qacc_warmstart[:] = 0.0
        data.ctrl[:] = action
        for _ in range(SUBSTEPS):
            mujoco.mj_step(model, data)
        reached = copy.copy(data)
        mujoco.mj_forward(model, reached)
        sensors.append(reached.sensordata.copy())
    return state_of(data), sensors


def roll(model, task, actions, chunk: int, settings=None, record=(), **options):
    """Roll all scenes out; returns their final states, the chunks and the first observation."""
    scenes = len(actions)
    with ImageRollout(model, task, scenes, settings, substeps=SUBSTEPS, **options) as rollout:
        first = rollout.reset(range(scenes))
        chunks = []
        for start in range(0, actions.shape[1], chunk):
            if not len(rollout.live):
                break
            chunks.append(rollout.step_chunk(actions[rollout.live, start : start + chunk], record))
        return [state_of(rollout.data(scene)) for scene in range(scenes)], chunks, first


@pytest.mark.parametrize("chunk", [1, 3, 12])
def test_states_and_rewards_are_those_of_a_step_loop_bit_for_bit(pile, chunk):
    task, actions = Tumble(), random_actions(3, 12)
    states, chunks, _ = roll(pile, task, actions, chunk, workers=2)
    rewards = np.concatenate([found.rewards for found in chunks], axis=1)
    for scene in range(3):
        expected, sensors = loop(pile, task, scene, actions[scene])
        assert np.array_equal(states[scene], expected)
        assert np.array_equal(rewards[scene], [values[2] for values in sensors])
        if chunk == 3:
            cold, _ = loop(pile, task, scene, actions[scene], cold_every=chunk)
            assert not np.array_equal(cold, expected)  # what mujoco.rollout does when it is told nothing


def test_sensors_of_accelerations_are_those_of_the_state_whatever_the_chunk(pile):
    spec = mujoco.MjSpec.from_string(PILE.format(boxes=boxes()))
    spec.add_sensor(type=mujoco.mjtSensor.mjSENS_FRAMELINACC, objtype=mujoco.mjtObj.mjOBJ_BODY, objname="box2")
    model, actions = spec.compile(), random_actions(2, 12)
    plain, _, _ = roll(pile, Tumble(), actions, 12)
    each = [roll(model, Tumble(), actions, chunk) for chunk in (1, 12)]
    assert np.array_equal(each[0][1][-1].observation.sensordata, each[1][1][-1].observation.sensordata)
    for states, chunks, _ in each:
        assert np.array_equal(states, plain)
        assert np.abs(chunks[-1].observation.sensordata[:, 3:]).max() > 1


@pytest.mark.usefixtures("backend")
def test_number_of_workers_and_chunks_changes_no_bit(pile):
    actions, settings = random_actions(5, 12), RenderSettings(40, 32)
    reference, chunks, first = roll(pile, Tumble(), actions, 12, settings, workers=1)
    again, split, start = roll(pile, Tumble(), actions, 4, settings, workers=3)
    assert np.array_equal(reference, again)
    assert np.array_equal(chunks[-1].observation.frames, split[-1].observation.frames)
    assert np.array_equal(first.frames, start.frames)
    assert len({picture.tobytes() for picture in chunks[-1].observation.frames}) == 5


@pytest.mark.usefixtures("backend")
def test_images_show_the_state_they_come_with(model, small):
    task = ReachCube(model)
    actions = model.key("home").ctrl + random_actions(3, 4, model.nu) * 0.3
    with ImageRollout(model, task, 3, small, substeps=SUBSTEPS, workers=2) as rollout:
        seen = [rollout.reset([5, 6, 5]), rollout.step_chunk(actions).observation]
    assert np.array_equal(seen[0].frames[0], seen[0].frames[2])
    assert not np.array_equal(seen[0].frames[0], seen[0].frames[1])
    data = mujoco.MjData(model)
    with FrameRenderer(model, small) as renderer:
        for observation in seen:
            for row in range(3):
                data.qpos[:] = observation.qpos[row]
                update_poses(model, data)
                assert np.array_equal(renderer.rgb(data), observation.frames[row])


def test_an_episode_ends_with_the_step_of_the_task(pile):
    actions = random_actions(3, 8)
    actions[1, 2] = 77.0
    task = Tumble(ends_at={77.0: True})
    states, (first, second), _ = roll(pile, task, actions, 4)
    assert first.steps.tolist() == [4, 3, 4]
    assert first.dones.tolist() == [[False] * 4, [False, False, True, False], [False] * 4]
    assert first.rewards[1, 3] == 0.0
    assert not first.truncated.any()
    expected, sensors = loop(pile, task, 1, actions[1, :3])
    # The solver's starting point is that of the steps beyond the end, which nobody goes on from.
    assert np.array_equal(states[1][: -pile.nv], expected[: -pile.nv])
    assert np.array_equal(first.observation.qpos[1], expected[1 : 1 + pile.nq])
    assert np.array_equal(first.observation.sensordata[1], sensors[-1])
    assert second.scenes.tolist() == [0, 2]
    assert np.array_equal(states[2], loop(pile, task, 2, actions[2])[0])


def test_the_horizon_truncates_and_is_not_stepped_beyond(pile):
    actions = random_actions(2, 8)
    actions[0, 4] = 77.0
    states, (first, second), _ = roll(pile, Tumble(ends_at={77.0: True}), actions, 4, horizon=5)
    assert not first.truncated.any()
    assert second.steps.tolist() == [1, 1]
    assert second.dones.any(axis=1).tolist() == [True, False]
    assert second.truncated.tolist() == [False, True]
    assert np.array_equal(states[1], loop(pile, Tumble(), 1, actions[1, :5])[0])


@pytest.mark.usefixtures("backend")
def test_nothing_is_drawn_that_nobody_looks_at(pile, monkeypatch):
    drawn = []
    plain = rendering.FrameRenderer.rgb
    monkeypatch.setattr(rendering.FrameRenderer, "rgb", lambda *given: drawn.append(1) or plain(*given))
    actions = random_actions(4, 12)
    actions[:2, 1] = 77.0
    with ImageRollout(pile, Tumble(ends_at={77.0: True}), 4, RenderSettings(16, 16), workers=2) as rollout:
        rollout.reset(range(4))
        counts = [len(drawn)]
        for start in (0, 4, 8):
            rollout.step_chunk(actions[rollout.live, start : start + 4])
            counts.append(len(drawn))
    assert np.diff([0, *counts]).tolist() == [4, 4, 2, 2]


@pytest.mark.usefixtures("backend")
def test_recording_draws_each_control_step_and_disturbs_nothing(pile):
    actions, settings = random_actions(3, 8), RenderSettings(24, 16)
    actions[2, 5] = 77.0
    task = Tumble(ends_at={77.0: True})
    reference, chunks, _ = roll(pile, task, actions, 4, settings)
    states, recorded, _ = roll(pile, task, actions, 4, settings, record={0, 2})
    _, single, _ = roll(pile, task, actions, 1, settings)
    assert np.array_equal(states, reference)
    assert [sorted(found.recorded) for found in recorded] == [[0, 2], [0, 2]]
    for scene, steps in ((0, 8), (2, 6)):
        pictures = np.concatenate([found.recorded[scene] for found in recorded])
        expected = [found.observation.of([scene]).frames[0] for found in single if scene in found.scenes]
        assert pictures.shape == (steps, 16, 24, 3)
        assert np.array_equal(pictures, expected)
    for found, other in zip(recorded, chunks, strict=True):
        assert np.array_equal(found.observation.frames, other.observation.frames)


def test_a_diverging_scene_fails_and_the_others_continue(pile):
    class Explode(Tumble):
        def reset(self, model, data, rng):
            super().reset(model, data, rng)
            if rng.bit_generator.seed_seq.entropy == 1:
                data.xfrc_applied[2, 0] = 1e30

    actions = random_actions(3, 6)
    states, (first, second), _ = roll(pile, Explode(), actions, 3, workers=2)
    assert first.failed.tolist() == [False, True, False]
    assert np.isnan(first.rewards).all(axis=1).tolist() == [False, True, False]
    assert first.steps.tolist() == [3, 0, 3]
    assert not first.dones.any()
    assert not first.truncated.any()
    assert second.scenes.tolist() == [0, 2]
    assert np.array_equal(states[2], loop(pile, Tumble(), 2, actions[2])[0])


def test_what_goes_wrong_after_the_end_of_an_episode_is_not_its_failure(pile):
    actions = random_actions(3, 6)
    actions[:2, 3] = 1e12  # MuJoCo warns of it and rollout stops
    actions[0, 1] = 77.0
    _, (chunk,), _ = roll(pile, Tumble(ends_at={77.0: True}), actions, 6)
    assert chunk.failed.tolist() == [False, True, False]
    assert chunk.steps.tolist() == [2, 0, 6]
    assert np.array_equal(chunk.observation.qpos[0], loop(pile, Tumble(), 0, actions[0, :2])[0][1 : 1 + pile.nq])


@pytest.mark.parametrize("step", [0, 3, 5])
def test_a_warning_anywhere_in_a_chunk_is_a_failure(pile, step):
    actions = random_actions(1, 6)
    actions[0, step] = 1e12
    _, (chunk,), _ = roll(pile, Tumble(), actions, 6)
    assert chunk.failed.tolist() == [True]
    assert chunk.steps.tolist() == [0]


def test_an_observation_can_be_cut_to_the_scenes_that_continue(pile):
    with ImageRollout(pile, Tumble(ends_at={77.0: True}), 3, None) as rollout:
        first = rollout.reset(range(3))
        assert first.of(rollout.live) is first
        assert first.frames is None
        actions = random_actions(3, 2)
        actions[1, 0] = 77.0
        chunk = rollout.step_chunk(actions)
        rest = chunk.observation.of(rollout.live)
    assert rest.scenes.tolist() == [0, 2]
    assert np.array_equal(rest.qpos, chunk.observation.qpos[[0, 2]])


def test_an_error_in_the_task_reaches_the_caller(pile):
    class Broken(Tumble):
        def score(self, steps):
            raise ZeroDivisionError("no reward")

    with ImageRollout(pile, Broken(), 2, None, workers=2) as rollout:
        rollout.reset([0, 1])
        with pytest.raises(ZeroDivisionError, match="no reward"):
            rollout.step_chunk(random_actions(2, 1))


def test_a_task_must_score_each_control_step(pile):
    class Once(Tumble):
        def score(self, steps):
            return steps.sensordata[-1, 2], np.zeros(len(steps.actions), bool)

    with ImageRollout(pile, Once(), 1, None) as rollout:
        rollout.reset([0])
        with pytest.raises(UserError, match=r"Once.score returned the shapes \(\) and \(3,\) for 3 control steps"):
            rollout.step_chunk(random_actions(1, 3))


def test_mistakes_are_named(pile):
    with pytest.raises(UserError, match="substeps is 0"):
        ImageRollout(pile, Tumble(), 2, None, substeps=0)
    with ImageRollout(pile, Tumble(), 2, None) as rollout:
        with pytest.raises(UserError, match=r"call reset\(\) first"):
            rollout.step_chunk(random_actions(2, 1))
        with pytest.raises(UserError, match="3 seeds for 2 scenes"):
            rollout.reset([1, 2, 3])
        rollout.reset([1, 2])
        with pytest.raises(UserError, match=r"shape \(2, 1, 4\); expected \(2 live scenes, K >= 1, 1 actuators\)"):
            rollout.step_chunk(np.zeros((2, 1, 4)))
    with pytest.raises(RuntimeError, match="closed"):
        rollout.reset([1, 2])


def test_the_arm_reaches_the_cube(model):
    """The scene's task is solved by a hand-made pose, and not without motion."""
    task = ReachCube(model)
    home = np.array(model.key("home").ctrl)
    with ImageRollout(model, task, 2, None, horizon=60) as rollout:
        start = rollout.reset([0, 0])
        x, y = start.qpos[0, 8:10]
        down = _pose_above(model, x, y)
        chunk = rollout.step_chunk(np.stack([np.tile(down, (60, 1)), np.tile(home, (60, 1))]))
    assert chunk.dones.any(axis=1).tolist() == [True, False]
    assert chunk.rewards[0, chunk.steps[0] - 1] > -0.04


def _pose_above(model, x: float, y: float) -> np.ndarray:
    """Joint angles that bring the grip to a point 2 cm over the table, by search with the forward kinematics."""
    data = mujoco.MjData(model)
    best, pose = np.inf, None
    for shoulder in np.linspace(0.0, 1.4, 40):
        for elbow in np.linspace(0.3, 2.4, 40):
            data.qpos[:6] = np.arctan2(y, x), shoulder, elbow, 0.0, np.pi - shoulder - elbow, 0.0
            mujoco.mj_kinematics(model, data)
            distance = np.linalg.norm(data.site("grip").xpos - (x, y, 0.03))
            if distance < best:
                best, pose = distance, data.qpos[:8].copy()
    pose[6:] = 0.04
    return pose
