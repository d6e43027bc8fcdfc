"""Films of episodes: what the camera sees, with the predicted flow as arrows over it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from robotics.flow3d.clip import U, V
from robotics.sim.rendering import FrameRenderer, RenderSettings, update_poses

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL import Image, ImageDraw

    from robotics.flow3d.plan_result import PlanResult
    from robotics.flow3d.scenes.tabletop import FlowTabletop

SIDE_PX = 384
FPS = 12
TICKS = 4
"""Of 20 ms of simulated time between two frames, which makes the film nearly as quick as the arm."""
STILL = 12
"""Frames that show the first picture, then the flow, and at last the end."""
FIRST, LAST = np.array([60, 110, 255]), np.array([255, 60, 30])
"""Colours of the beginning and the end of an arrow."""
HEAD_PX = 9.0
MOST_ARROWS = 16


class Film:
    """Records a run and writes it when the run is over; does nothing without a path."""

    def __init__(self, robot: FlowTabletop, path: Path | None) -> None:
        self._robot, self._path = robot, path
        self._frames: list[NDArray[np.uint8]] = []
        self._renderer: FrameRenderer | None = None
        self._ticks = 0
        self.result: PlanResult | None = None
        """Of the run; set before the end for the arrows and the last words."""
        self.success = False
        """Whether the scene says so; set before the end."""

    def __enter__(self) -> Self:
        if self._path is not None:
            settings = RenderSettings(SIDE_PX, SIDE_PX, camera="scene", multisampling=True)
            self._renderer = FrameRenderer(self._robot.model, settings)
            self._robot.on_frame = self._see
            self._take()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._renderer is None or self._path is None:
            return
        self._robot.on_frame = None
        self._renderer.close()
        if self.result is not None:
            self._write(self._path, self.result)

    def _see(self, robot: FlowTabletop) -> None:
        self._ticks += 1
        if self._ticks % TICKS == 0:
            self._take()

    def _take(self) -> None:
        assert self._renderer is not None
        update_poses(self._robot.model, self._robot.data)
        self._frames.append(self._renderer.rgb(self._robot.data).copy())

    def _write(self, path: Path, result: PlanResult) -> None:
        from mmrl.hub.video import write_mp4

        arrows = _overlay(result, self._robot.config.width)
        words = f"{self._robot.arm.name}: {result.instruction}"
        end = "done" if self.success else f"not done{f': {result.failure}' if result.failure else ''}"
        shown = [_frame(self._frames[0], None, words)] * STILL
        shown += [_frame(self._frames[0], arrows, words)] * STILL
        shown += [_frame(each, arrows, words) for each in self._frames[1:]]
        shown += [_frame(self._frames[-1], arrows, f"{words} ({end})")] * STILL
        write_mp4(path, np.stack(shown), FPS)


def draw_arrows(pen: ImageDraw.ImageDraw, points: NDArray[np.float64], flow: NDArray[np.float64], scale: float) -> None:
    """Draw the way of each point with a head at its end.

    Args:
        pen: of the picture.
        points: (N, N, 3) query points.
        flow: (T, N, N, 4) where they go.
        scale: pixels of the picture for one of the observation.
    """
    places = np.concatenate([points[None, ..., [U, V]], flow[..., [U, V]]])
    ways = places.reshape(len(places), -1, 2).swapaxes(0, 1) * scale
    for way in ways[:: max(1, len(ways) // MOST_ARROWS)]:
        for step in range(len(way) - 1):
            share = step / max(len(way) - 2, 1)
            colour = tuple(int(part) for part in (1 - share) * FIRST + share * LAST)
            pen.line([tuple(way[step]), tuple(way[step + 1])], fill=(*colour, 255), width=2)
        _head(pen, way)


def _head(pen: ImageDraw.ImageDraw, way: NDArray[np.float64]) -> None:
    end = way[-1]
    lengths = np.linalg.norm(end - way, axis=-1)
    before = np.flatnonzero(lengths > HEAD_PX / 2)
    if not len(before):
        return
    along = (end - way[before[-1]]) / lengths[before[-1]]
    across = np.array([-along[1], along[0]])
    corners = [end, end - HEAD_PX * along + HEAD_PX / 2.5 * across, end - HEAD_PX * along - HEAD_PX / 2.5 * across]
    pen.polygon([tuple(corner) for corner in corners], fill=(*LAST.tolist(), 255))


def _overlay(result: PlanResult, width_px: int) -> Image.Image | None:
    """Arrows of the first plan on a transparent picture."""
    from PIL import Image, ImageDraw

    if not result.rounds or not result.rounds[0].tries:
        return None
    first = result.rounds[0]
    flow = (first.chosen or first.tries[0]).flow
    if not len(flow):
        return None
    picture = Image.new("RGBA", (SIDE_PX, SIDE_PX))
    draw_arrows(ImageDraw.Draw(picture), first.points, flow, SIDE_PX / width_px)
    return picture


def _frame(rgb: NDArray[np.uint8], overlay: Image.Image | None, words: str) -> NDArray[np.uint8]:
    from PIL import Image, ImageDraw

    picture: Any = Image.fromarray(rgb).convert("RGBA")
    if overlay is not None:
        picture = Image.alpha_composite(picture, overlay)
    pen = ImageDraw.Draw(picture)
    pen.rectangle([0, SIDE_PX - 22, SIDE_PX, SIDE_PX], fill=(20, 20, 20, 255))
    pen.text((8, SIDE_PX - 18), words, fill=(255, 255, 255, 255), font_size=12)
    return np.asarray(picture.convert("RGB"))
