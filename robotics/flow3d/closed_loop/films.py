"""Runs episodes in physics: one scene for each kind of episode, a planner in it, a video and the result of each run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from robotics.flow3d.geometry import ImageArray
from robotics.flow3d.model.pictures import draw_paths
from robotics.sim.rendering import FrameRenderer, RenderSettings, update_poses

if TYPE_CHECKING:
    from PIL import Image

    from robotics.flow3d.plan_result import PlanResult
    from robotics.flow3d.scenes.tabletop import FlowTabletop

SIDE_PX = 384
FPS = 12
TICKS = 4
"""Ticks of 20 ms simulated time between two frames, which plays nearly in real time."""
STILL = 12
"""Frames for which the first image, the flow and the end are each shown."""


class EpisodeVideo:
    """Records a run and writes it at the end; does nothing without a path."""

    def __init__(self, robot: FlowTabletop, path: Path | None) -> None:
        self._robot, self._path = robot, path
        self._frames: list[ImageArray] = []
        self._renderer: FrameRenderer | None = None
        self._ticks = 0
        self.result: PlanResult | None = None
        """Result of the run; set before the end."""
        self.success = False
        """Whether the task is done; set before the end."""

    def __enter__(self) -> Self:
        if self._path is not None:
            settings = RenderSettings(SIDE_PX, SIDE_PX, camera="scene", multisampling=True)
            self._renderer = FrameRenderer(self._robot.model, settings)
            self._robot.on_frame = self._on_tick
            self._record()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._renderer is None or self._path is None:
            return
        self._robot.on_frame = None
        self._renderer.close()
        if self.result is not None:
            self._write(self._path, self.result)

    def _on_tick(self, robot: FlowTabletop) -> None:
        self._ticks += 1
        if self._ticks % TICKS == 0:
            self._record()

    def _record(self) -> None:
        assert self._renderer is not None
        update_poses(self._robot.model, self._robot.data)
        self._frames.append(self._renderer.rgb(self._robot.data).copy())

    def _write(self, path: Path, result: PlanResult) -> None:
        from mmrl.hub.video import write_mp4

        overlay = _overlay(result, self._robot.config.width)
        text = f"{self._robot.arm.name}: {result.instruction}"
        end = "done" if self.success else f"not done{f': {result.failure}' if result.failure else ''}"
        shown = [_frame(self._frames[0], None, text)] * STILL
        shown += [_frame(self._frames[0], overlay, text)] * STILL
        shown += [_frame(each, overlay, text) for each in self._frames[1:]]
        shown += [_frame(self._frames[-1], overlay, f"{text} ({end})")] * STILL
        write_mp4(path, np.stack(shown), FPS)


def _overlay(result: PlanResult, width_px: int) -> Image.Image | None:
    """About 4 x 4 paths of the first plan's flow on a transparent image."""
    from PIL import Image, ImageDraw

    if not result.rounds or not result.rounds[0].tries:
        return None
    first = result.rounds[0]
    flow = (first.chosen or first.tries[0]).flow
    if not len(flow):
        return None
    image, every = Image.new("RGBA", (SIDE_PX, SIDE_PX)), max(1, len(first.points) // 4)
    pen = ImageDraw.Draw(image)
    draw_paths(pen, first.points[::every, ::every], flow[:, ::every, ::every], SIDE_PX / width_px)
    return image


def _frame(rgb: ImageArray, overlay: Image.Image | None, text: str) -> ImageArray:
    from PIL import Image, ImageDraw

    image: Any = Image.fromarray(rgb).convert("RGBA")
    if overlay is not None:
        image = Image.alpha_composite(image, overlay)
    pen = ImageDraw.Draw(image)
    pen.rectangle([0, SIDE_PX - 22, SIDE_PX, SIDE_PX], fill=(20, 20, 20, 255))
    pen.text((8, SIDE_PX - 18), text, fill=(255, 255, 255, 255), font_size=12)
    return np.asarray(image.convert("RGB"))
