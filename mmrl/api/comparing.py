"""`mmrl.compare`: methods against each other on the same seeds, from Python objects."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmrl.api.inputs import absolute
from mmrl.api.result import Run, Table
from mmrl.api.training import RUNS, train
from mmrl.errors import UserError, did_you_mean
from mmrl.runs.folder import FINISHED

LOGGER = logging.getLogger("mmrl")


def compare(
    arms: Mapping[str, Mapping[str, Any]],
    *,
    seeds: int | Sequence[int] = 8,
    margin: float,
    metric: str = "",
    baseline: str = "",
    output_dir: str | Path | None = None,
    **common: Any,
) -> Table:
    """Train several arms on the same seeds and compare their last evaluations, paired by seed.

        compare({"grpo": {}, "dapo": {}}, margin=0.02, model="smollm2", data=rows, reward=score, eval_data=held_out)

    Finished runs are kept, so that a call that was interrupted goes on. The learning rate of each arm is the caller's
    choice: tune each by the same sweep before, on other held-out rows; `mmrl compare` does that from a file.

    Args:
        arms: arguments of `train` by the name of the arm; `method` is the name where it is left out.
        seeds: a number of seeds, counted from 1, or the seeds.
        margin: smallest difference that matters, stated before the runs; in the unit of the metric, 0.02 is 2 points.
        metric: of the first held-out split; by default the first accuracy, success or score.
        baseline: arm that the others are compared with; by default the first.
        output_dir: folder of the runs, ARM/seed-N; by default runs/compare.
        **common: arguments of `train` that all arms share.

    Returns:
        A row for each arm: mean, and against the baseline the mean difference with its 95% interval over seeds (low,
        high), the number of seeds with a higher value (wins) and the verdict.

    Raises:
        UserError: an arm is wrong, or has no such metric.
    """
    from mmrl.runs.statistics import paired_difference, verdict
    from mmrl.training.run import read_result

    names = list(arms)
    baseline = baseline or names[0]
    if baseline not in arms:
        raise UserError(f"baseline '{baseline}' is not an arm; {did_you_mean(baseline, names)}arms: {', '.join(names)}")
    if not margin > 0:
        raise UserError(f"margin is {margin}; pass the smallest difference that matters, such as 0.02 for 2 points")
    chosen = list(range(1, seeds + 1)) if isinstance(seeds, int) else list(seeds)
    folder = absolute(output_dir if output_dir is not None else RUNS / "compare")
    values: dict[str, list[float]] = {name: [] for name in names}
    for seed in chosen:
        for name, own in arms.items():
            place = folder / name / f"seed-{seed}"
            if read_result(place).get("status") in FINISHED:
                run = Run(place)
            else:
                resume = (place / "config.yaml").is_file()
                run = train(**{"method": name, **common, **own, "seed": seed, "output_dir": place, "resume": resume})
            values[name].append(_last_value(run, metric, name))
            LOGGER.info("%s, seed %d: %.4g", name, seed, values[name][-1])
    rows = Table()
    for name in names:
        row: dict[str, Any] = {"arm": name, "mean": sum(values[name]) / len(chosen), "seeds": len(chosen)}
        if name != baseline:
            found = paired_difference(values[name], values[baseline])
            judged = verdict(found.low, found.high, margin) if len(chosen) > 1 else "inconclusive"
            row |= {
                "difference": found.mean,
                "low": found.low,
                "high": found.high,
                "wins": found.wins,
                "verdict": judged,
            }
        rows.append(row)
    return rows


def _last_value(run: Run, metric: str, arm: str) -> float:
    """Value of a metric in a run's last evaluation of its first split."""
    rows = run.evaluation
    if not rows:
        raise UserError(f"arm {arm} has no evaluation; pass eval_data")
    split, step = rows[0]["split"], max(row["step"] for row in rows)
    last = {row["metric"]: row["value"] for row in rows if row["split"] == split and row["step"] == step}
    name = metric or next(iter(last))
    if name not in last or last[name] is None or not math.isfinite(last[name]):
        raise UserError(f"arm {arm} has no {name} at step {step}; {did_you_mean(name, last)}metrics: {', '.join(last)}")
    return float(last[name])
