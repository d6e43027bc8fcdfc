"""Screens with an instruction and its target: rows in a table, and drawings with the predicted points.

A row has `image`, `instruction`, `original_wh` (optional) and one target, all in pixels of the original image: `bbox`
[x1, y1, x2, y2], `boxes` (several that are equally right), `polygon` [[x, y], ...], `point` [x, y] with `radius`,
`refusal` true, or `no_target` true for a step without a place, such as typing. Other columns are kept. `answers`
[[x, y], ...] are worked answers for supervised runs.
"""

from __future__ import annotations

import io
import json
import math
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias

from PIL import Image

from mmrl.errors import UserError
from mmrl.files import open_file, open_image_file
from mmrl.gui.grounding.coords import Box, CoordinateSpace, Point, Resize, Size, from_original, to_original
from mmrl.hub.images import ORIENTATION, resize_image

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw as Drawing


@dataclass(frozen=True)
class Polygon:
    """A closed outline; its edges belong to it."""

    points: tuple[Point, ...]
    """At least three corners in order."""

    def __post_init__(self) -> None:
        if len(self.points) < 3:
            raise ValueError(f"a polygon needs at least 3 corners, found {len(self.points)}")

    def contains(self, point: Point) -> bool:
        """Whether a point is inside by the even-odd rule, or on an edge; never for NaN."""
        inside = False
        for start, end in zip(self.points, self.points[1:] + self.points[:1], strict=True):
            # edges first: the even-odd rule counts some of them as inside and others as outside
            if _on_segment(point, start, end):
                return True
            (x, y), (x1, y1), (x2, y2) = point, start, end
            # half-open in y, so that a ray through a corner crosses one of its two edges
            if (y1 > y) != (y2 > y) and x < x1 + (y - y1) * (x2 - x1) / (y2 - y1):
                inside = not inside
        return inside


def _on_segment(point: Point, start: Point, end: Point) -> bool:
    (x, y), (x1, y1), (x2, y2) = point, start, end
    within = min(x1, x2) <= x <= max(x1, x2) and min(y1, y2) <= y <= max(y1, y2)
    # exact: annotations are whole pixels, and points are compared as they are
    return within and (x2 - x1) * (y - y1) == (y2 - y1) * (x - x1)


@dataclass(frozen=True)
class Refusal:
    """The element is not on the screen; the correct answer is [-1, -1]."""

    def contains(self, point: Point) -> bool:
        """Whether both coordinates are negative."""
        # models write -1 in their space, which scaling to pixels moves but keeps negative
        return point[0] < 0 and point[1] < 0


@dataclass(frozen=True)
class Spot:
    """A point of which only the neighbourhood is right."""

    center: Point
    radius: float = 0.0
    """Points closer than this are inside; 0 if the reward has its own radius."""

    def contains(self, point: Point) -> bool:
        """Whether a point is closer than the radius; never for NaN."""
        return math.dist(point, self.center) < self.radius


@dataclass(frozen=True)
class NoTarget:
    """A step without a place on the screen, such as typing or going back."""

    def contains(self, point: Point) -> bool:
        """Never: there is nothing to point at."""
        return False


@dataclass(frozen=True)
class AnyOf:
    """Several targets that the instruction fits equally well."""

    targets: tuple[Box | Polygon, ...]

    def __post_init__(self) -> None:
        if not self.targets:
            raise ValueError("an AnyOf target needs at least one target")

    def contains(self, point: Point) -> bool:
        """Whether a point is in one of them."""
        return any(target.contains(point) for target in self.targets)


Target: TypeAlias = "Box | Polygon | Spot | Refusal | NoTarget | AnyOf"


@dataclass(frozen=True)
class GroundingSample:
    """An instruction on a screen; all coordinates are in pixels of the original image."""

    image: Image.Image | Path | str
    """RGB image, or the path of its file."""
    original_wh: Size
    """(width, height) of the stored image."""
    instruction: str
    """Description of the target."""
    target: Target
    """Target in pixels of the original image."""
    model_wh: Size | None = None
    """(width, height) that the model sees; None until `fitted` is called."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """Additional columns: kind of instruction, platform, seed."""

    def fitted(self, resize: Resize) -> GroundingSample:
        """The same sample with the size that a model sees; raises ValueError for an unusable shape."""
        return replace(self, model_wh=resize.model_wh(self.original_wh))

    def load_image(self) -> Image.Image:
        """The original image as upright RGB."""
        from mmrl.vlm.data.task import open_image

        source = str(self.image) if isinstance(self.image, Path) else self.image
        image = open_image(source, self._name)
        # coordinates of a sample are pixels of exactly this size
        if image.size != tuple(self.original_wh):
            found, expected = (f"{w} x {h}" for w, h in (image.size, self.original_wh))
            raise ValueError(f"{self._name}: the image has {found} pixels, but its sample says {expected}")
        return image

    def model_image(self) -> Image.Image:
        """The image as the model sees it."""
        if self.model_wh is None:
            raise ValueError(f"{self._name}: model_wh is not set; call fitted(Resize(...)) first")
        return resize_image(self.load_image(), self.model_wh)

    def to_original(self, point: Point, space: CoordinateSpace) -> Point:
        """A model's point in pixels of the original image."""
        return to_original(point, space, self.original_wh, self.model_wh)

    def from_original(self, point: Point, space: CoordinateSpace) -> Point:
        """A point of the original image in a model's space."""
        return from_original(point, space, self.original_wh, self.model_wh)

    @property
    def _name(self) -> str:
        return str(self.meta.get("id") or (self.image if isinstance(self.image, str | Path) else self.instruction))


TARGET_COLUMNS = ("bbox", "boxes", "polygon", "point", "refusal", "no_target")
ROTATED = (5, 6, 7, 8)
"""EXIF orientations that swap the sides."""
PNG_ORIENTATIONS = (b"XML:com.adobe.xmp", b"Raw profile type exif")
"""Keywords of texts in a PNG that Pillow searches for the orientation."""


def target_of(row: Mapping[str, Any]) -> Target:
    """The target of a row, in pixels of the original image; raises ValueError unless there is exactly one."""
    # data sets fill absent cells with null, and refusal and no_target with false
    given = [name for name in TARGET_COLUMNS if row.get(name) not in (None, False)]
    if len(given) != 1:
        columns = f"none among {', '.join(row) or 'no columns'}"
        raise ValueError(
            f"expected one of the columns {', '.join(TARGET_COLUMNS)}, found {', '.join(given) or columns}"
        )
    value = row[given[0]]
    if given[0] == "bbox":
        return _box(value)
    if given[0] == "boxes":
        return AnyOf(tuple(_box(box) for box in value))
    if given[0] == "polygon":
        return Polygon(tuple(point_of(point) for point in value))
    if given[0] == "point":
        return _spot(value, row.get("radius"))
    return Refusal() if given[0] == "refusal" else NoTarget()


def sample_row(sample: GroundingSample) -> dict[str, Any]:
    """The columns of a sample apart from its image."""
    about = {"original_wh": list(sample.original_wh), "instruction": sample.instruction}
    return {**sample.meta, **about, **sample_target(sample.target)}


def sample_target(target: Target) -> dict[str, Any]:
    """The columns of a target; the inverse of `target_of`."""
    match target:
        case Box():
            return {"bbox": list(target)}
        case AnyOf(targets=targets) if all(isinstance(part, Box) for part in targets):
            return {"boxes": [list(part) for part in targets if isinstance(part, Box)]}
        case Polygon(points=points):
            return {"polygon": [list(point) for point in points]}
        case Spot(center=center, radius=radius):
            return {"point": list(center), "radius": radius}
        case Refusal():
            return {"refusal": True}
        case NoTarget():
            return {"no_target": True}
        case other:
            raise ValueError(f"no column can hold the target {other}")


def write_samples(path: str | Path, samples: Iterable[GroundingSample]) -> Path:
    """Write samples as JSON lines, and their images as PNG files in a folder next to it."""
    path = Path(path)
    if path.suffix != ".jsonl":
        raise UserError(f"screens are written to a .jsonl file, with an image folder next to it; got {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = path.with_name(f"{path.stem}-images")
    # written under another name and moved when complete
    with tempfile.TemporaryDirectory(prefix=f".{path.stem}-", dir=path.parent) as scratch:
        images, listing = Path(scratch) / "images", Path(scratch) / "rows.jsonl"
        images.mkdir()
        with listing.open("w", encoding="utf-8") as file:
            for number, sample in enumerate(samples):
                name = f"{number:05d}.png"
                sample.load_image().save(images / name, compress_level=1)
                row = {"id": f"{path.stem}-{number:05d}", "image": f"{folder.name}/{name}", **sample_row(sample)}
                file.write(json.dumps(row) + "\n")
        if not folder.exists():
            shutil.move(images, folder)
        listing.replace(path)
    return path


def image_size(image: Image.Image | bytes | str | Path) -> Size:
    """Width and height of a PIL image, file content or path once upright, from its header alone; raises OSError."""
    if isinstance(image, Image.Image):
        return _upright_size(image)
    with io.BytesIO(image) if isinstance(image, bytes) else open_file(image) as source:
        is_upright = _is_upright_png(source)
        source.seek(0)
        opened = open_image_file(source)
        return opened.size if is_upright else _upright_size(opened)


def _is_upright_png(source: BinaryIO) -> bool:
    """Whether a file is a whole PNG that names no orientation.

    Pillow decodes all pixels of a PNG to find out, since the chunk with the orientation may follow them.
    """
    if source.read(8) != b"\x89PNG\r\n\x1a\n":
        return False
    while len(head := source.read(8)) == 8:
        length, kind = int.from_bytes(head[:4], "big"), head[4:]
        if kind == b"IEND":
            return True
        start = source.read(min(length, 80)) if kind in (b"tEXt", b"zTXt", b"iTXt") else b""
        if kind == b"eXIf" or start.partition(b"\0")[0] in PNG_ORIENTATIONS:
            return False
        source.seek(length - len(start) + 4, io.SEEK_CUR)  # 4: its checksum
    return False


def _upright_size(image: Image.Image) -> Size:
    width, height = image.size
    return (height, width) if image.getexif().get(ORIENTATION) in ROTATED else (width, height)


def _box(value: Any) -> Box:
    return Box(*_numbers(value, 4, "a box needs 4 finite numbers [x1, y1, x2, y2]"))


def point_of(value: Any) -> Point:
    """Two finite numbers of a row, such as a corner; raises ValueError."""
    x, y = _numbers(value, 2, "a corner needs 2 finite numbers [x, y]")
    return x, y


def _spot(value: Any, radius: Any) -> Spot:
    x, y = _numbers(value, 2, "a point needs 2 finite numbers [x, y]")
    # whole numbers may be a pixel of the corner
    if max(abs(x), abs(y)) <= 1 and (x % 1 or y % 1):
        raise ValueError(f"the point [{x:g}, {y:g}] is a fraction, but points are in pixels of the image")
    (size,) = _numbers([radius or 0], 1, "a radius is a finite number of pixels")
    if size < 0:
        raise ValueError(f"the radius is {size:g} pixels; it must be at least 0")
    return Spot((x, y), size)


def _numbers(value: Any, count: int, expected: str) -> list[float]:
    """Numbers as they are written: texts and truth values are none."""
    is_list = isinstance(value, Sequence) and not isinstance(value, str) and len(value) == count
    if not is_list or any(isinstance(number, bool) or not isinstance(number, Real) for number in value):
        raise ValueError(f"{expected}, found {repr(value)[:60]}")
    if not all(math.isfinite(number) for number in value):
        raise ValueError(f"{expected}, found {repr(value)[:60]}")
    return [float(number) for number in value]


TARGET_COLOUR = (0, 150, 60)
HIT_COLOUR = (0, 110, 255)
MISS_COLOUR = (230, 30, 30)
WHITE = (255, 255, 255)
LONGEST_SIDE = 1280
SHORTEST_SIDE = 384
"""Screens with a shorter long side are enlarged by an integer factor, so that marks do not cover them."""
CIRCLE = 32
"""Corners of the outline of a spot."""
LEAST_OUTLINE = 4.0
"""Least radius in pixels at which a spot is drawn."""
FARTHEST = 1e15
"""Coordinates beyond this are not drawn."""
MARK = 0.02
"""Radius of a point's mark as a fraction of the image's longer side."""


def draw_answer(image: Image.Image, target: Target, points: Sequence[Point], hit: bool) -> Image.Image:
    """Draw the target in green and the predicted points in blue for a hit, else in red, on a copy of the screen.

    Target and points are in pixels of the original screen; a refusal has no outline. The first point is a cross in a
    circle, others are rings with their rank, and those outside are triangles at the nearest edge. The copy has at most
    1280 pixels on a side; a small screen is enlarged.
    """
    from PIL import ImageDraw

    longest = max(image.size)
    scale = min(1.0, LONGEST_SIDE / longest) if longest >= SHORTEST_SIDE else -(-SHORTEST_SIDE // longest)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    drawing = image.convert("RGB").resize(size) if scale != 1 else image.convert("RGB").copy()
    draw = ImageDraw.Draw(drawing)
    line = max(2, round(MARK * max(size) / 8))
    for outline in _outlines(target):
        scaled = [(x * scale, y * scale) for x, y in outline]
        draw.line([*scaled, scaled[0]], fill=WHITE, width=line + 2)
        draw.line([*scaled, scaled[0]], fill=TARGET_COLOUR, width=line)
    colour = HIT_COLOUR if hit else MISS_COLOUR
    for rank, (x, y) in reversed(list(enumerate(points, start=1))):
        if is_drawable((x, y)):
            _draw_point(draw, (x * scale, y * scale), size, colour, rank)
    return drawing


def is_drawable(point: Sequence[float]) -> bool:
    """Whether a point has a place; not NaN, infinities, or integers beyond the largest float."""
    return all(abs(number) < FARTHEST for number in point)


def _outlines(target: Target) -> list[list[Point]]:
    if isinstance(target, Box):
        return [[(target.x1, target.y1), (target.x2, target.y1), (target.x2, target.y2), (target.x1, target.y2)]]
    if isinstance(target, Polygon):
        return [list(target.points)]
    if isinstance(target, AnyOf):
        return [outline for part in target.targets for outline in _outlines(part)]
    if isinstance(target, Spot):
        (x, y), radius = target.center, max(target.radius, LEAST_OUTLINE)
        turns = [2 * math.pi * corner / CIRCLE for corner in range(CIRCLE)]
        return [[(x + radius * math.cos(turn), y + radius * math.sin(turn)) for turn in turns]]
    return []


def _draw_point(draw: Drawing, point: Point, size: tuple[int, int], colour: tuple[int, int, int], rank: int) -> None:
    x, y = (min(max(number, 0.0), side - 1.0) for number, side in zip(point, size, strict=True))
    radius = max(8.0, MARK * max(size))
    if (x, y) != tuple(point):
        draw.regular_polygon((x, y, radius), 3, fill=colour, outline=WHITE)
        return
    circle = (x - radius, y - radius, x + radius, y + radius)
    draw.ellipse(circle, outline=WHITE, width=5)
    draw.ellipse((x - radius + 1, y - radius + 1, x + radius - 1, y + radius - 1), outline=colour, width=3)
    if rank > 1:
        draw.text((x + radius + 2, y - radius), str(rank), fill=colour, stroke_width=2, stroke_fill=WHITE)
        return
    for width, fill in ((4, WHITE), (2, colour)):
        draw.line((x - radius, y, x + radius, y), fill=fill, width=width)
        draw.line((x, y - radius, x, y + radius), fill=fill, width=width)
