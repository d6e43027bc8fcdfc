"""Grasp proposals: around an object's center, on opposing surfaces, or at its parts.

The frame of a grip has z along the fingers, towards the object, and y along the closing direction.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from robotics.flow3d.clouds import farthest_points
from robotics.flow3d.geometry import FloatArray, make_pose

FINGER_M = 0.025
"""Reach of the fingertips below the top of an object."""
FLOOR_M = 0.015
"""Minimum height of a grip above the lowest point of the object."""
SLAB_M = 0.012
"""Half the width of a finger."""
PLAY_M = 0.004
"""Clearance of each finger."""
PART_M = 0.03
"""Points within this distance belong to a part of an object."""
GAP_M = 0.015
"""Gap between surfaces that fits a finger."""


@dataclass(frozen=True)
class ObjectSurface:
    """The visible surface of an object."""

    points_m: FloatArray
    """(n, 3) in the world frame, z up."""
    normals: FloatArray
    """(n, 3) outward unit vectors."""


@dataclass(frozen=True)
class Grasp:
    """A pose at which a gripper can close on an object."""

    T_world_grip: FloatArray
    """(4, 4)."""
    score: float
    """Quality, 0 to 1."""
    width_m: float
    """Distance between the fingers at contact."""
    source: str
    """The proposer."""

    @property
    def turned(self) -> Grasp:
        """The same grasp with the fingers swapped, which an arm may reach more easily."""
        # half a turn about z: both fingers swap, the approach stays
        turn = make_pose(np.diag([-1.0, -1.0, 1.0]), np.zeros(3))
        return replace(self, T_world_grip=self.T_world_grip @ turn)


GraspProposer: TypeAlias = Callable[[ObjectSurface, float], list[Grasp]]
"""(surface, largest opening in metres) -> grasps."""


def primitive_grasps(
    surface: ObjectSurface,
    max_opening_m: float,
    *,
    yaws: int = 4,
    sides: int = 10,
    elevations_rad: tuple[float, ...] = (0.0, math.pi / 4),
) -> list[Grasp]:
    """Grasps from above and from the side around the center of an object; these need no accurate surface."""
    low, high = surface.points_m.min(0), surface.points_m.max(0)
    middle = (low + high) / 2
    # the fingertips reach below the top, but on a flat object not into the support
    top = np.array([*middle[:2], max(high[2] - FINGER_M, low[2] + FLOOR_M)])
    side = np.array([*middle[:2], max(middle[2], low[2] + FLOOR_M)])
    poses = [_grip_pose(top, np.array([0.0, 0, -1]), math.pi * number / yaws) for number in range(yaws)]
    for elevation in elevations_rad:
        for number in range(sides):
            azimuth = 2 * math.pi * number / sides
            flat = -math.cos(elevation) * np.array([math.cos(azimuth), math.sin(azimuth)])
            poses.append(_grip_pose(side, np.array([*flat, -math.sin(elevation)]), math.pi / 2))
    fitted = (_fitted(surface, pose, max_opening_m) for pose in poses)
    return [grasp for grasp in fitted if grasp is not None]


def antipodal_grasps(
    surface: ObjectSurface,
    max_opening_m: float,
    *,
    friction: float = 0.5,
    approaches: int = 8,
    pairs: int = 8,
    samples: int = 300,
    unseen_side: bool = True,
    seed: int = 0,
) -> list[Grasp]:
    """Grasps on two points with opposing normals within the friction cones.

    Source: Nguyen, Constructing force-closure grasps, 1988, for two fingers with friction.
    """
    # the camera sees one side only, and opposing points need both
    whole = with_unseen_side(surface) if unseen_side else surface
    rng = np.random.default_rng(seed)
    # the number of pairs grows with the square of the points
    chosen = rng.permutation(len(whole.points_m))[:samples]
    points, normals = whole.points_m[chosen], whole.normals[chosen]
    first, second = np.triu_indices(len(points), 1)
    between = points[second] - points[first]
    width = np.linalg.norm(between, axis=-1)
    # wide enough not to be one point, and with play on both sides of the open fingers
    near = (width > 1e-3) & (width <= max_opening_m - 2 * PLAY_M)
    first = first[near]
    second = second[near]
    between = between[near]
    width = width[near]
    line = between / width[:, None]
    # cosine of the larger of the two angles: both contacts must be within the friction cone
    opposed = np.minimum(-(normals[first] * line).sum(-1), (normals[second] * line).sum(-1))
    good = np.flatnonzero(opposed >= math.cos(math.atan(friction)))
    # best first, because `_spread` keeps the first of several close pairs
    order = good[np.argsort(-opposed[good], kind="stable")]
    middles = points[first] + between / 2
    grasps = []
    for pair in order[_spread(middles[order], pairs)]:
        for approach in _approach_directions(line[pair], approaches):
            # columns x, y, z: y along the closing direction, z along the approach, x to complete a right-handed frame
            pose = make_pose(np.stack([np.cross(line[pair], approach), line[pair], approach], -1), middles[pair])
            grasps.append(Grasp(pose, float(opposed[pair]), float(width[pair]), "antipodal"))
    return grasps


def part_grasps(
    surface: ObjectSurface, max_opening_m: float, *, places: int = 16, directions: int = 6, closing: int = 2
) -> list[Grasp]:
    """Grasps on parts of an object that is too large as a whole: handles, knobs, rims.

    At points spread over the object, the fingers approach from above, at a slant and along the normal, and close where
    the part is thinnest. A gap as wide as a finger ends a part.
    """
    down, slope = np.array([0.0, 0.0, -1.0]), math.pi / 4
    turns = 2 * math.pi * np.arange(directions) / max(directions, 1)
    slanting = [math.sin(slope) * np.array([math.cos(a), math.sin(a), 0.0]) + math.cos(slope) * down for a in turns]
    found: list[Grasp] = []
    for place in farthest_points(surface.points_m, places):
        middle = surface.points_m[place]
        near = surface.points_m[np.linalg.norm(surface.points_m - middle, axis=-1) < PART_M]
        inward = -surface.normals[place]
        # an approach from below would come through the support
        for approach in [down, *slanting, *([inward] if inward[2] < 0.1 else [])]:
            for line in _closing_lines(near, approach, closing):
                # halfway into the part, but no deeper than the fingers reach
                depth = float(np.mean([(near @ approach).min(), (near @ approach).max()]))
                depth = min(depth, float((near @ approach).min()) + FINGER_M)
                tip = middle + (depth - middle @ approach) * approach
                pose = make_pose(np.stack([np.cross(line, approach), line, approach], -1), tip)
                grasp = _fitted(surface, pose, max_opening_m, gap_m=GAP_M)
                if grasp is not None:
                    found.append(replace(grasp, score=1 - grasp.width_m / max_opening_m, source="part"))
    return sorted(found, key=lambda grasp: -grasp.score)


def with_unseen_side(surface: ObjectSurface) -> ObjectSurface:
    """Add the surface rotated by half a turn about the vertical through the center of its box."""
    points, normals = surface.points_m, surface.normals
    middle = (points.min(0) + points.max(0)) / 2
    # half a turn about the vertical keeps heights, so the support stays below
    flip = np.array([-1.0, -1.0, 1.0])
    turned = (points - middle) * flip + middle
    return ObjectSurface(np.concatenate([points, turned]), np.concatenate([normals, normals * flip]))


def _grip_pose(place_m: FloatArray, approach: FloatArray, yaw_rad: float) -> FloatArray:
    """Pose with z along the approach and y at the yaw from above, horizontal from the side."""
    if abs(approach[2]) > 0.99:
        y = np.array([math.cos(yaw_rad), math.sin(yaw_rad), 0.0])
    else:
        # horizontal fingers: a tilted pair would touch the support first
        y = np.cross([0.0, 0.0, 1.0], approach)
        y = y / np.linalg.norm(y)
    return make_pose(np.stack([np.cross(y, approach), y, approach], -1), place_m)


def _closing_lines(near_m: FloatArray, approach: FloatArray, count: int) -> list[FloatArray]:
    """Unit vectors across an approach, starting with the direction of least spread, at equal angles."""
    # spread across the approach only
    flat = (near_m - near_m.mean(0)) @ (np.eye(3) - np.outer(approach, approach))
    # the projection leaves no spread along the approach; a large eigenvalue keeps it from being the thinnest
    _, axes = np.linalg.eigh(flat.T @ flat + np.outer(approach, approach) * 1e3)
    thin = axes[:, 0]
    other = np.cross(approach, thin)
    return [math.cos(a) * thin + math.sin(a) * other for a in math.pi * np.arange(count) / count]


def _fitted(surface: ObjectSurface, pose: FloatArray, max_opening_m: float, gap_m: float = math.inf) -> Grasp | None:
    """The grasp centred on the points between the fingers, up to a gap; None if the fingers do not open wide enough."""
    # into the frame of the grip: x across, y along the closing direction, z along the fingers
    local = (surface.points_m - pose[:3, 3]) @ pose[:3, :3]
    # only what the fingers sweep over
    between = np.sort(local[(np.abs(local[:, 0]) < SLAB_M) & (np.abs(local[:, 2]) < FINGER_M), 1])
    if len(between) == 0:
        return None
    runs = np.split(between, np.flatnonzero(np.diff(between) > gap_m) + 1)
    # the run closest to the grip: points beyond a gap are another part
    run = min(runs, key=lambda values: float(np.abs(values).min()))
    low, high = run[0], run[-1]
    width = float(high - low)
    if width > max_opening_m - 2 * PLAY_M:
        return None
    centred = pose.copy()
    centred[:3, 3] += pose[:3, 1] * (low + high) / 2
    # best if the object fills half of the opening
    return Grasp(centred, 1.0 - abs(2 * width / max_opening_m - 1) / 2, width, "primitive")


def _approach_directions(line: FloatArray, count: int) -> list[FloatArray]:
    """Unit vectors across a line that do not point up, the steepest first."""
    down = np.array([0.0, 0.0, -1.0])
    start = down - (down @ line) * line
    if np.linalg.norm(start) < 1e-6:
        # across a vertical line all directions are equally steep
        start = np.array([1.0, 0.0, 0.0])
    start = start / np.linalg.norm(start)
    other = np.cross(line, start)
    angles = 2 * math.pi * np.arange(count) / count
    around = [math.cos(angle) * start + math.sin(angle) * other for angle in angles]
    return sorted((each for each in around if each[2] < 0.1), key=lambda each: float(each[2]))


def _spread(points_m: FloatArray, count: int, apart_m: float = 0.01) -> list[int]:
    """Indices of the first points that keep a distance from those before them."""
    picked: list[int] = []
    for index, point in enumerate(points_m):
        if all(np.linalg.norm(point - points_m[other]) >= apart_m for other in picked):
            picked.append(index)
        if len(picked) == count:
            break
    return picked


PROPOSERS: dict[str, GraspProposer] = {
    "primitive": primitive_grasps,
    "antipodal": antipodal_grasps,
    "part": part_grasps,
}
