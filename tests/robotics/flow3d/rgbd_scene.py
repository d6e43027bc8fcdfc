"""RGB-D videos of a hand that carries a mug or a box over a table, with the simulator's truth."""

import mujoco
import numpy as np
from scipy.spatial.transform import Rotation, Slerp

from robotics.flow3d.geometry import intrinsics, inverse_pose, make_pose
from robotics.flow3d.video import RgbdVideo, VideoTruth
from robotics.sim import FrameRenderer, RenderSettings

APPROACH, MOTION = 10, 31
FOV_Y_RAD = 0.62
TILT = np.diag([1.0, -1.0, -1.0])
"""MuJoCo's camera looks along -z with y up; OpenCV's along z with y down."""


def scene_xml(thing):
    return f"""<mujoco>
  <visual><quality offsamples="0"/><map znear="0.05" zfar="6"/></visual>
  <asset>
    <texture name="wood" type="2d" builtin="checker" rgb1=".75 .6 .45" rgb2=".62 .5 .36" width="64" height="64"/>
    <material name="wood" texture="wood" texrepeat="9 9"/>
  </asset>
  <worldbody>
    <light pos="0.4 -0.4 2" dir="-0.2 0.2 -1" diffuse=".8 .8 .8"/>
    <light pos="-1 1 2" dir="0.5 -0.5 -1" diffuse=".3 .3 .3"/>
    <geom type="box" size="0.8 0.8 0.02" pos="0 0 -0.02" material="wood"/>
    <geom type="box" size="0.02 0.8 0.6" pos="-0.7 0 0.3" rgba=".5 .55 .6 1"/>
    <geom type="cylinder" size="0.05 0.003" pos="0.1 -0.22 0.003" rgba=".8 .1 .1 1"/>
    <geom type="cylinder" size="0.05 0.003" pos="0.05 0.24 0.003" rgba=".1 .6 .2 1"/>
    <camera name="eye" pos="0.95 0.1 0.72" fovy="{np.degrees(FOV_Y_RAD)}" xyaxes="-0.1045 0.9945 0 -0.57 -0.06 0.82"/>
    <body name="thing"><freejoint/>{mug() if thing == "mug" else box()}</body>
    <body name="hand" mocap="true">
      <geom type="box" size="0.03 0.055 0.015" pos="0 0 0.12" rgba=".35 .35 .4 1"/>
      <geom type="cylinder" size="0.02 0.1" pos="0 0 0.23" rgba=".35 .35 .4 1"/>
      <geom type="box" size="0.012 0.006 0.045" pos="0 0.05 0.065" rgba=".2 .2 .25 1"/>
      <geom type="box" size="0.012 0.006 0.045" pos="0 -0.05 0.065" rgba=".2 .2 .25 1"/>
    </body>
  </worldbody>
</mujoco>"""


def mug(radius=0.038, sides=14):
    """An open cylinder of boxes with a handle and two coloured stripes; its origin is in the middle of the bottom."""
    half = radius * np.tan(np.pi / sides)
    lines = [f'<geom type="cylinder" size="{radius} 0.004" pos="0 0 0.004" rgba=".85 .85 .9 1"/>']
    for number in range(sides):
        angle = 2 * np.pi * number / sides
        x, y = radius * np.cos(angle), radius * np.sin(angle)
        rgba = {3: ".2 .3 .8 1", 8: ".8 .5 .1 1"}.get(number, ".85 .85 .9 1")
        place = f'pos="{x:.5f} {y:.5f} 0.045" euler="0 0 {np.degrees(angle):.3f}"'
        lines.append(f'<geom type="box" size="0.003 {half:.5f} 0.045" {place} rgba="{rgba}"/>')
    handle = [
        ("0.052 0 0.065", "0.014 0.005 0.005"),
        ("0.052 0 0.03", "0.014 0.005 0.005"),
        ("0.068 0 0.0475", "0.005 0.005 0.0225"),
    ]
    lines += [f'<geom type="box" pos="{pos}" size="{size}" rgba=".8 .2 .2 1"/>' for pos, size in handle]
    return "".join(lines)


def box():
    """A box with a lid of another colour and a label."""
    return (
        '<geom type="box" size="0.03 0.04 0.04" pos="0 0 0.04" rgba=".2 .4 .7 1"/>'
        '<geom type="box" size="0.0305 0.0405 0.008" pos="0 0 0.07" rgba=".9 .8 .2 1"/>'
        '<geom type="box" size="0.001 0.015 0.012" pos="0.03 0.005 0.035" rgba=".9 .9 .9 1"/>'
    )


def object_poses(task, seed):
    """(41, 4, 4) poses of the object in the world: it waits, is lifted, carried, and put down or tilted."""
    rng = np.random.default_rng(seed)
    start = np.array([rng.uniform(0.0, 0.2), rng.uniform(-0.08, 0.08), 0.0])
    goal = np.array([0.1, -0.22, 0.006]) if rng.random() < 0.5 else np.array([0.05, 0.24, 0.006])
    yaw = rng.uniform(-0.9, 0.9)
    if task == "pour":
        goal[2], tilt = 0.15, rng.choice([-1.2, 1.2])
        turns = Rotation.from_euler("xyz", [[0, 0, yaw], [0, 0, yaw], [0, 0, yaw], [tilt, 0, yaw]])
    else:
        turn = rng.uniform(-0.6, 0.6)
        turns = Rotation.from_rotvec([[0, 0, yaw], [0, 0, yaw], [0, 0, yaw + turn], [0, 0, yaw + turn]])
    keys = np.array([0.0, 0.3, 0.75, 1.0])
    high = np.array([0, 0, 0.14])
    places = np.stack([start, start + high, goal * [1, 1, 0] + high + [0, 0, 0.02], goal])
    share = np.concatenate([np.zeros(APPROACH), np.linspace(0, 1, MOTION)])
    ease = np.array([np.interp(share, keys, places[:, axis]) for axis in range(3)]).T
    return make_pose(Slerp(keys, turns)(share).as_matrix(), ease)


def rgbd_video(task="place", thing="mug", seed=0, size=128, noise=0.0):
    """Render a video.

    Args:
        task: place or pour.
        thing: mug or box.
        seed: of the motion and of the noise.
        size: pixels a side.
        noise: standard deviation of depth as a share of it.
    """
    model = mujoco.MjModel.from_xml_string(scene_xml(thing))
    data = mujoco.MjData(model)
    poses = object_poses(task, seed)
    rgb, depth, masks, hand = [], [], [], None
    with FrameRenderer(model, RenderSettings(size, size, "eye")) as renderer:
        for frame, pose in enumerate(poses):
            set_pose(model, data, pose, lift_m=0.4 * max(0, APPROACH - 1 - frame) / APPROACH)
            rgb.append(renderer.rgb(data).copy())
            depth.append(renderer.depth(data))
            shown = renderer.segmentation(data)
            owner = np.where(shown[..., 1] == mujoco.mjtObj.mjOBJ_GEOM, model.geom_bodyid[shown[..., 0]], -1)
            masks.append(owner == model.body("thing").id)
            hand = owner == model.body("hand").id if hand is None else hand
        T_world_cam = make_pose(data.cam_xmat[0].reshape(3, 3) @ TILT, data.cam_xpos[0].copy())
    images = np.stack(depth)
    if noise:
        images = images * (1 + noise * np.random.default_rng(seed).normal(size=images.shape))
    T_cam = inverse_pose(T_world_cam)
    return RgbdVideo(
        rgb=np.stack(rgb),
        depth_m=images.astype(np.float32),
        K=intrinsics((size, size), fov_y_rad=FOV_Y_RAD),
        T_world_cam=T_world_cam,
        instruction=f"{task} the {thing}",
        source="scene",
        gripper_mask=hand,
        truth=VideoTruth(np.stack(masks), T_cam @ poses @ inverse_pose(poses[0]) @ T_world_cam, depth[0]),
        meta={"task": task, "thing": thing, "seed": seed},
    )


def set_pose(model, data, pose, lift_m):
    """Put the object at a pose and the hand above it."""
    data.qpos[:3] = pose[:3, 3]
    mujoco.mju_mat2Quat(data.qpos[3:7], pose[:3, :3].ravel())
    data.mocap_quat[0] = data.qpos[3:7]
    data.mocap_pos[0] = pose[:3, 3] + [lift_m, 0.5 * lift_m, lift_m]
    mujoco.mj_forward(model, data)
