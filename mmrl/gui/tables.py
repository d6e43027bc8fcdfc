"""Grounding samples as rows of a table.

A row has `image`, `instruction`, `original_wh` (optional) and one target, all in pixels of the original image: `bbox`
[x1, y1, x2, y2], `boxes` (several that fit equally), `polygon` [[x, y], ...] or `refusal` true. Every other column is
kept. `answers` [[x, y], ...] are worked answers for supervised runs.
"""

from __future__ import annotations

import io
import json
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from mmrl.errors import UserError
from mmrl.gui.coords import Box, Point, Size
from mmrl.gui.samples import AnyOf, GroundingSample, Polygon, Refusal, Target

TARGET_COLUMNS = ("bbox", "boxes", "polygon", "refusal")
ROTATED = (5, 6, 7, 8)
"""EXIF orientations that swap the sides."""


def target_of(row: Mapping[str, Any]) -> Target:
    """The target of a row, in pixels of the original image; raises ValueError where it is not exactly one."""
    given = [name for name in TARGET_COLUMNS if row.get(name) not in (None, False)]
    if len(given) != 1:
        raise ValueError(f"expected one of the columns {', '.join(TARGET_COLUMNS)}, found {', '.join(given) or 'none'}")
    value = row[given[0]]
    if given[0] == "bbox":
        return _box(value)
    if given[0] == "boxes":
        return AnyOf(tuple(_box(box) for box in value))
    if given[0] == "polygon":
        return Polygon(tuple(_pair(point) for point in value))
    return Refusal()


def sample_row(sample: GroundingSample) -> dict[str, Any]:
    """The columns of a sample apart from its image."""
    columns: dict[str, Any] = {"original_wh": list(sample.original_wh), "instruction": sample.instruction}
    match sample.target:
        case Box():
            columns["bbox"] = list(sample.target)
        case AnyOf(targets=targets) if all(isinstance(target, Box) for target in targets):
            columns["boxes"] = [list(target) for target in targets if isinstance(target, Box)]
        case Polygon(points=points):
            columns["polygon"] = [list(point) for point in points]
        case Refusal():
            columns["refusal"] = True
        case other:
            raise ValueError(f"no column holds the target {other}")
    return {**sample.meta, **columns}


def write_samples(path: str | Path, samples: Iterable[GroundingSample]) -> Path:
    """Write samples as JSON lines with PNG images in a folder beside them."""
    path = Path(path)
    if path.suffix != ".jsonl":
        raise UserError(f"screens go to a .jsonl file, with their images in a folder beside it; got {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = path.with_name(f"{path.stem}-images")
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
    """Width and height of an upright PIL image, file content or path, from its header alone; raises OSError."""
    if isinstance(image, Image.Image):
        return image.size
    source = io.BytesIO(image) if isinstance(image, bytes) else image
    with Image.open(source) as opened:
        width, height = opened.size
        turned = opened.getexif().get(0x0112) in ROTATED
    return (height, width) if turned else (width, height)


def _box(value: Any) -> Box:
    if len(value) != 4:
        raise ValueError(f"a box has 4 numbers [x1, y1, x2, y2], found {value}")
    return Box(*(float(number) for number in value))


def _pair(value: Any) -> Point:
    x, y = value
    return float(x), float(y)
