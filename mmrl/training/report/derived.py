"""Totals of a run computed from its metrics: cost, change of the reward, samples lost to errors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mmrl.training.record.stopwatch import STAGES, STAGES_BETWEEN

Row = tuple[str, str, str]


def derived_numbers(metrics: Sequence[Mapping[str, Any]], result: Mapping[str, Any]) -> list[Row]:
    """Rows of the report's table."""
    rows: list[Row] = []
    for derive in (_rewards, _amounts, _speed, _losses):
        rows += derive(metrics, result)
    return rows


def stage_shares(metrics: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Share of the run's seconds by stage, the largest first."""
    seconds = {stage: _total(metrics, f"time/{stage}") for stage in (*STAGES, *STAGES_BETWEEN)}
    between = sum(seconds[stage] for stage in STAGES_BETWEEN)
    total = max(_total(metrics, "time/step") + between, sum(seconds.values()))
    if total <= 0:
        return {}
    seconds["other"] = total - sum(seconds.values())
    shares = {stage: value / total for stage, value in seconds.items() if value / total >= 0.0005}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def _rewards(metrics: Sequence[Mapping[str, Any]], result: Mapping[str, Any]) -> list[Row]:
    steps, values = _finite(metrics, "reward/mean")
    if not values:
        return []
    window = max(1, min(10, len(values) // 5))
    start, end = float(np.mean(values[:window])), float(np.mean(values[-window:]))
    best = int(np.argmax(values))
    first, last = (f"{end} step" if window == 1 else f"mean of the {end} {window} steps" for end in ENDS)
    rows = [
        ("reward at the start", _show(start), first),
        ("reward at the end", _show(end), f"{last}, {end - start:+.3g} against the start"),
        ("best reward", _show(values[best]), f"step {steps[best]:g}"),
    ]
    flat = _finite(metrics, "reward/zero_variance_groups")[1]
    if flat:
        share = f"{100 * float(np.mean(flat)):.1f} %"
        rows.append(("groups with equal rewards", share, "mean over steps; their group-relative advantages are 0"))
    return rows


def _amounts(metrics: Sequence[Mapping[str, Any]], result: Mapping[str, Any]) -> list[Row]:
    rows: list[Row] = []
    steps = result.get("steps") or (metrics[-1]["step"] if metrics else None)
    if steps is not None:
        optimiser = result.get("optimiser_steps")
        remark = "" if optimiser is None else f"{optimiser:,} optimiser steps"
        if waited := result.get("optimiser_steps_without_gradient"):
            remark += f", {waited:,} more left out, where no group had a gradient"
        rows.append(("steps", f"{steps:,}", remark))
    for key, name in (("samples", "samples/total"), ("tokens", "tokens/total")):
        values = _finite(metrics, name)[1]
        amount = result.get(key) or (values[-1] if values else None)
        if amount is not None:
            rows.append((key, f"{amount:,.0f}", ""))
    epochs = _finite(metrics, "data/epoch")[1]
    if epochs:
        rows.append(("passes over the tasks", _show(epochs[-1]), ""))
    return rows


def _speed(metrics: Sequence[Mapping[str, Any]], result: Mapping[str, Any]) -> list[Row]:
    seconds = _total(metrics, "time/step")
    if seconds <= 0:
        return []
    rows = [("time of all steps", _duration(seconds), f"{seconds / len(metrics):.3g} s a step")]
    tokens = _finite(metrics, "tokens/total")[1]
    if tokens:
        rows.append(("tokens per second", f"{tokens[-1] / seconds:,.0f}", "without evaluation and checkpoints"))
    shares = [f"{stage} {100 * share:.1f} %" for stage, share in stage_shares(metrics).items()]
    if shares:
        rows.append(("time by stage", shares[0], ", ".join(shares[1:])))
    return rows


def _losses(metrics: Sequence[Mapping[str, Any]], result: Mapping[str, Any]) -> list[Row]:
    rows: list[Row] = []
    for label, name, cumulative, remark in LOSSES:
        values = _finite(metrics, name)[1]
        if values:
            count = max(values) if cumulative else sum(values)
            rows.append((label, f"{count:,.0f}", remark if count else ""))
    return rows


def _finite(metrics: Sequence[Mapping[str, Any]], name: str) -> tuple[list[float], list[float]]:
    pairs = [(record["step"], record[name]) for record in metrics if math.isfinite(record.get(name, math.nan))]
    return [step for step, _ in pairs], [value for _, value in pairs]


def _total(metrics: Sequence[Mapping[str, Any]], name: str) -> float:
    return float(sum(_finite(metrics, name)[1]))


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def _show(value: float) -> str:
    return f"{value:.4g}"


ENDS = ("first", "last")
LOSSES = (
    ("samples no reward could score", "reward/errors", False, "left out of the update"),
    ("rows skipped", "data/skipped", True, "bad rows, unreadable images, prompts too long"),
    (
        "optimiser steps skipped",
        "optim/skipped",
        True,
        "not finite; batches are in failures/",
    ),
    ("checkpoints that failed", "checkpoint/failed", True, "e.g. the disk was full"),
)
