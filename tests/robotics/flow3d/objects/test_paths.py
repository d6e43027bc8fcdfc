"""Gripper paths as actions: written and read, replayed from clips, and followed by arms in physics."""

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from mmrl.errors import UserError
from robotics.flow3d.geometry import make_pose
from robotics.flow3d.objects.path_sim import (
    HALF_TURN,
    action_of_angles,
    action_of_poses,
    angles_of_action,
    canonical_grip,
    path_state,
    poses_of_action,
)

pytest.importorskip("mujoco", reason="needs pip install 'mmrl-suite[sim]'")
pytest.importorskip("mink")

from robotics.data import LeRobotReader
from robotics.flow3d.clip import FlowEncoding
from robotics.flow3d.data import FlowReader, FlowWriter
from robotics.flow3d.kinematics import ArmIk
from robotics.flow3d.objects.demonstrations import FlowDemonstrationConfig, instructed_clips
from robotics.flow3d.objects.demonstrator import Demonstrator
from robotics.flow3d.objects.path_sim import PathSim, open_path_sim
from robotics.flow3d.objects.scene import FlowScene, SceneConfig
from robotics.sim.episodes import EpisodeSpec
from robotics.sim.opening import SimConfig
from robotics.toy.path_demos import build_path_demonstrations, canonical_along, path_frames

LAYOUT = 2
CLOSED = np.array([False, False, True, True])


@pytest.fixture
def way():
    rng = np.random.default_rng(5)
    turns = Rotation.random(4, random_state=1).as_matrix()
    return make_pose(turns, rng.uniform(-0.5, 0.5, (4, 3)))


def test_a_path_is_read_as_it_was_written(way):
    poses, closed = poses_of_action(action_of_poses(way, CLOSED))
    np.testing.assert_allclose(poses, way, atol=1e-6)  # single precision
    assert closed.tolist() == CLOSED.tolist()


def test_predicted_directions_become_a_rotation(way):
    noisy = action_of_poses(way, CLOSED) + np.random.default_rng(0).normal(0, 0.2, 40)
    noisy[3:9] = 0.0
    poses, _ = poses_of_action(noisy)
    turns = poses[:, :3, :3]
    np.testing.assert_allclose(turns @ turns.transpose(0, 2, 1), np.tile(np.eye(3), (4, 1, 1)), atol=1e-9)
    np.testing.assert_allclose(np.linalg.det(turns), 1.0)


def test_both_halves_of_a_grip_are_the_same_one(way):
    np.testing.assert_allclose(canonical_grip(way), canonical_grip(way @ HALF_TURN), atol=1e-12)
    assert (canonical_grip(way)[:, 1, 1] >= 0).all()


@pytest.mark.parametrize("action", [np.zeros(11), np.full(10, np.nan), np.zeros((2, 10))])
def test_malformed_paths_are_refused(action):
    with pytest.raises(UserError, match="finite numbers"):
        poses_of_action(action)


def test_a_path_has_the_frames_of_the_flow():
    frames = np.tile(np.eye(4), (41, 1, 1))
    frames[:, 0, 3] = np.arange(41)
    chosen, closed = path_frames(len(frames), approach=10, num_frames=8, released=True)
    assert canonical_along(frames[chosen])[:, 0, 3].tolist() == [7, 10, 10, 13, 17, 21, 25, 28, 32, 36, 40, 40]
    assert closed.tolist() == [False, False, *[True] * 9, False]
    assert path_frames(len(frames), 10, 8, released=False)[1][-1]


@pytest.fixture(scope="module")
def demos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ways")
    config = FlowDemonstrationConfig(
        tasks=("place_red", "pour"), actors=("panda", "nobody", "hand"), scene=SceneConfig(width=64, height=64)
    )
    with FlowWriter(folder / "clips", num_frames=8, grid=4) as writer:
        for clip in instructed_clips(range(8), config, FlowEncoding()):
            writer.add(clip, split="train")
    build_path_demonstrations(str(folder / "ways"), clips=str(folder / "clips"), image_size=32)
    return folder


def test_demonstrations_are_those_of_the_clips_that_have_a_gripper(demos):
    clips, episodes = FlowReader(demos / "clips"), LeRobotReader(demos / "ways")
    shown = [clip for clip in (clips[n] for n in range(len(clips))) if clip.meta["actor"] != "nobody"]
    assert {clip.meta["actor"] for clip in clips} == {"panda", "nobody", "hand"}
    texts = [clip.observation.instruction for clip in shown]
    written = [episodes.episode(number) for number in range(len(episodes.episodes))]
    assert [one.task for one in written] == texts  # every one of them is within reach
    for clip, one in zip(shown, written, strict=True):
        np.testing.assert_allclose(one.state[0, 9:].reshape(-1, 3), clip.points_world_m, atol=1e-6)
        assert one.images["front"].shape == (1, 32, 32, 3)
        poses, closed = poses_of_action(one.action[0])
        assert closed.tolist() == [False, False, *[True] * 9, clip.meta["task"] == "pour"]
        away = np.linalg.norm(clip.points_world_m - poses[1, :3, 3], axis=-1)
        assert away.min() < 0.06  # the grip is at the object


def test_the_path_of_a_demonstration_solves_the_task_on_its_own_arm(demos, closing):
    clips, episodes = FlowReader(demos / "clips"), LeRobotReader(demos / "ways")
    shown = [clip for clip in clips if clip.meta["actor"] != "nobody"]
    number = next(
        n for n, clip in enumerate(shown) if (clip.meta["actor"], clip.meta["task"]) == ("panda", "place_red")
    )
    clip, way = shown[number], episodes.episode(number).action[0]
    sim = closing(PathSim(["panda/place_red"], image_size=32, shapes=[clip.meta["shape"]]))
    begun = sim.reset([EpisodeSpec("panda/place_red", "", clip.meta["seed"], "train")])
    assert begun.observation.state.shape == (1, sim.state_size)
    assert not begun.failed.any()
    done = sim.step_chunk(way[None, None])
    assert done.success.tolist() == [True]
    assert not len(sim.live)
    sim.reset([EpisodeSpec("panda/place_red", "", clip.meta["seed"], "train")])
    still = way.reshape(-1, 10).copy()
    still[:, 9] = -1.0  # the same way with open fingers leaves the mug where it is
    failed = sim.step_chunk(still.reshape(1, 1, -1))
    assert failed.success.tolist() == [False]
    assert "on the pad" in failed.reasons[0]


def test_the_arm_takes_the_half_of_a_grip_that_it_can_follow_to_the_end():
    sim = PathSim(["panda/pour"], image_size=32)
    demonstrator = Demonstrator(FlowScene(SceneConfig("pour", "panda", layouts="held_out", width=32, height=32)))
    try:
        demonstrator.scene.reset(LAYOUT)
        planned = demonstrator.plan()
        arm = ArmIk(demonstrator.scene.arm)
        poses = np.stack([arm.pose(row) for row in planned.joint_rad])
        frames, closed = path_frames(len(poses), planned.approach, 8, released=False)
        way = canonical_along(poses[frames])
        for half in (way, way @ HALF_TURN):  # one of them cannot be tilted far enough
            sim.reset([EpisodeSpec("panda/pour", "", LAYOUT, "held_out")])
            assert sim.step_chunk(action_of_poses(half, closed)[None, None]).success.tolist() == [True]
    finally:
        demonstrator.scene.close()
        sim.close()


def test_angles_are_read_as_they_were_written():
    angles = np.random.default_rng(2).uniform(-6, 6, (4, 7))
    found, closed = angles_of_action(action_of_angles(angles, CLOSED), 7)
    np.testing.assert_allclose(found, angles, atol=1e-6)  # single precision
    assert closed.tolist() == CLOSED.tolist()
    with pytest.raises(UserError, match="W \\* 7 finite numbers"):
        angles_of_action(action_of_angles(angles, CLOSED), 6)


def test_angles_of_a_demonstration_do_the_task_on_their_own_arm_and_not_on_another(demos, closing):
    clips = FlowReader(demos / "clips")
    build_path_demonstrations(
        str(demos / "angles"), clips=str(demos / "clips"), actors=["panda"], actions="joints", image_size=32
    )
    episodes = LeRobotReader(demos / "angles")
    shown = [clip for clip in clips if clip.meta["actor"] == "panda"]
    assert len(episodes.episodes) == len(shown)
    number = next(n for n, clip in enumerate(shown) if clip.meta["task"] == "place_red")
    meta, action = shown[number].meta, episodes.episode(number).action[0]
    ends = {}
    sim = closing(
        PathSim(["panda/place_red", "gen3/place_red"], image_size=32, actions="joints", shapes=[meta["shape"]])
    )
    for arm in ("panda", "gen3"):
        sim.reset([EpisodeSpec(f"{arm}/place_red", "", meta["seed"], "train")])
        ends[arm] = sim.step_chunk(action[None, None]).success.tolist()
    assert ends == {"panda": [True], "gen3": [False]}


def test_angles_are_those_of_one_arm(demos):
    with pytest.raises(UserError, match="panda 7, ur5e 6"):
        PathSim(["panda/pour", "ur5e/pour"], actions="joints")
    with pytest.raises(UserError, match="expected grips or joints"):
        PathSim(["panda/pour"], actions="torques")
    for actors in ([], ["hand"], ["panda", "gen3"]):
        with pytest.raises(UserError, match="needs exactly one arm"):
            build_path_demonstrations(str(demos / "none"), clips=str(demos / "clips"), actors=actors, actions="joints")


def test_simulator_names_what_does_not_exist():
    with pytest.raises(UserError, match="expected arm/task"):
        PathSim(["panda/juggle"])
    with pytest.raises(UserError, match="no shape"):
        PathSim(["panda/pour"], shapes=["elephant"])
    with pytest.raises(UserError, match="allowed: arms, num_frames"):
        open_path_sim(SimConfig(kind="robotics.flow3d.objects.path_sim:open_path_sim", options={"speed": 1}))


def test_simulator_has_the_tasks_of_the_arms_that_are_named():
    kind, angles = "robotics.flow3d.objects.path_sim:open_path_sim", {"actions": "joints", "arms": ["panda", "gen3"]}
    sim = open_path_sim(SimConfig(kind=kind, options=angles))
    assert {name.split("/")[0] for name in sim.tasks()} == {"panda", "gen3"}
    assert sim.action_size == 12 * 8
    with pytest.raises(UserError, match="no effect with sim"):
        open_path_sim(SimConfig(kind=kind, tasks=["panda/pour"], options=angles))


def test_state_has_pose_and_points():
    state = path_state(np.eye(4), np.arange(6.0).reshape(2, 3))
    assert state.tolist() == [0, 0, 0, 0, 0, 1, 0, 1, 0, 0, 1, 2, 3, 4, 5]
