"""Images that a model drew for the same held-out prompts and seeds, evaluation by evaluation."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmrl.training.record.samples import SampleRecord
from mmrl.training.report.gallery import evaluation_columns, picture, question, readable, show_number
from mmrl.training.report.style import save_png

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GRID_PROMPTS = 12
GRID_IMAGES = 4
GRID_DURING = 2
FILE_PROMPTS = 8
FILE_IMAGE_INCHES = 0.75


def image_grid(runs: Sequence[tuple[str, Path]]) -> dict[str, Any] | None:
    """A row a prompt, a column an evaluation, in each cell the images of the same seeds."""
    columns = [(label, _drawn(groups)) for label, groups in evaluation_columns(runs, GRID_DURING)]
    last = columns[-1][1] if columns else {}
    columns = [(label, drawn) for label, drawn in columns if set(drawn) & set(last)]
    if not columns:
        return None
    rows = [
        {
            "id": readable(task),
            "prompt": question(last[task].prompt),
            "cells": [_cell(drawn.get(task)) for _, drawn in columns],
        }
        for task in list(last)[:GRID_PROMPTS]
    ]
    note = f"The first {len(rows)} of the {len(last)} prompts kept from the evaluations, not selected"
    if any(group.correct is not None for group in last.values()):  # pictures of what was done, not drawn by the model
        title, note = "The same held-out tasks in pictures", f"{note}."
    else:
        title = "Images of the same prompts and seeds"
        note += "; a run draws them from the same seeds every time. The reward is the mean of the images shown."
    return {"title": title, "note": note, "columns": [label for label, _ in columns], "rows": rows}


def save_image_grid(runs: Sequence[tuple[str, Path]], path: Path) -> Path | None:
    """Write the images before and after as one PNG: a row a prompt, the images of each evaluation side by side."""
    from matplotlib.figure import Figure

    columns = [(label, _drawn(groups)) for label, groups in evaluation_columns(runs)]
    prompts = list(columns[-1][1])[:FILE_PROMPTS] if columns else []
    columns = [(label, drawn) for label, drawn in columns if set(drawn) & set(prompts)]
    if not columns:
        return None
    width, height = len(columns) * GRID_IMAGES + 1, len(prompts)
    figure = Figure(figsize=(FILE_IMAGE_INCHES * (width + 1.2), FILE_IMAGE_INCHES * height + 0.6), layout="constrained")
    sides: Any = figure.subfigures(1, len(columns) + 1, width_ratios=[2.2, *[GRID_IMAGES] * len(columns)])
    for side, (label, drawn) in zip(sides[1:], columns, strict=True):
        side.suptitle(_title(label, [drawn[task] for task in prompts if task in drawn]), fontsize=9)
        for axes, task in zip(side.subplots(height, GRID_IMAGES, squeeze=False), prompts, strict=True):
            _show(axes, drawn.get(task))
    sides[0].suptitle(" ", fontsize=9)
    for axes, task in zip(sides[0].subplots(height, 1, squeeze=False)[:, 0], prompts, strict=True):
        axes.axis("off")
        axes.text(1, 0.5, question(columns[-1][1][task].prompt), ha="right", va="center", fontsize=8, wrap=True)
    save_png(figure, path)
    return path


def _title(label: str, records: Sequence[SampleRecord]) -> str:
    rewards = [record.reward for record in records if record.reward is not None]
    return f"{label}\nmean reward shown {show_number(sum(rewards) / len(rewards))}" if rewards else label


def _show(row: Sequence[Axes], record: SampleRecord | None) -> None:
    images = [] if record is None else record.outputs[: len(row)]
    for axes, image in itertools.zip_longest(row, images):
        axes.axis("off")
        if image is not None:
            axes.imshow(image)


def _drawn(groups: dict[str, list[SampleRecord]]) -> dict[str, SampleRecord]:
    return {task: group[0] for task, group in groups.items() if group[0].outputs}


def _cell(record: SampleRecord | None) -> dict[str, Any] | None:
    if record is None:
        return None
    reward = None if record.reward is None else f"reward {show_number(record.reward)}"
    terms = [f"{term} {show_number(value)}" for term, value in record.terms.items()]
    return {
        "images": [picture(image) for image in record.outputs[:GRID_IMAGES]],
        "reward": reward,
        "terms": ", ".join(terms),
        "response": None if record.correct is None else record.response,
    }
