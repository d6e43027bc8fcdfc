"""Pictures of tabletop episodes for people: the presented scene from its own camera, with a caption."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np

from robotics.sim.looks import CAMERA
from robotics.sim.presentation import COLOURS, Outcome, PresentedScene
from robotics.sim.rendering import FrameRenderer, RenderSettings

if TYPE_CHECKING:
    import mujoco
    from numpy.typing import NDArray

    from robotics.sim.tasks import TabletopScene

FILM_SIZE = (480, 640)
"""(H, W) pixels."""


@dataclass(frozen=True)
class Caption:
    """The line at the bottom of a picture."""

    text: str
    """Instruction of the task."""
    seconds: float
    """Simulated time since the start."""
    outcome: Outcome = ""

    @property
    def ending(self) -> str:
        """Time, and how the episode ended."""
        return {
            "": f"{self.seconds:.1f} s",
            "success": f"solved in {self.seconds:.1f} s",
            "failure": f"not solved in {self.seconds:.1f} s",
        }[self.outcome]


class FilmRenderer:
    """Draws a scene as people see it: lights with shadows, materials, the camera `film`, and how the episode ended.

    Args:
        scene: that is simulated.
        size: (H, W) pixels.
        backend: name of a renderer that was probed; chosen and probed when None.
    """

    def __init__(self, scene: TabletopScene, size: tuple[int, int] = FILM_SIZE, backend: str | None = None) -> None:
        self._presented = PresentedScene(scene)
        settings = RenderSettings(size[1], size[0], CAMERA, shadows=True, multisampling=True, reuse_static=False)
        self._renderer = FrameRenderer(self._presented.model, settings, backend)

    def rgb(
        self, data: mujoco.MjData, out: NDArray[np.uint8] | None = None, outcome: Outcome = ""
    ) -> NDArray[np.uint8]:
        """Draw a state, without a caption.

        Args:
            data: state of the scene that is simulated; not changed.
            out: (H, W, 3) uint8 to write to; a new array when None.
            outcome: how the episode ended, see `PresentedScene.show`.

        Returns:
            (H, W, 3) uint8 RGB, the top row first.
        """
        self._presented.show(data, outcome)
        return self._renderer.rgb(self._presented.data, out) if out is not None else self._fresh()

    def close(self) -> None:
        """Free the OpenGL context; from the thread that made the renderer."""
        self._renderer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _fresh(self) -> NDArray[np.uint8]:
        return self._renderer.rgb(self._presented.data).copy()


def film_size(height: int) -> tuple[int, int]:
    """(H, W) of a film of a height: 4:3, both even, as video encoders want them."""
    even = max(2, height + height % 2)
    return even, 2 * round(even * 2 / 3)


def write_caption(frame: NDArray[np.uint8], caption: Caption) -> NDArray[np.uint8]:
    """Write a caption over the bottom of a picture.

    Args:
        frame: (H, W, 3) uint8; not changed.
        caption: what to write; the bar is green after a success and red after a failure. The words are left out where
            the bar has fewer than 10 pixels.

    Returns:
        (H, W, 3) uint8.
    """
    from PIL import Image, ImageDraw, ImageFont

    height, width, _ = frame.shape
    bar = max(1, round(0.075 * height))
    picture = Image.fromarray(frame)
    pen = ImageDraw.Draw(picture)
    colour = tuple(round(200 * part) for part in COLOURS[caption.outcome]) if caption.outcome else (32, 35, 40)
    pen.rectangle([0, height - bar, width, height], fill=colour)
    if bar >= SMALLEST_BAR_PX:
        font = ImageFont.load_default(0.55 * bar)
        middle, margin = height - bar / 2, 0.35 * bar
        pen.text((width - margin, middle), caption.ending, "white", font, anchor="rm")
        room = width - 3 * margin - pen.textlength(caption.ending, font)
        pen.text((margin, middle), _shortened(caption.text, room, font), "white", font, anchor="lm")
    return np.asarray(picture)


def _shortened(text: str, room: float, font: object) -> str:
    from PIL import ImageFont

    assert isinstance(font, ImageFont.FreeTypeFont | ImageFont.ImageFont)
    if font.getlength(text) <= room:
        return text
    while text and font.getlength(text + "…") > room:
        text = text[:-1]
    return text + "…"


SMALLEST_BAR_PX = 10
