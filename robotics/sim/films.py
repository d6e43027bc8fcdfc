"""Videos of tabletop episodes for people: the presented scene from its own camera, with a caption."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from robotics.sim.looks import CAMERA
from robotics.sim.presentation import COLOURS, PresentedScene
from robotics.sim.rendering import FrameRenderer, Outcome, RenderSettings

if TYPE_CHECKING:
    import mujoco
    from numpy.typing import NDArray

    from robotics.sim.tasks import TabletopScene

VIDEO_SIZE = (480, 640)
"""(H, W) pixels."""
SMALLEST_BAR_PX = 10


@dataclass(frozen=True)
class Caption:
    """The line at the bottom of an image."""

    text: str  # instruction of the task
    seconds: float  # simulated time since the start
    outcome: Outcome = ""

    @property
    def ending(self) -> str:
        """Time, and how the episode ended."""
        ends = {"": "", "success": "solved in ", "failure": "not solved in "}
        return f"{ends[self.outcome]}{self.seconds:.1f} s"


class VideoRenderer:
    """Draws a scene as people see it: lights with shadows, materials, the camera `film`, and how the episode ended."""

    def __init__(self, scene: TabletopScene, size: tuple[int, int] = VIDEO_SIZE, backend: str | None = None) -> None:
        self._presented = PresentedScene(scene)
        settings = RenderSettings(size[1], size[0], CAMERA, shadows=True, multisampling=True, reuse_static=False)
        self._renderer = FrameRenderer(self._presented.model, settings, backend)

    def rgb(
        self, data: mujoco.MjData, out: NDArray[np.uint8] | None = None, outcome: Outcome = ""
    ) -> NDArray[np.uint8]:
        """Draw (H, W, 3) RGB of a state, the top row first and without a caption, into out or a new array."""
        self._presented.show(data, outcome)
        drawn = self._renderer.rgb(self._presented.data, out)
        return drawn if out is not None else drawn.copy()

    def close(self) -> None:
        """Free the OpenGL context; from the thread that made the renderer."""
        self._renderer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def video_size(height: int) -> tuple[int, int]:
    """(H, W) of a video of a height: 4:3, both even, as video encoders need them."""
    even = max(2, height + height % 2)
    return even, 2 * round(even * 2 / 3)


def write_caption(frame: NDArray[np.uint8], caption: Caption) -> NDArray[np.uint8]:
    """Copy of an image (H, W, 3) with a caption over its bottom: a bar, green after a success and red after a failure.

    The text is left out where the bar has fewer than 10 pixels.
    """
    from PIL import Image, ImageDraw, ImageFont

    height, width, _ = frame.shape
    bar = max(1, round(0.075 * height))
    image = Image.fromarray(frame)
    pen = ImageDraw.Draw(image)
    colour = tuple(round(200 * part) for part in COLOURS[caption.outcome]) if caption.outcome else (32, 35, 40)
    pen.rectangle([0, height - bar, width, height], fill=colour)
    if bar >= SMALLEST_BAR_PX:
        font = ImageFont.load_default(0.55 * bar)
        middle, margin = height - bar / 2, 0.35 * bar
        pen.text((width - margin, middle), caption.ending, "white", font, anchor="rm")
        room = width - 3 * margin - pen.textlength(caption.ending, font)
        pen.text((margin, middle), _shortened(caption.text, room, font), "white", font, anchor="lm")
    return np.asarray(image)


def _shortened(text: str, room: float, font: Any) -> str:
    if font.getlength(text) <= room:
        return text
    while text and font.getlength(text + "…") > room:
        text = text[:-1]
    return text + "…"
