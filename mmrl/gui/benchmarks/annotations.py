"""Rows of the benchmarks' annotation files, checked, and their targets in pixels of the stored image."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from mmrl.files import is_file, read_json_object
from mmrl.gui.grounding.conventions import BoxForm, corners
from mmrl.gui.grounding.coords import Box, Size
from mmrl.gui.grounding.samples import Polygon, Refusal, Target

Cells: TypeAlias = Mapping[str, Any]
Groups: TypeAlias = Mapping[str, tuple[str, ...]]


class RowError(Exception):
    """A row that does not have the benchmark's format; the message states the actual and the expected value."""


@dataclass(frozen=True)
class Annotation:
    """A row as published; nothing is repaired or converted."""

    id: str
    """Id of the sample: the row's own, or file and number."""
    place: str
    """File and number of the row, for messages."""
    image: Any
    """Path inside the image folder, or a stored image."""
    instruction: str
    target: Sequence[float] | Refusal
    """Four numbers of a box, the corners of a polygon as x, y, x, y, ..., or a refusal."""
    form: BoxForm | None
    """Meaning of a box; None for polygons and refusals."""
    size: Size | None = None
    """(width, height) of the image as annotated; None if the row has none."""
    groups: Groups = field(default_factory=dict)
    """Values of the sample in each column that results are broken down by."""
    other_boxes: Sequence[Sequence[float]] = ()
    """Other boxes (in custom data) that are as correct as the target."""

    @property
    def boxes(self) -> list[Sequence[float]]:
        """All boxes; empty for polygons and refusals."""
        return [] if self.form is None or isinstance(self.target, Refusal) else [self.target, *self.other_boxes]


@dataclass(frozen=True)
class RowContext:
    """File and layout of a row."""

    file: Path
    number: int
    """Number of the row in its file, from 1."""
    place: str
    """File and row, for messages."""
    form: BoxForm
    """Meaning of the boxes of this layout."""
    language: str = "en"
    """Language of the instructions."""
    companion: Groups = field(default_factory=dict)
    """Columns of a second file, by sample id."""


def make_target(annotation: Annotation, original_wh: Size) -> Target:
    """The target of an annotation, in pixels of the stored image."""
    if isinstance(annotation.target, Refusal):
        return annotation.target
    relative = annotation.form is not None and annotation.form.is_relative
    # fractions need no annotated size
    width, height = (1, 1) if relative else (annotation.size or original_wh)
    # 1 unless the stored image has another size than the annotated one
    x_scale, y_scale = original_wh[0] / width, original_wh[1] / height
    if annotation.form is None:
        xs, ys = annotation.target[0::2], annotation.target[1::2]
        return Polygon(tuple((x * x_scale, y * y_scale) for x, y in zip(xs, ys, strict=True)))
    x1, y1, x2, y2 = corners(annotation.target, annotation.form)
    return Box(x1 * x_scale, y1 * y_scale, x2 * x_scale, y2 * y_scale)


def read_screenspot(cells: Cells, context: RowContext) -> Annotation:
    """A row of screenspot_{mobile,desktop,web}.json or its _v2 form; the platform is in the file's name.

    Source: njucckevin/SeeClick pretrain/screenspot_test.py.
    """
    platform = _in_name(context.file, "mobile", "desktop", "web")
    groups = {"platform": platform, "type": text_cell(cells, "data_type"), "source": str(cells.get("data_source", ""))}
    return _annotation(cells, context, groups, image=text_cell(cells, "img_filename"), target=box_cell(cells, "bbox"))


def read_screenspot_parquet(cells: Cells, context: RowContext) -> Annotation:
    """A row of the parquet mirrors, which contain the image, and the source instead of the platform.

    Source: EvolvingLMMs-Lab/lmms-eval lmms_eval/tasks/screenspot/utils_rec.py.
    """
    if cells.get("image") is None:
        raise RowError("no column image")
    source = text_cell(cells, "data_source")
    groups = {"platform": PLATFORMS.get(source.lower(), "web"), "type": text_cell(cells, "data_type"), "source": source}
    return _annotation(cells, context, groups, image=cells["image"], target=box_cell(cells, "bbox"))


def read_screenspot_pro(cells: Cells, context: RowContext) -> Annotation:
    """A row of annotations/<application>_<platform>.json.

    Source: likaixin2000/ScreenSpot-Pro-GUI-Grounding eval_screenspot_pro.py.
    """
    groups = {name: text_cell(cells, name) for name in ("group", "application", "platform")}
    return _annotation(
        cells,
        context,
        {**groups, "type": text_cell(cells, "ui_type")},
        id=cells.get("id"),
        image=text_cell(cells, "img_filename"),
        instruction="instruction_cn" if context.language == "cn" else "instruction",
        target=box_cell(cells, "bbox"),
        size="img_size",
    )


def read_mmbench_gui(cells: Cells, context: RowContext) -> Annotation:
    """A row of L2_annotations.json.

    As in the official loader, a coordinate of -1 means 0, and a box with a number above 1 is in pixels.

    Source: open-compass/MMBench-GUI benchmarks/l2_element_grounding.py.
    """
    platform = text_cell(cells, "platform")
    box = tuple(0 if number == -1 else number for number in box_cell(cells, "bbox"))
    groups = {"platform": platform, "level": text_cell(cells, "grounding_type"), "type": text_cell(cells, "data_type")}
    return _annotation(
        cells,
        context,
        {**groups, "application": str(cells.get("app_name", ""))},
        id=cells.get("index"),
        image=f"{platform}/{text_cell(cells, 'image_path')}",
        target=box,
        form=context.form if max(box) <= 1 else BoxForm.XYXY,
        size="image_size",
    )


def read_ui_vision(cells: Cells, context: RowContext) -> Annotation:
    """A row of element_grounding_{basic,functional,spatial}.json; swapped corners are sorted, as the metric does.

    Published rows have the application, as `platform`, but not its category.

    Source: uivision/UI-Vision eval/grounding/eval_uivision.py and mapdict_cat2platform.json.
    """
    x1, y1, x2, y2 = box_cell(cells, "bbox")
    application = str(cells.get("platform") or "")
    columns = {
        "category": cells.get("category") or CATEGORIES.get(application.lower()),
        "type": cells.get("element_type"),
        "application": application,
    }
    optional = {name: str(value) for name, value in columns.items() if value}
    return _annotation(
        cells,
        context,
        {"setting": _in_name(context.file, "basic", "functional", "spatial"), **optional},
        image=text_cell(cells, "image_path"),
        instruction="prompt_to_evaluate",
        target=(min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2)),
        size="image_size",
    )


def read_osworld_g(cells: Cells, context: RowContext) -> Annotation:
    """A row of OSWorld-G.json, OSWorld-G_refined.json or the parquet form: a box, a polygon or a refusal.

    Source: showlab/FocusUI evaluation/os_world_g_eval.py; EvolvingLMMs-Lab/lmms-eval lmms_eval/tasks/osworld_g.
    """
    kind = text_cell(cells, "box_type").lower()
    target: Sequence[float] | Refusal = Refusal()
    if kind == "bbox":
        target = box_cell(cells, "box_coordinates")
    elif kind == "polygon":
        target = number_cells(cells, "box_coordinates")
        if len(target) < 6 or len(target) % 2:
            raise RowError(f"box_coordinates has {len(target)} numbers; expected x, y of at least 3 corners")
    elif kind != "refusal":
        raise RowError(f"box_type is {kind!r}; expected bbox, polygon or refusal")
    annotation = _annotation(
        cells,
        context,
        {"target": kind, "on_screen": "absent" if kind == "refusal" else "present"},
        id=cells.get("id"),
        image=cells.get("image") if cells.get("image") is not None else text_cell(cells, "image_path"),
        target=target,
        form=context.form if kind == "bbox" else None,
        size="image_size",
    )
    types = cells.get("GUI_types")
    several = {
        "category": context.companion.get(annotation.id, ()),
        "type": tuple(map(str, types)) if isinstance(types, list | tuple) else (),
    }
    return replace(annotation, groups={**annotation.groups, **several})


def osworld_g_categories(folder: Path) -> dict[str, tuple[str, ...]]:
    """Abilities of each sample in classification_result.json; empty without that file."""
    file = folder / "classification_result.json"
    if not is_file(file):
        return {}
    found: dict[str, list[str]] = defaultdict(list)
    classified = read_json_object(file).get("classified")
    for category, samples in classified.items() if isinstance(classified, Mapping) else ():
        for sample in samples:
            found[str(sample.get("id"))].append(str(category))
    return {name: tuple(categories) for name, categories in found.items()}


def read_i2e(cells: Cells, context: RowContext) -> Annotation:
    """A line of I2E-bench-annotation.jsonl.

    Source: InfiXAI/InfiGUI-G1 eval/data.py (`standardize_sample`).
    """
    about = cells.get("annotations")
    kind = about.get("instr_type") if isinstance(about, Mapping) else None
    if not isinstance(kind, str):
        raise RowError("annotations.instr_type is missing; expected explicit or implicit")
    groups = {"instruction": kind.lower(), "source": str(cells.get("source", "")).lower()}
    return _annotation(cells, context, groups, image=text_cell(cells, "image"), target=box_cell(cells, "bounding_box"))


def _annotation(
    cells: Cells,
    context: RowContext,
    groups: Mapping[str, str],
    *,
    image: Any,
    target: Sequence[float] | Refusal,
    id: Any = None,
    instruction: str = "instruction",
    form: BoxForm | str | None = "",
    size: str = "",
) -> Annotation:
    """An annotation; `instruction` and `size` are columns, and `form` defaults to that of the layout."""
    return Annotation(
        # own ids where the benchmark has none, from the place in its file
        id=str(id or f"{context.file.stem}-{context.number}"),
        place=context.place,
        image=image,
        instruction=text_cell(cells, instruction),
        target=target,
        form=context.form if form == "" else form,  # type: ignore[arg-type]
        size=size_cell(cells, size),
        groups={name: (value,) for name, value in groups.items()},
    )


def _in_name(file: Path, *words: str) -> str:
    """The one of some words that the name of a file contains."""
    found = [word for word in words if word in file.stem.lower()]
    if len(found) != 1:
        raise RowError(f"the file name {file.name} contains neither {', '.join(words[:-1])} nor {words[-1]}")
    return found[0]


def text_cell(cells: Cells, name: str) -> str:
    """A column that holds a text; raises RowError."""
    value = cell_of(cells, name)
    if not isinstance(value, str):
        raise RowError(f"{name} is {shortened(value)}; expected a text")
    if not value.strip():
        raise RowError(f"{name} is blank")
    return value


def box_cell(cells: Cells, name: str) -> tuple[float, ...]:
    """A column that holds four numbers; raises RowError."""
    numbers = number_cells(cells, name)
    if len(numbers) != 4:
        raise RowError(f"{name} has {len(numbers)} numbers; expected 4")
    return numbers


def number_cells(cells: Cells, name: str) -> tuple[float, ...]:
    """A column that holds finite numbers; raises RowError."""
    value = cell_of(cells, name)
    if not isinstance(value, list | tuple):
        raise RowError(f"{name} is {shortened(value)}; expected a list of numbers")
    for number in value:
        # bool is an int in Python
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
            raise RowError(f"{name} contains {shortened(number)}; expected finite numbers")
    return tuple(value)


def size_cell(cells: Cells, name: str) -> Size | None:
    """Width and height; None if the row has no such column."""
    if cells.get(name) is None:
        return None
    numbers = number_cells(cells, name)
    if len(numbers) != 2 or min(numbers) < 1 or any(number != int(number) for number in numbers):
        raise RowError(f"{name} is {shortened(list(numbers))}; expected [width, height] in pixels")
    return int(numbers[0]), int(numbers[1])


def cell_of(cells: Cells, name: str) -> Any:
    """A column that is not empty; raises RowError."""
    if cells.get(name) is None:
        found = ", ".join(key for key, value in cells.items() if value is not None) or "none"
        raise RowError(f"no column {name}; the row has: {found}")
    return cells[name]


def shortened(value: Any) -> str:
    """A value for a message."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


PLATFORMS = {"ios": "mobile", "android": "mobile", "windows": "desktop", "macos": "desktop"}
"""Platform of each data source; all others are web pages."""
_APPLICATIONS = {
    "Browsers": "Brave, Chromium, DuckDuckGo, Mozilla Firefox",
    "Creativity": "Blender, darktable, FontForge, GIMP, Inkscape, Krita, Lightworks, MuseScore, Natron, OBS Studio, "
    "OpenShot, OpenToonz, Scribus, Shotcut, WordPress",
    "Development": "Arduino IDE, Atom, Bash, Bluefish, Brackets, Code::Blocks, Conky, Eclipse, FreeCAD, Geany, gedit, "
    "IntelliJ IDEA, KDevelop, Komodo Edit, NetBeans, PyCharm, Qt Creator, Spyder, Ubuntu Terminal, VSCode",
    "Education": "Anki, Audacity, Calibre, GrassGIS, Mendeley, OpenBoard, QGIS, Zotero",
    "Entertainment": "Element, Emby, Kodi, Lemmy, Mastodon, Matrix, Signal, VLC Media Player",
    "Productivity": "7-Zip, Affine, Bitwarden, Cryptomator, draw.io, Flameshot, GnuCash, Gnumeric, Jitsi, Joplin, "
    "LibreOffice Calc, LibreOffice Draw, LibreOffice Impress, LibreOffice Writer, Metabase, Nemo, Nextcloud, "
    "OnlyOffice Calendar, OnlyOffice Document Editor, OnlyOffice Forms, OnlyOffice PDF Forms, OnlyOffice Presentation, "
    "OnlyOffice Spreadsheet, OpenProject, PDFedit, Simplenote, WeKan, Zulip",
}
CATEGORIES = {name.lower(): category for category, names in _APPLICATIONS.items() for name in names.split(", ")}
"""Category of each application of UI-Vision; its files differ in capitals."""
