"""Twelve icons drawn by Pillow, with names, functions, and the icon that each is easily confused with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from PIL import Image, ImageDraw

Color: TypeAlias = tuple[int, int, int]

OVERSAMPLING = 4
"""Icons are drawn this many times larger and reduced, which smooths their edges."""


@dataclass(frozen=True)
class Icon:
    """One kind of icon."""

    functions: tuple[str, ...]
    """Its function, in words that do not name it; the last one is for test vocabularies."""
    taken_for: str
    """The icon that its function is easily attributed to."""
    color: Color
    """Its colour on coloured screens."""
    draw: Callable[[Pen], None]
    """Draws it into the unit square."""


class Pen:
    """Draws in the unit square of an icon, `side` pixels long, with ink and holes in the colour of the paper."""

    def __init__(self, draw: ImageDraw.ImageDraw, side: int, ink: Color, paper: Color) -> None:
        self._draw, self._side, self.ink, self.paper = draw, side, ink, paper
        self._width = max(1, round(0.1 * side))

    def line(self, *points: tuple[float, float]) -> None:
        """A stroke through points."""
        self._draw.line(self._scaled(points), fill=self.ink, width=self._width, joint="curve")

    def fill(self, *points: tuple[float, float], hole: bool = False) -> None:
        """A filled polygon."""
        self._draw.polygon(self._scaled(points), fill=self.paper if hole else self.ink)

    def block(self, x1: float, y1: float, x2: float, y2: float, *, hole: bool = False) -> None:
        """A filled rectangle."""
        self._draw.rectangle(self._scaled([(x1, y1), (x2, y2)]), fill=self.paper if hole else self.ink)

    def disc(self, x: float, y: float, radius: float, *, hole: bool = False) -> None:
        """A filled circle."""
        corners = [(x - radius, y - radius), (x + radius, y + radius)]
        self._draw.ellipse(self._scaled(corners), fill=self.paper if hole else self.ink)

    def _scaled(self, points: object) -> list[tuple[float, float]]:
        return [(x * self._side, y * self._side) for x, y in points]  # type: ignore[attr-defined]


def draw_icon(name: str, side: int, ink: Color, paper: Color) -> Image.Image:
    """An icon, key of `ICONS`, as an image of side x side pixels."""
    from PIL import Image, ImageDraw

    large = Image.new("RGB", (side * OVERSAMPLING,) * 2, paper)
    ICONS[name].draw(Pen(ImageDraw.Draw(large), side * OVERSAMPLING, ink, paper))
    return large.resize((side, side), Image.Resampling.BOX)


def _disk(pen: Pen) -> None:
    pen.block(0.1, 0.1, 0.9, 0.9)
    pen.block(0.3, 0.1, 0.7, 0.38, hole=True)
    pen.block(0.25, 0.55, 0.75, 0.8, hole=True)


def _bin(pen: Pen) -> None:
    pen.block(0.1, 0.16, 0.9, 0.28)
    pen.block(0.38, 0.06, 0.62, 0.16)
    pen.fill((0.18, 0.36), (0.82, 0.36), (0.74, 0.95), (0.26, 0.95))


def _lens(pen: Pen) -> None:
    pen.disc(0.4, 0.4, 0.33)
    pen.disc(0.4, 0.4, 0.21, hole=True)
    pen.line((0.62, 0.62), (0.93, 0.93))


def _house(pen: Pen) -> None:
    pen.fill((0.5, 0.05), (0.97, 0.5), (0.03, 0.5))
    pen.block(0.18, 0.5, 0.82, 0.93)
    pen.block(0.42, 0.62, 0.58, 0.93, hole=True)


def _star(pen: Pen) -> None:
    pen.fill(
        (0.5, 0.02), (0.62, 0.37), (0.98, 0.38), (0.69, 0.6), (0.79, 0.96),
        (0.5, 0.75), (0.21, 0.96), (0.31, 0.6), (0.02, 0.38), (0.38, 0.37),
    )  # fmt: skip


def _heart(pen: Pen) -> None:
    pen.disc(0.29, 0.32, 0.24)
    pen.disc(0.71, 0.32, 0.24)
    pen.fill((0.06, 0.42), (0.94, 0.42), (0.5, 0.95))


def _plus(pen: Pen) -> None:
    pen.block(0.4, 0.08, 0.6, 0.92)
    pen.block(0.08, 0.4, 0.92, 0.6)


def _pencil(pen: Pen) -> None:
    pen.fill((0.7, 0.05), (0.95, 0.3), (0.38, 0.87), (0.13, 0.62))
    pen.fill((0.09, 0.7), (0.3, 0.91), (0.04, 0.96))


def _cross(pen: Pen) -> None:
    pen.line((0.12, 0.12), (0.88, 0.88))
    pen.line((0.88, 0.12), (0.12, 0.88))


def _bell(pen: Pen) -> None:
    pen.disc(0.5, 0.38, 0.3)
    pen.fill((0.2, 0.38), (0.8, 0.38), (0.94, 0.76), (0.06, 0.76))
    pen.disc(0.5, 0.86, 0.11)


def _envelope(pen: Pen) -> None:
    pen.block(0.04, 0.18, 0.96, 0.82)
    pen.fill((0.14, 0.26), (0.86, 0.26), (0.5, 0.56), hole=True)


def _padlock(pen: Pen) -> None:
    pen.disc(0.5, 0.34, 0.29)
    pen.disc(0.5, 0.34, 0.16, hole=True)
    pen.block(0.14, 0.44, 0.86, 0.95)
    pen.disc(0.5, 0.67, 0.1, hole=True)


ICONS: dict[str, Icon] = {
    "disk": Icon(("keep my changes", "make this permanent"), "padlock", (20, 60, 255), _disk),
    "padlock": Icon(("nobody else may open this", "protect this"), "disk", (120, 60, 0), _padlock),
    "bin": Icon(("remove this item", "throw this away"), "cross", (245, 245, 245), _bin),
    "cross": Icon(("leave this window", "I am finished here"), "bin", (255, 0, 0), _cross),
    "lens": Icon(("where is my file", "look something up"), "house", (0, 220, 230), _lens),
    "house": Icon(("back to the start", "show the first page"), "lens", (0, 110, 20), _house),
    "star": Icon(("remember this page", "put it on my list"), "heart", (255, 220, 0), _star),
    "heart": Icon(("tell them I enjoyed it", "show some love"), "star", (255, 90, 200), _heart),
    "plus": Icon(("begin something new", "one more of these"), "pencil", (120, 255, 0), _plus),
    "pencil": Icon(("correct a mistake", "change the text"), "plus", (255, 130, 0), _pencil),
    "bell": Icon(("tell me when it happens", "what have I missed"), "envelope", (140, 0, 220), _bell),
    "envelope": Icon(("write to a friend", "contact them"), "bell", (0, 0, 60), _envelope),
}
"""By name; no word of a function is the icon's name."""
