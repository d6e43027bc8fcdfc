"""What an experiment's finished runs say: values by seed, paired differences, work, the sweep, what is missing.

Work is read from the curve of a metric over what a run had spent at each evaluation. A seed on which an arm never
reaches the target still bounds the ratio of costs: it would have needed more than it spent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mmrl.training.compare.experiment import BASELINE_FINAL, ExperimentConfig, RunPlan, plan_arm_run
from mmrl.training.compare.run_status import failure_of, is_finished
from mmrl.training.record.statistics import (
    first_reach,
    mean_interval,
    paired_difference,
    ratio_bounds,
    ratio_interval,
    value_at,
)
from mmrl.training.record.tracking import read_evaluations, read_metrics

__all__ = ["chosen_values", "draw", "plan_comparison", "plan_sweep", "summarise", "sweep_table"]


class Curve(NamedTuple):
    """A run's metric at its evaluations and what it had spent by then."""

    values: list[float]
    """Metric at each evaluation; NaN where it is no number."""
    costs: dict[str, list[float]]
    """Cost by name at each evaluation, in its own unit; never falling."""


Curves = Mapping[str, Mapping[int, Curve]]  # arm to seed to curve; runs without one are absent
Bounds = tuple[float, float]


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
        Every seed's value, the means, the paired differences with 95 % intervals and wins, work, values at equal
        cost and collapsed runs where asked for, the whole sweep, and the failed runs.
    """
    plans = plan_comparison(experiment, folder)
    chosen = chosen_values(experiment, folder)
    values = {arm: _values(experiment, by_seed, experiment.metric) for arm, by_seed in plans.items()}
    curves = _curves(experiment, plans)
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
        "differences": _differences(experiment, values, experiment.higher_is_better),
        "work": _work(experiment, curves),
        "at": _at(experiment, curves),
        "collapse": _collapse(experiment, plans),
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
        "overrides": sweep.overrides,
        "metric": metric,
        "chosen": chosen,
        "arms": table,
    }


def chosen_values(experiment: ExperimentConfig, folder: Path) -> dict[str, Any]:
    """Arm to the swept parameter's chosen value; None without a sweep or before any of its runs finished."""
    return sweep_table(experiment, folder).get("chosen") or dict.fromkeys(experiment.arms)


def draw(experiment: ExperimentConfig, folder: Path, summary: Mapping[str, Any]) -> None:
    """Write comparison.png, and work.png where the experiment has costs.

    Args:
        experiment: The experiment.
        folder: Its output folder.
        summary: What `summarise` returned.
    """
    from mmrl.training.report.charts import comparison_figure, save_png, work_figure

    plans = plan_comparison(experiment, folder)
    curves = {}
    for arm, by_seed in plans.items():
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
    if experiment.work is not None:
        found = _curves(experiment, plans)
        by_cost = {
            cost: {arm: [(run.costs[cost], run.values) for run in runs.values()] for arm, runs in found.items()}
            for cost in experiment.work.costs
        }
        targets = [target for target in summary["work"]["targets"].values() if target is not None]
        figure = work_figure(experiment.name, summary["work"]["metric"], by_cost, targets)
        save_png(figure, folder / "work.png")


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
    named = {failure["run"] for failure in failures}
    for arm, by_seed in plans.items():
        for plan in by_seed.values():
            reasons = list(_unreadable(experiment, arm, plan)) if is_finished(plan) else []
            if reasons and plan.label not in named:
                failures.append({"run": plan.label, "reason": "; ".join(reasons)})
    return failures


def _unreadable(experiment: ExperimentConfig, arm: str, plan: RunPlan) -> Iterator[str]:
    """Why a finished run gives no curve, no target or no share of its start value."""
    if experiment.work is not None:
        curve = _curve(experiment, plan)
        if isinstance(curve, str):
            yield curve
        elif arm == experiment.baseline and isinstance(target := _target(experiment, curve), str):
            yield target
    if experiment.collapse is not None and isinstance(share := _kept_share(experiment, plan), str):
        yield share


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


def _differences(
    experiment: ExperimentConfig, values: Mapping[str, Mapping[int, float]], higher_is_better: bool
) -> dict[str, Any]:
    baseline = values[experiment.baseline]
    others = [arm for arm in experiment.arms if arm != experiment.baseline]
    return {arm: _difference(experiment.seeds, values[arm], baseline, higher_is_better) for arm in others}


def _difference(
    seeds: Sequence[int], values: Mapping[int, float], baseline: Mapping[int, float], higher_is_better: bool
) -> dict[str, Any]:
    paired = [seed for seed in seeds if seed in values and seed in baseline]
    per_seed = {seed: values[seed] - baseline[seed] for seed in paired}
    result = {
        "per_seed": per_seed,
        "missing_seeds": [seed for seed in seeds if seed not in paired],
        "ties": list(per_seed.values()).count(0.0),
    }
    if not paired:
        return {**result, "mean": None, "low": None, "high": None, "n": 0, "wins": 0}
    difference = paired_difference([values[s] for s in paired], [baseline[s] for s in paired])
    wins = difference.wins if higher_is_better else sum(x < 0 for x in per_seed.values())
    return {**result, **difference._asdict(), "wins": wins}


def _work_metric(experiment: ExperimentConfig) -> tuple[str, bool]:
    """Metric whose curve is read, and whether a larger value of it is better."""
    assert experiment.work is not None
    own = experiment.work.higher_is_better
    return experiment.work.metric or experiment.metric, experiment.higher_is_better if own is None else own


def _curves(experiment: ExperimentConfig, plans: Mapping[str, Mapping[int, RunPlan]]) -> Curves:
    if experiment.work is None:
        return {arm: {} for arm in plans}
    found: dict[str, dict[int, Curve]] = {arm: {} for arm in plans}
    for arm, by_seed in plans.items():
        for seed, plan in by_seed.items():
            curve = _curve(experiment, plan) if is_finished(plan) else None
            if isinstance(curve, Curve):
                found[arm][seed] = curve
    return found


def _curve(experiment: ExperimentConfig, plan: RunPlan) -> Curve | str:
    """A run's curve, or why it has none."""
    assert experiment.work is not None
    metric, _ = _work_metric(experiment)
    records = _evaluations(experiment, plan)
    known = ", ".join(sorted({name for record in records for name in record}))
    values = [_number(record, metric) for record in records]
    if not any(map(math.isfinite, values)):
        return f"'{metric}' is no number in any of its evaluations, which have: {known}"
    costs = {}
    for name, weights in experiment.work.costs.items():
        for counter in weights:
            spent = [_number(record, counter) for record in records]
            if not all(map(math.isfinite, spent)):
                return f"cost '{name}': '{counter}' is no number in some of its evaluations, which have: {known}"
            if spent != sorted(spent):
                return f"cost '{name}': '{counter}' falls from one evaluation to the next: {spent}"
        costs[name] = [sum(weight * record[counter] for counter, weight in weights.items()) for record in records]
    return Curve(values, costs)


def _number(record: Mapping[str, Any], name: str) -> float:
    value = record.get(name)
    return float(value) if isinstance(value, int | float) else math.nan


def _target(experiment: ExperimentConfig, baseline: Curve) -> float | str:
    """What the arms have to reach at the seed of this run of the baseline, or why it says nothing."""
    assert experiment.work is not None
    if not isinstance(experiment.work.target, str):
        return float(experiment.work.target)
    last = experiment.work.baseline_last
    final = baseline.values[-last:]
    if len(final) < last:
        return f"it has {len(final)} evaluations, `work.baseline_last` asks for the mean of {last}"
    if not all(map(math.isfinite, final)):
        return f"'{_work_metric(experiment)[0]}' is no number in the last {last} evaluations, which set the target"
    return experiment.work.baseline_share * sum(final) / last


def _targets(experiment: ExperimentConfig, curves: Curves) -> dict[int, float]:
    """Seed to target; seeds whose baseline gives none are absent."""
    assert experiment.work is not None
    if experiment.work.target != BASELINE_FINAL:
        return dict.fromkeys(experiment.seeds, float(experiment.work.target))
    found = {seed: _target(experiment, curve) for seed, curve in curves[experiment.baseline].items()}
    return {seed: target for seed, target in found.items() if isinstance(target, float)}


def _work(experiment: ExperimentConfig, curves: Curves) -> dict[str, Any]:
    """What each arm spent until it reached the target, by cost, and the baseline's cost over the arm's."""
    if experiment.work is None:
        return {}
    metric, higher_is_better = _work_metric(experiment)
    targets = _targets(experiment, curves)
    return {
        "metric": metric,
        "higher_is_better": higher_is_better,
        "target": experiment.work.target,
        "baseline_last": experiment.work.baseline_last,
        "baseline_share": experiment.work.baseline_share,
        "baseline_spends": experiment.work.baseline_spends,
        "targets": {seed: targets.get(seed) for seed in experiment.seeds},
        "costs": {name: _cost_table(experiment, name, curves, targets) for name in experiment.work.costs},
    }


def _cost_table(
    experiment: ExperimentConfig, name: str, curves: Curves, targets: Mapping[int, float]
) -> dict[str, Any]:
    assert experiment.work is not None
    sign = 1.0 if _work_metric(experiment)[1] else -1.0
    reach: dict[str, dict[int, Bounds]] = {
        arm: {
            seed: first_reach(curve.costs[name], [sign * value for value in curve.values], sign * targets[seed])
            for seed, curve in by_seed.items()
            if seed in targets
        }
        for arm, by_seed in curves.items()
    }
    baseline = reach[experiment.baseline]
    if experiment.work.baseline_spends == "all":
        ends = {seed: curves[experiment.baseline][seed].costs[name][-1] for seed in baseline}
        baseline = {seed: (end, end) for seed, end in ends.items()}
    return {
        "weights": experiment.work.costs[name],
        "arms": {arm: _reach_fields(experiment.seeds, found) for arm, found in reach.items()},
        "ratios": {
            arm: _ratio(experiment.seeds, found, baseline) for arm, found in reach.items() if arm != experiment.baseline
        },
    }


def _reach_fields(seeds: Sequence[int], reach: Mapping[int, Bounds]) -> dict[str, Any]:
    """What one arm `needed` (at most that, where its first evaluation has the target) or `spent` in vain, by seed."""
    never = [seed for seed in seeds if seed in reach and math.isinf(reach[seed][1])]
    return {
        "needed": {seed: reach[seed][1] if seed in reach and seed not in never else None for seed in seeds},
        "spent": {seed: reach[seed][0] for seed in never},
        "reached": len(reach) - len(never),
        "n": len(reach),
        "never": never,
        "at_first_evaluation": [seed for seed in seeds if seed in reach and reach[seed][0] == 0 and seed not in never],
        "missing_seeds": [seed for seed in seeds if seed not in reach],
    }


def _ratio(seeds: Sequence[int], arm: Mapping[int, Bounds], baseline: Mapping[int, Bounds]) -> dict[str, Any]:
    """Geometric mean of baseline cost / arm cost over the seeds that both have, or what bounds it."""
    bounds = {seed: ratio_bounds(baseline[seed], arm[seed]) for seed in seeds if seed in arm and seed in baseline}
    fields = {
        "per_seed": {seed: list(pair) for seed, pair in bounds.items()},
        "missing_seeds": [seed for seed in seeds if seed not in bounds],
        "never": [seed for seed in bounds if math.isinf(arm[seed][1])],
        "baseline_never": [seed for seed in bounds if math.isinf(baseline[seed][1])],
    }
    if not bounds:
        return {**fields, "ratio": None, "low": None, "high": None, "n": 0, "at_least": 0.0, "at_most": None}
    return {**fields, **ratio_interval(list(bounds.values()))._asdict()}


def _at(experiment: ExperimentConfig, curves: Curves) -> dict[str, Any]:
    """Each arm's value at equal cost, seed by seed, and the paired differences."""
    at = experiment.at
    if at is None:
        return {}
    metric, higher_is_better = _work_metric(experiment)
    costs: dict[int, float] = {}
    for seed in experiment.seeds:
        spent = [by_seed[seed].costs[at.cost][-1] for by_seed in curves.values() if seed in by_seed]
        if spent:
            costs[seed] = min(spent) if isinstance(at.value, str) else float(at.value)
    values: dict[str, dict[int, float]] = {}
    for arm, by_seed in curves.items():
        read = {seed: value_at(curve.costs[at.cost], curve.values, costs[seed]) for seed, curve in by_seed.items()}
        values[arm] = {seed: read[seed] for seed in experiment.seeds if math.isfinite(read.get(seed, math.nan))}
    return {
        "metric": metric,
        "cost": at.cost,
        "value": at.value,
        "costs": {seed: costs.get(seed) for seed in experiment.seeds},
        "arms": {
            arm: {"values": {seed: found.get(seed) for seed in experiment.seeds}, **_mean_fields(found)}
            for arm, found in values.items()
        },
        "differences": _differences(experiment, values, higher_is_better),
    }


def _collapse(experiment: ExperimentConfig, plans: Mapping[str, Mapping[int, RunPlan]]) -> dict[str, Any]:
    """Share of each arm's finished runs that end below the given share of what they started with."""
    if experiment.collapse is None:
        return {}
    arms = {}
    for arm, by_seed in plans.items():
        found = {seed: _kept_share(experiment, plan) for seed, plan in by_seed.items() if is_finished(plan)}
        kept = {seed: share for seed, share in found.items() if isinstance(share, float)}
        collapsed = [seed for seed, share in kept.items() if share < experiment.collapse.below]
        arms[arm] = {
            "kept": {seed: kept.get(seed) for seed in experiment.seeds},
            "collapsed": collapsed,
            "share": len(collapsed) / len(kept) if kept else None,
            "n": len(kept),
            "missing_seeds": [seed for seed in experiment.seeds if seed not in kept],
        }
    return {"metric": experiment.collapse.metric, "below": experiment.collapse.below, "arms": arms}


def _kept_share(experiment: ExperimentConfig, plan: RunPlan) -> float | str:
    """Final value of the watched metric over its value before training, or why there is none."""
    assert experiment.collapse is not None
    metric = experiment.collapse.metric
    records = _evaluations(experiment, plan)
    if not records or records[0]["step"] != 0:
        return "it has no evaluation before training, which `collapse` compares with"
    start, final = (_number(record, metric) for record in (records[0], records[-1]))
    if not math.isfinite(start) or not math.isfinite(final):
        known = ", ".join(sorted(records[-1]))
        return f"'{metric}' is no number in its first or last evaluation, which has: {known}"
    if start <= 0:
        return f"'{metric}' starts at {start:g}, of which a share means nothing; `collapse` needs a positive metric"
    return final / start
