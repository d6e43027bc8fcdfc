"""Images that a model drew for the same held-out prompts and seeds, evaluation by evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmrl.training.record.samples import SampleRecord
from mmrl.training.report.gallery import evaluation_columns, picture, question, readable, show_number

__all__ = ["image_grid"]

GRID_PROMPTS = 12
GRID_IMAGES = 4
GRID_DURING = 2


def image_grid(runs: Sequence[tuple[str, Path]]) -> dict[str, Any] | None:
    """A row a prompt, a column an evaluation, in each cell the images of the same seeds.

    Args:
        runs: (name, folder) of each run, the first one first; each shows its first evaluation, the last run also two
            evaluations during training and its last one.

    Returns:
        `note`, `columns` and `rows` with `prompt` and `cells`; None where the last evaluation kept no images.
        Evaluations that share no prompt with the last one are left out.
    """
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
    note = (
        f"The first {len(rows)} of the {len(last)} prompts kept from the evaluations, not selected; "
        "a run draws them from the same seeds every time. The reward is the mean of the images shown."
    )
    return {"note": note, "columns": [label for label, _ in columns], "rows": rows}


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
    }
