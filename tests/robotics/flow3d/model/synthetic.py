"""Clips of a block that moves, in an arc, to the pad that the instruction names; the camera looks straight down."""

import numpy as np

from robotics.flow3d.clip import FlowClip, Observation
from robotics.flow3d.geometry import intrinsics, lift
from robotics.flow3d.plan.result import Verdict

SIZE = (32, 32)
K = intrinsics(SIZE, fov_x_rad=1.0)
TABLE_M, LIFT_M = 1.0, 0.1
COLOURS = {"red": (220, 30, 30), "green": (30, 200, 30)}
T_WORLD_CAM = np.array([[1.0, 0, 0, 0.4], [0, -1, 0, 0], [0, 0, -1, 1.0], [0, 0, 0, 1]])


def make_clips(count: int = 8, frames: int = 4, side: int = 3, seed: int = 0, task: str = "move") -> list[FlowClip]:
    """Clips in alternating colours; `meta["goals_world_m"]` has the goal that each instruction names."""
    rng = np.random.default_rng(seed)
    return [_clip(rng, list(COLOURS)[number % 2], frames, side, task) for number in range(count)]


def _clip(rng: np.random.Generator, named: str, frames: int, side: int, task: str) -> FlowClip:
    places = {"red": rng.uniform([5, 4], [27, 9]), "green": rng.uniform([5, 23], [27, 28])}
    block = rng.uniform([8, 13], [24, 19])
    rgb = np.full((SIZE[1], SIZE[0], 3), 120, np.uint8)
    for colour, (u, v) in places.items():
        _square(rgb, u, v, 4, COLOURS[colour])
    mask = _square(rgb, *block, 3, (40, 60, 220))
    offsets = np.linspace(-2, 2, side)
    v, u = np.meshgrid(block[1] + offsets, block[0] + offsets, indexing="ij")
    points = np.stack([u, v, np.full_like(u, TABLE_M)], -1)
    share = np.arange(1, frames + 1)[:, None, None] / frames
    height = LIFT_M * np.sin(np.pi * share)
    way = places[named] - block
    flow = np.stack(
        [u + way[0] * share, v + way[1] * share, points[..., 2] - height, np.ones((frames, side, side))], -1
    )
    observation = Observation(
        rgb, np.full(SIZE[::-1], TABLE_M, np.float32), K, T_WORLD_CAM, f"Move the block to the {named} pad", mask
    )
    goals = {f"move the block to the {colour} pad": _world(place) for colour, place in places.items()}
    return FlowClip(observation, points, flow, source="synthetic", meta={"task": task, "goals_world_m": goals})


def _world(uv: np.ndarray) -> list[float]:
    point = lift(np.array([*uv, TABLE_M]), K)
    return (T_WORLD_CAM[:3, :3] @ point + T_WORLD_CAM[:3, 3]).tolist()


def _square(rgb: np.ndarray, u: float, v: float, half: int, colour: tuple[int, int, int]) -> np.ndarray:
    mask = np.zeros(rgb.shape[:2], bool)
    mask[max(int(v) - half, 0) : int(v) + half + 1, max(int(u) - half, 0) : int(u) + half + 1] = True
    rgb[mask] = colour
    return mask


class GoesRight:
    """A verifier that accepts flows that move the block along the world's x axis by 5 cm or more."""

    def verify(self, before, after, instruction, meta) -> Verdict:
        way_m = float(meta.motion.T_t_0_world[-1][:3, 3] @ [1.0, 0.0, 0.0])
        return Verdict(way_m > 0.05, 1 / (1 + float(np.exp(-20 * way_m))), f"{100 * way_m:.0f} cm")


class Broken:
    """A verifier whose server is down."""

    def verify(self, before, after, instruction, meta) -> Verdict:
        raise TimeoutError("no answer")


def goes_right() -> GoesRight:
    return GoesRight()


def broken() -> Broken:
    return Broken()
