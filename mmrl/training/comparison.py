"""What an experiment's finished runs say: values by seed, paired differences, the sweep, what is missing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmrl.training.experiment import ExperimentConfig, RunPlan, plan_arm_run
from mmrl.training.ledger import failure_of, is_finished
from mmrl.training.statistics import mean_interval, paired_difference
from mmrl.training.tracking import read_evaluations, read_metrics

__all__ = ["chosen_values", "draw", "plan_comparison", "plan_sweep", "summarise", "sweep_table"]


def plan_sweep(experiment: ExperimentConfig, folder: Path) -> list[RunPlan]:
    """Every run of the sweep, seeds outermost; none without a sweep."""
    sweep = experiment.sweep
    if sweep is None:
        return []
    return [
        plan_arm_run(experiment, folder, arm, seed, value, sweeping=True)
        for seed in sweep.seeds
        for value in sweep.values
        for arm in experiment.arms
    ]


def plan_comparison(experiment: ExperimentConfig, folder: Path) -> dict[str, dict[int, RunPlan]]:
    """Every run of the comparison, arm to seed to plan, with the values that the sweep has chosen so far."""
    chosen = chosen_values(experiment, folder)
    return {
        arm: {seed: plan_arm_run(experiment, folder, arm, seed, chosen[arm]) for seed in experiment.seeds}
        for arm in experiment.arms
    }


def summarise(experiment: ExperimentConfig, folder: Path) -> dict[str, Any]:
    """Content of comparison.json but for its status and commands.

    Args:
        experiment: The experiment.
        folder: Its output folder.

    Returns:
        Every seed's value, the means, the paired differences with 95 % intervals and wins, the whole sweep, and
        the failed runs.
    """
    plans = plan_comparison(experiment, folder)
    chosen = chosen_values(experiment, folder)
    values = {arm: _values(experiment, by_seed, experiment.metric) for arm, by_seed in plans.items()}
    baseline = values[experiment.baseline]
    return {
        "name": experiment.name,
        "budget": experiment.budget,
        "metric": experiment.metric,
        "higher_is_better": experiment.higher_is_better,
        "baseline": experiment.baseline,
        "seeds": experiment.seeds,
        "sweep": sweep_table(experiment, folder),
        "arms": {
            arm: {
                "chosen": None if experiment.sweep is None else {experiment.sweep.parameter: chosen[arm]},
                "values": {seed: values[arm].get(seed) for seed in experiment.seeds},
                **_mean_fields(values[arm]),
                "secondary": _secondary(experiment, plans[arm]),
            }
            for arm in experiment.arms
        },
        "differences": {
            arm: _difference(experiment, values[arm], baseline) for arm in experiment.arms if arm != experiment.baseline
        },
        "failures": _failures(experiment, folder, plans),
    }


def sweep_table(experiment: ExperimentConfig, folder: Path) -> dict[str, Any]:
    """Every value's results in every arm, and the value with the best mean.

    Args:
        experiment: The experiment.
        folder: Its output folder.

    Returns:
        `parameter`, `seeds`, `metric`, `chosen` (arm to value, None where nothing finished) and `arms` (arm to
        `rows` and `at_edge`, whether the best value is the smallest or largest tried); empty without a sweep.
    """
    sweep = experiment.sweep
    if sweep is None:
        return {}
    metric = sweep.metric or experiment.metric
    arms = {arm: _sweep_rows(experiment, folder, arm, metric) for arm in experiment.arms}
    sign = 1 if experiment.higher_is_better else -1
    chosen: dict[str, Any] = {}
    table: dict[str, Any] = {}
    for arm, rows in arms.items():
        measured = [row for row in rows if row["mean"] is not None]
        best = max(measured, key=lambda row: sign * row["mean"], default=None)
        chosen[arm] = None if best is None else best["value"]
        table[arm] = {"rows": rows, "at_edge": _at_edge(chosen[arm], sweep.values)}
    return {
        "parameter": sweep.parameter,
        "seeds": sweep.seeds,
        "metric": metric,
        "chosen": chosen,
        "arms": table,
    }


def chosen_values(experiment: ExperimentConfig, folder: Path) -> dict[str, Any]:
    """Arm to the swept parameter's chosen value; None without a sweep or before any of its runs finished."""
    return sweep_table(experiment, folder).get("chosen") or dict.fromkeys(experiment.arms)


def draw(experiment: ExperimentConfig, folder: Path, summary: Mapping[str, Any]) -> None:
    """Write comparison.png.

    Args:
        experiment: The experiment.
        folder: Its output folder.
        summary: What `summarise` returned.
    """
    from mmrl.training.charts import comparison_figure, save_png

    curves = {}
    for arm, by_seed in plan_comparison(experiment, folder).items():
        runs = [_evaluations(experiment, plan) for plan in by_seed.values() if is_finished(plan)]
        curves[arm] = [
            (
                [record["step"] for record in run],
                [record.get(experiment.metric, math.nan) for record in run],
            )
            for run in runs
        ]
    values = {
        arm: {seed: value for seed, value in entry["values"].items() if value is not None}
        for arm, entry in summary["arms"].items()
    }
    figure = comparison_figure(
        experiment.name, experiment.metric, values, experiment.baseline, summary["differences"], curves
    )
    save_png(figure, folder / "comparison.png")


def _sweep_rows(experiment: ExperimentConfig, folder: Path, arm: str, metric: str) -> list[dict[str, Any]]:
    assert experiment.sweep is not None
    rows = []
    for value in experiment.sweep.values:
        plans = {
            seed: plan_arm_run(experiment, folder, arm, seed, value, sweeping=True) for seed in experiment.sweep.seeds
        }
        finished = _values(experiment, plans, metric)
        mean = sum(finished.values()) / len(finished) if finished else None
        rows.append({"value": value, "values": {seed: finished.get(seed) for seed in plans}, "mean": mean})
    return rows


def _at_edge(value: Any, tried: Sequence[Any]) -> bool:
    numbers = [x for x in tried if isinstance(x, int | float)]
    return len(numbers) == len(tried) > 1 and value in (min(numbers), max(numbers))


def _values(experiment: ExperimentConfig, plans: Mapping[int, RunPlan], metric: str) -> dict[int, float]:
    found = {seed: _last_value(experiment, plan, metric) for seed, plan in plans.items()}
    return {seed: value for seed, value in found.items() if value is not None}


def _last_value(experiment: ExperimentConfig, plan: RunPlan, metric: str) -> float | None:
    if not is_finished(plan):
        return None
    sources = _evaluations(experiment, plan)[-1:]
    if metric in experiment.secondary_metrics:
        sources += read_metrics(plan.run_dir)[-1:]
    for record in sources:
        value = record.get(metric)
        if isinstance(value, int | float) and math.isfinite(value):
            return float(value)
    return None


def _evaluations(experiment: ExperimentConfig, plan: RunPlan) -> list[dict[str, Any]]:
    # `mmrl evaluate` appends to the same file later, possibly at an older step: not part of the run
    records = [record for record in read_evaluations(plan.run_dir) if record.get("tag") != "evaluate"]
    split = experiment.split or (records[0].get("split") if records else None)
    return [record for record in records if record.get("split") == split]


def _failures(
    experiment: ExperimentConfig, folder: Path, plans: Mapping[str, Mapping[int, RunPlan]]
) -> list[dict[str, Any]]:
    compared = [plan for by_seed in plans.values() for plan in by_seed.values()]
    failures = []
    for plan in (*plan_sweep(experiment, folder), *compared):
        reason = failure_of(plan)
        if reason is None and is_finished(plan) and _last_value(experiment, plan, experiment.metric) is None:
            known = sorted({name for record in _evaluations(experiment, plan)[-1:] for name in record})
            reason = f"'{experiment.metric}' is no number in its last evaluation, which has: {', '.join(known)}"
        if reason is not None:
            failures.append({"run": plan.label, "reason": reason})
    return failures


def _secondary(experiment: ExperimentConfig, plans: Mapping[int, RunPlan]) -> dict[str, Any]:
    found = {}
    for metric in experiment.secondary_metrics:
        values = _values(experiment, plans, metric)
        found[metric] = {"values": values, **_mean_fields(values)}
    return found


def _mean_fields(values: Mapping[int, float]) -> dict[str, Any]:
    if not values:
        return {"mean": None, "low": None, "high": None, "n": 0}
    return mean_interval(list(values.values()))._asdict()


def _difference(
    experiment: ExperimentConfig, values: Mapping[int, float], baseline: Mapping[int, float]
) -> dict[str, Any]:
    paired = [seed for seed in experiment.seeds if seed in values and seed in baseline]
    per_seed = {seed: values[seed] - baseline[seed] for seed in paired}
    result = {
        "per_seed": per_seed,
        "missing_seeds": [seed for seed in experiment.seeds if seed not in paired],
        "ties": list(per_seed.values()).count(0.0),
    }
    if not paired:
        return {**result, "mean": None, "low": None, "high": None, "n": 0, "wins": 0}
    difference = paired_difference([values[s] for s in paired], [baseline[s] for s in paired])
    wins = difference.wins if experiment.higher_is_better else sum(x < 0 for x in per_seed.values())
    return {**result, **difference._asdict(), "wins": wins}
