"""Scenes of 3D flow: camera outputs and random draws of an episode."""

import numpy as np
import pytest

from mmrl.errors import UserError
from robotics.flow3d.geometry import apply_pose, inverse_pose, lift, project

mujoco = pytest.importorskip("mujoco", reason="needs pip install 'mmrl-suite[sim]'")

from robotics.flow3d.objects.scene import (  # noqa: E402
    FLOOR_RGB,
    OBJECT_RGB,
    FlowScene,
)


@pytest.fixture(scope="module")
def scene():
    with FlowScene(task="place_red", actor="panda", width=64, height=48) as made:
        yield made


def test_the_depth_in_the_mask_lies_on_the_object(scene):
    """Camera, depth and mask agree: pixels of the object, lifted to the world, lie within the mug and its handle."""
    for seed in range(3):
        scene.reset(seed)
        seen = scene.observe()
        rows, columns = np.nonzero(seen.mask)
        uvz = np.stack([columns + 0.5, rows + 0.5, seen.depth_m[rows, columns]], -1)
        world = apply_pose(seen.T_world_cam, lift(uvz, seen.K))
        own = apply_pose(inverse_pose(scene.object_pose()), world)
        assert len(own) > 20
        assert own[:, 2].min() > -0.003
        assert own[:, 2].max() < scene.shape.height_m + 0.003
        assert np.hypot(own[:, 0], own[:, 1]).max() < scene.shape.radius_m + 0.04


def test_a_replay_shows_the_object_there_and_changes_nothing(scene):
    scene.reset(1)
    before, start = scene.observe(), scene.object_pose()
    T = np.eye(4)
    T[:3, 3] = 0.0, 0.05, 0.03
    drawn = scene.replay(T)
    np.testing.assert_array_equal(scene.object_pose(), start)
    np.testing.assert_array_equal(scene.observe().rgb, before.rgb)
    scene.put_object(T @ start)
    np.testing.assert_array_equal(drawn, scene.observe().rgb)
    assert (drawn != before.rgb).any(-1).sum() > 20


def test_most_of_the_image_is_the_table_at_height_zero(scene):
    scene.reset(0)
    seen = scene.observe()
    v, u = np.mgrid[0:48, 0:64] + 0.5
    points = lift(np.stack([u, v, seen.depth_m], -1).reshape(-1, 3), seen.K)
    world = apply_pose(seen.T_world_cam, points)
    assert (np.abs(world[:, 2]) < 0.003).mean() > 0.6
    middle = apply_pose(inverse_pose(seen.T_world_cam), np.array([[0.5, 0.0, 0.0]]))
    u, v, _ = project(middle, seen.K)[0]
    assert u == pytest.approx(32)
    assert 20 < v < 28


def test_an_episode_is_a_function_of_its_seed(scene):
    scene.reset(5)
    first, pose = scene.observe(), scene.object_pose()
    scene.reset(6)
    other = scene.observe()
    assert (other.rgb != first.rgb).any()
    scene.reset(5)
    again = scene.observe()
    assert (again.rgb == first.rgb).all()
    assert (again.depth_m == first.depth_m).all()
    assert (scene.object_pose() == pose).all()


def test_held_out_layouts_colours_and_backgrounds_differ_from_those_of_training():
    scenes = {split: FlowScene(layouts=split, colours=split, background=split) for split in ("train", "held_out")}
    tops, fields = {}, {}
    for split, found in scenes.items():
        tops[split], fields[split] = set(), set()
        for seed in range(25):
            found.reset(seed)
            top = found.model.geom_matid[found.model.geom("table").id]
            tops[split].add(found.model.material(top).name)
            fields[split].add(int(np.floor(found.start[:2, 3] / 0.06).sum()) % 2)
    assert fields == {"train": {0}, "held_out": {1}}
    assert len(tops["train"]) > 2
    assert not tops["train"] & tops["held_out"]
    for palette in (OBJECT_RGB, FLOOR_RGB):
        gaps = [np.abs(np.subtract(a, b)).max() for a in palette["train"] for b in palette["held_out"]]
        assert min(gaps) > 0.1  # more than the jitter of 0.04 on both sides


def test_depth_can_be_missing_holed_and_noisy(scene):
    scene.reset(2)
    clean = scene.observe().depth_m
    with FlowScene(actor="panda", width=64, height=48, depth="missing") as blind:
        blind.reset(2)
        assert (blind.observe().depth_m == 0).all()
    with FlowScene(actor="panda", width=64, height=48, depth="holed", hole_share=0.2) as holed:
        holed.reset(2)
        found = holed.observe().depth_m
        assert 0.2 <= (found == 0).mean() < 0.25
        assert (found[found > 0] == clean[found > 0]).all()
    with FlowScene(actor="panda", width=64, height=48, depth_noise=0.01) as noisy:
        noisy.reset(2)
        error = noisy.observe().depth_m / clean - 1
        # The deviation of 3072 draws is known to 1 / sqrt(2 n), 1.3%; five times that is allowed.
        assert error.std() == pytest.approx(0.01, rel=0.065)
        assert (noisy.true_depth() == clean).all()


def test_things_are_put_where_they_are_wanted(scene):
    scene.reset(1)
    motion = scene.ideal_motion(4)
    for T in motion:
        scene.put_object(T)
        np.testing.assert_allclose(scene.object_pose(), T, atol=1e-9)
    with FlowScene(task="open_blue", actor="hand") as drawer:
        drawer.reset(1)
        end = drawer.ideal_motion(4)[-1]
        drawer.put_object(end)
        np.testing.assert_allclose(drawer.object_pose(), end, atol=1e-9)
        drawer.put_hand(end)
        np.testing.assert_allclose(drawer.body_pose("floating_hand"), end, atol=1e-9)
        with pytest.raises(UserError, match="available arms"):
            drawer.put_arm(np.zeros(7))
    with pytest.raises(UserError, match="needs actor='hand'"):
        scene.put_hand(end)


def test_fields_out_of_range_are_refused():
    with pytest.raises(UserError, match="actor is 'pandora'"):
        FlowScene(actor="pandora")
    with pytest.raises(UserError, match="depth"):
        FlowScene(depth="wet")
