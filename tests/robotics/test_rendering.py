import copy

import numpy as np
import pytest

from mmrl.errors import UserError
from robotics.sim import FrameRenderer, RenderSettings, fast_visuals, update_poses
from robotics.toy.arm_cubes import load_arm_cubes

mujoco = pytest.importorskip("mujoco", reason="needs pip install 'mmrl-suite[sim]'")
pytestmark = pytest.mark.usefixtures("backend")

ROOM = """
<mujoco>
  <visual><quality shadowsize="256"/></visual>
  <asset>
    <texture name="sky" type="skybox" builtin="gradient" rgb1="0.5 0.6 0.8" rgb2="0 0 0" width="32" height="192"/>
    <texture name="tiles" type="2d" builtin="checker" rgb1="0.8 0.8 0.8" rgb2="0.2 0.2 0.2" width="64" height="64"/>
    <material name="tiles" texture="tiles" texrepeat="4 4" reflectance="{reflectance}"/>
  </asset>
  <worldbody>
    <light name="lamp" pos="0.4 0.3 2" {lamp}/>
    <camera name="view" pos="0 -1.6 1" xyaxes="1 0 0 0 0.5 0.85"/>
    <geom type="plane" size="1 1 0.1" material="tiles"/>
    <geom type="box" size="0.1 0.1 0.3" pos="-0.3 0.1 0.3" rgba="0.2 0.6 0.9 {post_alpha}"/>
    <body name="stand" mocap="true" pos="0.5 0.3 0.1"><geom type="cylinder" size="0.1 0.1" rgba="0.8 0.7 0.2 1"/></body>
    <body name="ball" pos="0 0.3 0.3">
      <joint name="slide" type="slide" axis="1 0 0"/>
      <joint type="hinge" axis="1 0 0"/>
      <camera name="hand" pos="0 -0.7 0.5" xyaxes="1 0 0 0 0.6 0.8"/>
      <geom type="ellipsoid" size="0.12 0.08 0.15" rgba="0.9 0.2 0.2 {ball_alpha}"/>
    </body>
    <body pos="0.1 -0.2 0.1"><freejoint/><geom type="box" size="0.06 0.05 0.04" rgba="0.2 0.8 0.3 1"/></body>
  </worldbody>
</mujoco>
"""
PLAIN = {"reflectance": 0, "post_alpha": 1, "ball_alpha": 1, "lamp": ""}


def poses(model, count: int, seed: int = 0) -> list[mujoco.MjData]:
    """States in which everything that can move has moved."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        data = mujoco.MjData(model)
        if model.nkey:
            mujoco.mj_resetDataKeyframe(model, data, 0)
        data.qvel[:] = rng.normal(0.0, 1.5, model.nv)
        mujoco.mj_step(model, data, 60)
        mujoco.mj_forward(model, data)
        found.append(data)
    return found


def theirs(model, settings: RenderSettings, scenes, mode: str = "rgb") -> list[np.ndarray]:
    """The same images from MuJoCo's own renderer."""
    with mujoco.Renderer(model, settings.height, settings.width) as renderer:
        if mode != "rgb":
            getattr(renderer, f"enable_{mode}_rendering")()
        pictures = []
        for data in scenes:
            renderer.update_scene(data, settings.camera)
            pictures.append(renderer.render())
        return pictures


def ours(model, settings: RenderSettings, scenes) -> list[np.ndarray]:
    with FrameRenderer(model, settings) as renderer:
        return [renderer.rgb(data).copy() for data in scenes]


def without(model, settings: RenderSettings):
    """A copy of the model for MuJoCo's own renderer, without the parts that the settings leave out."""
    return fast_visuals(copy.copy(model), settings)


def wrong_pixels(model, settings: RenderSettings, scenes) -> int:
    """Pixels that differ from those of MuJoCo's own renderer, which renders every part in every image."""
    pairs = zip(ours(model, settings, scenes), theirs(without(model, settings), settings, scenes), strict=True)
    return sum(int((mine != reference).any(axis=-1).sum()) for mine, reference in pairs)


@pytest.mark.parametrize(("size", "camera"), [((48, 40), "front"), ((101, 67), -1)])
def test_with_everything_switched_on_it_is_the_default_image(size, camera):
    settings = RenderSettings(*size, camera, shadows=True, multisampling=True)
    model = load_arm_cubes()
    scenes = poses(model, 1)
    assert np.array_equal(ours(model, settings, scenes), theirs(model, settings, scenes))


@pytest.mark.parametrize("shadows", [False, True])
@pytest.mark.parametrize("multisampling", [False, True])
def test_each_saving_is_a_switch(model, shadows, multisampling):
    settings = RenderSettings(48, 40, "front", shadows=shadows, multisampling=multisampling)
    assert wrong_pixels(model, settings, poses(model, 2)) == 0


def test_drawing_fixed_parts_once_changes_no_pixel(model):
    settings = RenderSettings(96, 80, "front")
    scenes = poses(model, 8)
    assert wrong_pixels(model, settings, scenes) == 0
    # The reference renders its own images, and the fixed parts really are kept.
    assert len({picture.tobytes() for picture in ours(model, settings, scenes)}) == 8
    with FrameRenderer(model, settings) as renderer:
        categories = []
        draw = renderer._draw
        renderer._draw = lambda data, sight, kinds, sky: (categories.append(kinds), draw(data, sight, kinds, sky))
        for data in scenes[:5]:
            renderer.rgb(data)
    everything, static = int(mujoco.mjtCatBit.mjCAT_ALL), int(mujoco.mjtCatBit.mjCAT_STATIC)
    assert categories == [everything, everything, static, *[everything & ~static] * 4]


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"post_alpha": 0.4},
        {"ball_alpha": 0.4},
        {"reflectance": 0.5},
        {"lamp": 'mode="targetbody" target="ball" cutoff="20"'},
        {"camera": "hand"},
    ],
    ids=["plain", "fixed glass", "moving glass", "mirror", "following light", "moving camera"],
)
def test_images_stay_right_where_fixed_parts_do_not_look_the_same(change):
    camera = change.get("camera", "view")
    model = mujoco.MjModel.from_xml_string(ROOM.format(**PLAIN | change))
    assert wrong_pixels(model, RenderSettings(64, 64, camera), poses(model, 6)) == 0


def test_a_mocap_body_may_move_between_images():
    model = mujoco.MjModel.from_xml_string(ROOM.format(**PLAIN))
    scenes = poses(model, 6)
    for number, data in enumerate(scenes[3:]):
        data.mocap_pos[0, 0] -= 0.2 * number
        update_poses(model, data)
    assert wrong_pixels(model, RenderSettings(64, 64, "view"), scenes) == 0


@pytest.mark.parametrize(("field", "part"), [("body_pos", "table"), ("cam_pos", "front"), ("light_pos", "lamp")])
def test_bodies_moved_later_are_rendered_again(model, small, field, part):
    (data,) = poses(model, 1)
    with FrameRenderer(model, small) as renderer:
        before = [renderer.rgb(data).copy() for _ in range(3)][-1]
        kind = {"body_pos": model.body, "cam_pos": model.camera, "light_pos": model.light}[field]
        getattr(model, field)[kind(part).id] += 0.1
        update_poses(model, data)
        after = [renderer.rgb(data).copy() for _ in range(3)]
    (expected,) = theirs(without(model, small), small, [data])
    assert all(np.array_equal(picture, expected) for picture in after)
    assert not np.array_equal(before, expected)


def test_colours_that_change_need_a_refresh(model):
    settings = RenderSettings(48, 40, "front")
    (data,) = poses(model, 1)
    with FrameRenderer(model, settings) as renderer:
        before = [renderer.rgb(data).copy() for _ in range(3)][-1]
        model.mat("table").rgba[:] = 0.1, 0.9, 0.1, 1.0
        renderer.refresh()
        after = renderer.rgb(data).copy()
        (expected,) = theirs(without(model, settings), settings, [data])
    assert np.array_equal(after, expected)
    assert not np.array_equal(before, after)


def test_only_shading_changes(model):
    """By default the objects cover the same pixels, and surfaces in shadow are lit."""
    size, scenes = (96, 80), poses(model, 2)
    settings = RenderSettings(*size, "front")
    with FrameRenderer(model, settings) as renderer:
        objects = [renderer.segmentation(data) for data in scenes]
    expected = np.array(theirs(model, settings, scenes, "segmentation"))
    assert (np.array(objects) != expected).mean() < 2e-3  # a GPU may decide otherwise about a pixel on an edge
    lit = np.array(ours(model, settings, scenes), int)
    shaded = np.array(ours(model, RenderSettings(*size, "front", shadows=True), scenes), int)
    # Light that is added in a second pass is rounded once more.
    assert (lit >= shaded - 8).all()
    assert (lit >= shaded - 1).mean() > 0.995
    assert 0.01 < (lit > shaded + 8).any(axis=-1).mean() < 0.5


def test_depth_is_the_distance_in_metres_along_the_view():
    scene = """<mujoco><statistic extent="1"/><worldbody>
      <camera name="down" pos="0.1 0 1.7" fovy="50"/><geom type="plane" size="3 3 0.1"/>
      <geom type="box" size="0.2 0.2 0.15" pos="0.1 0 0.15"/></worldbody></mujoco>"""
    model = mujoco.MjModel.from_xml_string(scene)
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    with FrameRenderer(model, RenderSettings(60, 50, "down")) as renderer:
        depth = renderer.depth(data)
    assert depth.dtype == np.float32
    assert depth[25, 30] == pytest.approx(1.4, rel=1e-5)
    assert depth[2, 2] == pytest.approx(1.7, rel=1e-5)
    assert np.isin(depth.round(4), np.float32([1.4, 1.7])).all()


@pytest.mark.parametrize("orthographic", [False, True])
def test_depth_is_that_of_mujoco(orthographic):
    model = mujoco.MjModel.from_xml_string(ROOM.format(**PLAIN))
    field = "cam_projection" if hasattr(model, "cam_projection") else "cam_orthographic"  # its older name
    getattr(model, field)[model.camera("view").id] = orthographic
    settings, scenes = RenderSettings(48, 40, "view"), poses(model, 2)
    with FrameRenderer(model, settings) as renderer:
        depth = [renderer.depth(data) for data in scenes]
    reference = theirs(without(model, settings), settings, scenes, "depth")
    np.testing.assert_allclose(depth, reference, rtol=1e-3)


def test_depth_and_colours_do_not_disturb_each_other(model, small):
    first, second = poses(model, 2)
    with FrameRenderer(model, small) as renderer:
        alone = [renderer.rgb(data).copy() for data in (first, second, first)]
        mixed = []
        for data in (first, second, first):
            renderer.depth(data)
            renderer.segmentation(data)
            mixed.append(renderer.rgb(data).copy())
    assert np.array_equal(alone, mixed)


def test_images_are_written_into_the_callers_buffer(model, small):
    (data,) = poses(model, 1)
    with FrameRenderer(model, small) as renderer:
        room = np.zeros((3, 40, 48, 3), np.uint8)
        assert renderer.rgb(data, room[1]) is not None
        assert room[1].any()
        assert not room[[0, 2]].any()
        assert renderer.rgb(data) is renderer.rgb(data)
        assert np.array_equal(renderer.rgb(data), room[1])


def test_the_model_of_the_caller_is_left_alone(model, small):
    before = model.vis.quality.offsamples, model.light_castshadow.copy(), model.vis.global_.offwidth
    FrameRenderer(model, small).close()
    assert before[0] == model.vis.quality.offsamples > 0
    assert before[1].all()
    assert model.light_castshadow.all()
    assert before[2] == model.vis.global_.offwidth


@pytest.mark.parametrize("shadows", [False, True])
@pytest.mark.parametrize("multisampling", [False, True])
def test_fast_visuals_of_a_specification_and_of_a_model_agree(shadows, multisampling):
    text = ROOM.format(**PLAIN)
    settings = RenderSettings(800, 600, shadows=shadows, multisampling=multisampling)
    compiled = fast_visuals(mujoco.MjSpec.from_string(text), settings).compile()
    for model in (compiled, fast_visuals(mujoco.MjModel.from_xml_string(text), settings)):
        assert bool(model.light_castshadow.any()) is shadows
        assert bool(model.vis.quality.offsamples) is multisampling
        assert (model.vis.global_.offwidth, model.vis.global_.offheight) == (800, 600)


def test_mistakes_are_named(model, small):
    with pytest.raises(UserError, match="no camera 'side'; it has: front"):
        FrameRenderer(model, RenderSettings(camera="side"))
    with pytest.raises(UserError, match="no camera 1"):
        FrameRenderer(model, RenderSettings(camera=1))
    with pytest.raises(UserError, match=r"image\.width is 0"):
        FrameRenderer(model, RenderSettings(width=0))
    renderer = FrameRenderer(model, small)
    renderer.close()
    renderer.close()
    with pytest.raises(RuntimeError, match="closed"):
        renderer.rgb(mujoco.MjData(model))
