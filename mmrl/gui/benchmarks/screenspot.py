"""Rows of ScreenSpot, ScreenSpot-v2 and ScreenSpot-Pro."""

from __future__ import annotations

from mmrl.gui.benchmarks.annotations import Annotation, RowError, read_box, read_size, read_text
from mmrl.gui.benchmarks.layout import Cells, RowContext


def read_screenspot(cells: Cells, context: RowContext) -> Annotation:
    """A row of screenspot_{mobile,desktop,web}.json or its _v2 form; the file says the platform.

    Source: njucckevin/SeeClick pretrain/screenspot_test.py.
    """
    kind = read_text(cells, "data_type")
    return Annotation(
        id=context.default_id,
        place=context.place,
        image=read_text(cells, "img_filename"),
        instruction=read_text(cells, "instruction"),
        target=read_box(cells, "bbox"),
        form=context.form,
        groups={"platform": (_platform(context),), "type": (kind,), "source": (str(cells.get("data_source", "")),)},
    )


def read_screenspot_parquet(cells: Cells, context: RowContext) -> Annotation:
    """A row of the parquet mirrors, which hold the image and name the source instead of the platform.

    Source: EvolvingLMMs-Lab/lmms-eval lmms_eval/tasks/screenspot/utils_rec.py.
    """
    if cells.get("image") is None:
        raise RowError("no column image")
    source = read_text(cells, "data_source")
    return Annotation(
        id=context.default_id,
        place=context.place,
        image=cells["image"],
        instruction=read_text(cells, "instruction"),
        target=read_box(cells, "bbox"),
        form=context.form,
        groups={
            "platform": (PLATFORMS.get(source.lower(), "web"),),
            "type": (read_text(cells, "data_type"),),
            "source": (source,),
        },
    )


def read_screenspot_pro(cells: Cells, context: RowContext) -> Annotation:
    """A row of annotations/<application>_<platform>.json.

    Source: likaixin2000/ScreenSpot-Pro-GUI-Grounding eval_screenspot_pro.py.
    """
    instruction = "instruction_cn" if context.language == "cn" else "instruction"
    columns = {name: (read_text(cells, name),) for name in ("group", "application", "platform")}
    return Annotation(
        id=str(cells.get("id") or context.default_id),
        place=context.place,
        image=read_text(cells, "img_filename"),
        instruction=read_text(cells, instruction),
        target=read_box(cells, "bbox"),
        form=context.form,
        size=read_size(cells, "img_size"),
        groups={**columns, "type": (read_text(cells, "ui_type"),)},
    )


def _platform(context: RowContext) -> str:
    name = context.file.stem.lower()
    found = [platform for platform in ("mobile", "desktop", "web") if platform in name]
    if len(found) != 1:
        raise RowError(f"the file's name {context.file.name} says neither mobile, desktop nor web")
    return found[0]


PLATFORMS = {"ios": "mobile", "android": "mobile", "windows": "desktop", "macos": "desktop"}
"""Platform of each data source; all others are web pages."""
