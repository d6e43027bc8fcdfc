"""Clips of random numbers, for tests of files."""

import numpy as np

from robotics.flow3d.clip import FlowClip, Observation
from robotics.flow3d.geometry import intrinsics, make_pose


def a_clip(seed=0, *, source="hand", task="place", frames=3, grid=2, size=(12, 10), depth_m=(0.5, 1.2), mask=True):
    rng = np.random.default_rng(seed)
    width, height = size
    depth = rng.uniform(*depth_m, (height, width)).astype(np.float32)
    object_mask = rng.random((height, width)) > 0.5
    depth[0, 0], depth[0, 1], depth[0, 2] = 0.0, np.nan, np.inf
    observation = Observation(
        rgb=rng.integers(0, 256, (height, width, 3), dtype=np.uint8),
        depth_m=depth,
        K=intrinsics(size, fov_y_rad=0.9),
        T_world_cam=make_pose(np.eye(3), rng.normal(size=3)),
        instruction=f"do {seed}",
        mask=object_mask if mask else None,
    )
    low, high = [0, 0, depth_m[0], 0], [width, height, depth_m[1], 1]
    flow = rng.uniform(low, high, (frames, grid, grid, 4))
    points = rng.uniform(low[:3], high[:3], (grid, grid, 3))
    return FlowClip(observation, points, flow, source, {"depth_holes": seed / 100}, {"task": task, "seed": seed})
