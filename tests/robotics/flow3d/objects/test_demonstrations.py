"""True flow of demonstrations against the poses of the simulator."""

import numpy as np
import pytest

from mmrl.errors import UserError
from robotics.flow3d.clip import FlowEncoding
from robotics.flow3d.geometry import angle_rad, apply_pose, inverse_pose
from robotics.flow3d.rigid_motion import kabsch

mujoco = pytest.importorskip("mujoco", reason="needs pip install 'mmrl-suite[sim]'")

from robotics.flow3d.data import FlowReader  # noqa: E402
from robotics.flow3d.objects.demonstrations import (  # noqa: E402
    TRAINING_ACTORS,
    FlowDemonstrationConfig,
    demonstrations,
    instructed_clips,
)
from robotics.flow3d.objects.demonstrator import Demonstrator  # noqa: E402
from robotics.flow3d.objects.flow_tasks import FLOW_TASKS  # noqa: E402
from robotics.flow3d.objects.scene import FLOW_ARMS, HELD_OUT_ARMS, FlowScene, SceneConfig  # noqa: E402  # noqa: E402
from robotics.toy.flow_clips import build_clips  # noqa: E402

SMALL = SceneConfig(width=64, height=64)


@pytest.mark.parametrize("task", ["place_red", "pour", "insert_yellow", "open_blue"])
def test_the_motion_of_the_flow_is_that_of_the_object_and_solves_the_task(task):
    with FlowScene(SMALL, task=task, actor="nobody") as scene:
        scene.reset(4)
        motion = scene.ideal_motion(31)
        clip = Demonstrator(scene).clip(FlowEncoding(num_frames=6, grid=5))
        assert clip.flow.shape == (6, 5, 5, 4)
        assert clip.observation.instruction == FLOW_TASKS[task].instruction
        for moved, pose in zip(clip.flow_world_m, motion[[5, 10, 15, 20, 25, 30]], strict=True):
            fitted = kabsch(clip.points_world_m, moved) @ scene.start
            np.testing.assert_allclose(fitted[:3, 3], pose[:3, 3], atol=1e-6)
            assert angle_rad(fitted, pose) < 1e-5
        assert scene.success(fitted).success


def test_query_points_lie_on_the_object_as_the_first_image_shows_it():
    with FlowScene(SMALL, task="place_red", actor="hand") as scene:
        for seed in range(4):
            scene.reset(seed)
            clip = Demonstrator(scene).clip()
            columns, rows = np.floor(clip.points[..., 0]).astype(int), np.floor(clip.points[..., 1]).astype(int)
            assert clip.observation.mask[rows, columns].all()
            np.testing.assert_array_equal(clip.points[..., 2], clip.observation.depth_m[rows, columns])


def test_visible_points_are_on_pixels_of_the_object_and_covered_ones_are_not():
    """A point behind the surface at its pixel is hidden, and a point on that surface is visible."""
    with FlowScene(SMALL, task="place_green", actor="hand") as scene:
        scene.reset(1)
        demonstrator = Demonstrator(scene)
        clip, planned = demonstrator.clip(FlowEncoding(num_frames=4, grid=6)), demonstrator.plan()
        share = []
        for frame, flow in zip((17, 25, 32, 40), clip.flow, strict=True):
            demonstrator.show(planned, frame)
            depth, mask = scene.true_depth(), scene.object_mask()
            columns, rows = np.floor(flow[..., 0]).astype(int), np.floor(flow[..., 1]).astype(int)
            near = np.stack([mask[rows + dv, columns + du] for dv in (-1, 0, 1) for du in (-1, 0, 1)]).any(0)
            visible = flow[..., 3] > 0
            assert near[visible].all()
            covered = depth[rows, columns] < flow[..., 2] - 0.03
            assert not visible[covered].any()
            share.append(visible.mean())
        assert 0.2 < np.mean(share) < 1.0


def test_who_acts_changes_what_is_seen_and_not_how_the_object_moves():
    clips = {}
    for actor in ("hand", "nobody"):
        with FlowScene(SMALL, task="place_red", actor=actor) as scene:
            scene.reset(2)
            clips[actor] = Demonstrator(scene).clip()
    assert (clips["hand"].observation.rgb != clips["nobody"].observation.rgb).any()
    # Depth is read from a buffer whose steps depend on the extent of the model, which a hand changes.
    np.testing.assert_allclose(clips["hand"].points, clips["nobody"].points, atol=1e-4)
    np.testing.assert_allclose(clips["hand"].flow[..., :3], clips["nobody"].flow[..., :3], atol=0.02)
    assert clips["hand"].flow[..., 3].sum() <= clips["nobody"].flow[..., 3].sum()


def test_a_hand_keeps_its_grip_and_starts_in_view():
    with FlowScene(SMALL, task="insert_blue", actor="hand") as scene:
        scene.reset(3)
        planned = Demonstrator(scene, approach=5, motion=12).plan()
        held = inverse_pose(planned.T_world_object[5:]) @ planned.T_world_hand[5:]
        np.testing.assert_allclose(held, np.broadcast_to(held[0], held.shape), atol=1e-9)
        assert np.linalg.norm(planned.T_world_hand[0, :3, 3] - scene.start[:3, 3]) > 0.08
        steps = np.linalg.norm(np.diff(planned.T_world_hand[:, :3, 3], axis=0), axis=-1)
        assert steps.max() < 0.25


def test_an_arm_holds_the_object_all_along():
    pytest.importorskip("mink", reason="needs pip install 'mmrl-suite[flow3d]'")
    with FlowScene(SMALL, task="open_red", actor="gen3") as scene:
        scene.reset(0)
        demonstrator = Demonstrator(scene)
        planned = demonstrator.plan()
        grips = []
        for frame in (10, 25, 40):
            demonstrator.show(planned, frame)
            grips.append(inverse_pose(scene.object_pose())[:3] @ [*scene.data.site("grip").xpos, 1.0])
        np.testing.assert_allclose(grips, np.broadcast_to(scene.shape.grip_m, (3, 3)), atol=5e-3)
        np.testing.assert_allclose(planned.joint_rad[0], FLOW_ARMS["gen3"].home_rad, atol=0.01)


def test_a_video_has_the_motion_of_its_clip_and_masks_of_object_and_hand():
    with FlowScene(SMALL, task="place_red", actor="hand") as scene:
        scene.reset(2)
        demonstrator = Demonstrator(scene, approach=3, motion=5)
        video, clip = demonstrator.video(), demonstrator.clip(FlowEncoding(num_frames=4))
    assert len(video) == 8
    np.testing.assert_array_equal(video.rgb[0], clip.observation.rgb)
    np.testing.assert_array_equal(video.truth.masks[0], clip.observation.mask)
    moved = apply_pose(video.truth.T_t_0[4:], clip.points_cam_m)
    np.testing.assert_allclose(moved, clip.flow_cam_m, atol=1e-9)
    np.testing.assert_allclose(video.truth.T_t_0[:4], np.broadcast_to(np.eye(4), (4, 4, 4)), atol=1e-9)
    assert not (video.gripper_mask & video.truth.masks[0]).any()
    with FlowScene(SMALL, task="place_red", actor="nobody") as scene:
        scene.reset(2)
        hidden = (np.abs(video.depth_m[0] - scene.true_depth()) > 0.02) & ~video.truth.masks[0]
        assert video.gripper_mask.sum() > 20
        assert (video.gripper_mask[hidden]).mean() > 0.95
        assert not scene.actor_mask().any()


def test_clips_are_a_function_of_their_seed_and_take_turns_with_the_tasks():
    config = FlowDemonstrationConfig(tasks=("place_red", "pour", "open_blue"), scene=SMALL)
    first = list(demonstrations(range(9), config))
    again = next(demonstrations([7], config))
    np.testing.assert_array_equal(first[7].flow, again.flow)
    np.testing.assert_array_equal(first[7].observation.rgb, again.observation.rgb)
    assert [clip.meta["task"] for clip in first] == ["place_red", "pour", "open_blue"] * 3
    assert {clip.meta["actor"] for clip in first} == set(TRAINING_ACTORS)
    shapes = {name for task in config.tasks for name in FLOW_TASKS[task].shape_names(held_out=False)}
    assert {clip.meta["shape"] for clip in first} <= shapes


def test_training_data_show_neither_the_arms_nor_the_shapes_that_are_held_out():
    config = FlowDemonstrationConfig()
    assert len(HELD_OUT_ARMS) == 2
    assert not set(HELD_OUT_ARMS) & set(config.actors)
    for name, task in FLOW_TASKS.items():
        assert not set(config.shapes_of(name)) & set(task.shape_names(held_out=True))
        assert task.shape_names(held_out=True)


def test_episodes_without_a_clip_are_reported():
    skipped = []
    far = FlowDemonstrationConfig(tasks=("place_red",), actors=("nobody",), scene=SceneConfig(width=16, height=16))
    found = list(demonstrations(range(6), far, on_skip=lambda seed, why: skipped.append((seed, why))))
    assert len(found) + len(skipped) == 6
    assert skipped
    assert all("hidden" in why for _, why in skipped)


def test_unknown_names_are_refused():
    with pytest.raises(UserError, match="unknown task 'juggle'"):
        next(demonstrations([0], FlowDemonstrationConfig(tasks=("juggle",))))
    with pytest.raises(UserError, match="actor is 'robby'"):
        next(demonstrations([0], FlowDemonstrationConfig(actors=("robby",))))
    with pytest.raises(UserError, match="unknown shapes ball"):
        next(demonstrations([0], FlowDemonstrationConfig(shapes=("ball",))))
    with FlowScene(SMALL, task="pour", actor="nobody") as scene:
        scene.give("place_red")
        assert scene.instruction == "place the mug on the red pad"
        with pytest.raises(UserError, match="needs other furniture; here there are place_red, place_green, pour"):
            scene.give("open_red")


def test_first_images_are_those_of_whole_demonstrations_with_the_same_flow():
    """Each image occurs once with every instruction, independently of the other images."""
    config = FlowDemonstrationConfig(actors=("hand",), shapes=("mug",), tasks=("place_red", "pour"), scene=SMALL)
    form = FlowEncoding(num_frames=4, grid=3)
    pairs = list(instructed_clips(range(2), config, form))
    assert [clip.meta["task"] for clip in pairs] == ["place_red", "pour"] * 2
    for number, clip in enumerate(pairs):
        np.testing.assert_array_equal(clip.observation.rgb, pairs[number // 2 * 2].observation.rgb)
        with FlowScene(SMALL, task=clip.meta["task"], actor="hand", shape="mug") as scene:
            scene.reset(number // 2)
            whole = Demonstrator(scene).clip(form)
        np.testing.assert_array_equal(clip.observation.rgb, whole.observation.rgb)
        np.testing.assert_array_equal(clip.points, whole.points)
        np.testing.assert_array_equal(clip.flow[..., :3], whole.flow[..., :3])
        assert clip.meta == whole.meta


def test_goals_are_where_each_instruction_takes_the_query_points():
    found = list(instructed_clips(range(3), FlowDemonstrationConfig(actors=("nobody",), scene=SMALL)))
    by_task = {clip.meta["task"]: clip for clip in found}
    assert set(by_task) == set(FLOW_TASKS)
    for clip in found:
        ends = {other.observation.instruction: other.flow_world_m[-1].mean(0) for other in found}
        for instruction, goal in clip.meta["goals_world_m"].items():
            np.testing.assert_allclose(goal, ends[instruction], atol=1e-6)
    assert len(by_task["pour"].meta["goals_world_m"]) == 3
    assert list(by_task["open_red"].meta["goals_world_m"]) == ["open the red drawer"]


def test_a_drawer_has_its_own_mask_in_the_image_that_both_share():
    config = FlowDemonstrationConfig(tasks=("open_red", "open_blue"), actors=("panda",), scene=SMALL)
    red, blue = instructed_clips(range(1), config)
    assert red.observation.rgb is blue.observation.rgb
    assert not (red.observation.mask & blue.observation.mask).any()


def test_built_clips_have_train_and_held_out_layouts_and_no_held_out_arm(tmp_path):
    options = {"scenes": 9, "held_out_scenes": 3, "image_size": 32, "num_frames": 3, "grid": 2}
    folder = build_clips(str(tmp_path / "clips"), **options)
    reader = FlowReader(folder)
    assert {clip.meta["layouts"] for clip in FlowReader(folder, split="held_out")} == {"held_out"}
    assert {clip.meta["layouts"] for clip in FlowReader(folder, split="train")} == {"train"}
    assert not {clip.meta["actor"] for clip in reader} & set(HELD_OUT_ARMS)
    with pytest.raises(UserError, match="already exists"):
        build_clips(str(tmp_path / "clips"), **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["clips"]
