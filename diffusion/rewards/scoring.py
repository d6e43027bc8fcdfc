"""The rewards of a run, optimised and held out, on batches of images of which some may be missing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from diffusion.data.prompts import DiffusionTask, columns_of
from diffusion.rewards.table import load_image_rewards
from mmrl.rewards import RewardConfig, RewardResult, RewardSum


def load_rewards(rewards: Sequence[RewardConfig], heldout_rewards: Sequence[RewardConfig]) -> RewardSum:
    """Load all terms as one sum in which the held-out rewards have no weight."""
    terms = [*rewards, *(dataclasses.replace(reward, weight=0.0) for reward in heldout_rewards)]
    functions: dict[str, Any] = {}
    for term in terms:
        name = term.function or term.name
        if ":" not in name:
            load_image_rewards([name], {name: term.options})  # wrong options and missing weights show before the run
            functions |= load_image_rewards([name])
    return RewardSum(terms, functions=functions)


def score_images(
    rewards: RewardSum, tasks: Sequence[DiffusionTask], images: np.ndarray, finite: Sequence[bool]
) -> RewardResult:
    """Score images uint8 (B, height, width, 3) with all rewards, optimised and held out.

    Rows that are not `finite` have no image and fail every term.
    """
    rows = [row for row, good in enumerate(finite) if good]
    kept = [tasks[row] for row in rows]
    # the columns of all tasks: a reward's column does not go missing because no row with an image has it
    columns = {name: [task.columns.get(name) for task in kept] for name in columns_of(tasks)}
    found = rewards.score([task.prompt for task in kept], [images[row] for row in rows], columns)
    return _with_missing(found, rows, len(finite))


def _with_missing(found: RewardResult, rows: Sequence[int], total: int) -> RewardResult:
    """Results of some rows as results of all: NaN, and counted, where there was no image."""
    place = {row: number for number, row in enumerate(rows)}

    def fill(values: Sequence[float]) -> list[float]:
        return [values[place[row]] if row in place else float("nan") for row in range(total)]

    missing = total - len(rows)
    errors = found.errors | ({"latents/overflow": missing} if missing else {})
    examples = found.examples | ({"latents/overflow": "the latents are not finite"} if missing else {})
    terms = {name: fill(values) for name, values in found.terms.items()}
    return RewardResult(fill(found.total), terms, errors, examples, found.traces)
