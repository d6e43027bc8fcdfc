"""Values that an experiment reads from a run: the last one, and the metric over the cost at each evaluation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any, NamedTuple

from mmrl.comparison.experiment import ExperimentConfig
from mmrl.comparison.plans import RunPlan, is_finished
from mmrl.errors import did_you_mean
from mmrl.runs.tracking import read_evaluations, read_metrics


class Curve(NamedTuple):
    """A run's metric at its evaluations, or over its steps, and its costs up to each point."""

    values: list[float]
    """Metric at each point; NaN where it is missing."""
    costs: dict[str, list[float]]
    """Cost by name at each point, in its own unit; never decreases."""


Curves = Mapping[str, Mapping[int, Curve]]
"""Arm to seed to curve; runs without one are absent."""


def evaluations(experiment: ExperimentConfig, plan: RunPlan) -> list[dict[str, Any]]:
    """Evaluations of a run on the experiment's task set, in order, under the names of the experiment's metrics."""
    records = _all_evaluations(plan)
    split = experiment.split or (records[0].get("split") if records else None)
    return [record for record in records if record.get("split") == split]


def last_value(experiment: ExperimentConfig, plan: RunPlan, metric: str) -> float | None:
    """A metric at a finished run's last evaluation, or at its first if the arm asks for that.

    A secondary metric may also come from its last step, which an arm that reads the start does not have, or as
    `split/name` from another task set. The compared metric is the mean over the steps if `metric_over` says so.
    """
    if not is_finished(plan):
        return None
    if experiment.metric_over == "steps" and metric == experiment.metric:
        known = [value for row in logged_steps(plan) if math.isfinite(value := number(row, metric))]
        return sum(known) / len(known) if known else None
    sources = [(evaluations(experiment, plan), metric)]
    if metric in experiment.secondary_metrics:
        split, _, name = metric.partition("/")
        sources.append(([record for record in _all_evaluations(plan) if record.get("split") == split], name))
        # the step measured something else than an evaluation that has the metric, but no number at its end
        if plan.reads != "start" and not any(key in record for records, key in sources for record in records):
            sources.append((logged_steps(plan), metric))
    for records, key in sources:
        for record in records[:1] if plan.reads == "start" else records[-1:]:
            if math.isfinite(value := number(record, key)):
                return value
    return None


def last_values(experiment: ExperimentConfig, plans: Mapping[int, RunPlan], metric: str) -> dict[int, float]:
    """Seed to `last_value`; seeds without one are absent."""
    found = {seed: last_value(experiment, plan, metric) for seed, plan in plans.items()}
    return {seed: value for seed, value in found.items() if value is not None}


def start_value(experiment: ExperimentConfig, plan: RunPlan, metric: str) -> float | None:
    """A metric at a run's evaluation before training; None if there is none, or if a mean over steps is compared."""
    if experiment.metric_over == "steps" and metric == experiment.metric:
        return None
    first = evaluations(experiment, plan)[:1]
    found = [number(record, metric) for record in first if record["step"] == 0]
    return found[0] if found and math.isfinite(found[0]) else None


def absent_metrics(experiment: ExperimentConfig, plans: Mapping[str, Mapping[int, RunPlan]]) -> Iterator[str]:
    """Yield a line for each secondary metric that no finished run has, with the closest existing name."""
    finished = [plan for by_seed in plans.values() for plan in by_seed.values() if is_finished(plan)]
    for metric in experiment.secondary_metrics if finished else ():
        if all(last_value(experiment, plan, metric) is None for plan in finished):
            rows = [*evaluations(experiment, finished[0])[-1:], *logged_steps(finished[0])[-1:]]
            names = {f"{row['split']}/{name}" for row in _all_evaluations(finished[0]) for name in row}
            hint = did_you_mean(metric, names.union(*rows))
            yield f"no finished run has the secondary metric '{metric}'; {hint}".rstrip(" ;")


def work_metric(experiment: ExperimentConfig) -> tuple[str, bool]:
    """Metric whose curve is read, and whether larger values are better."""
    assert experiment.work is not None
    own = experiment.work.higher_is_better
    return experiment.work.metric or experiment.metric, experiment.higher_is_better if own is None else own


def sweep_metric(experiment: ExperimentConfig) -> tuple[str, bool]:
    """Metric by which the sweep chooses, and whether larger values are better."""
    assert experiment.sweep is not None
    own = experiment.sweep.higher_is_better
    return experiment.sweep.metric or experiment.metric, experiment.higher_is_better if own is None else own


def read_curves(experiment: ExperimentConfig, plans: Mapping[str, Mapping[int, RunPlan]]) -> Curves:
    """Curves of all finished runs that have one; none if the experiment has no costs.

    An arm that reads the start is the model before training, which the curve of its runs does not show.
    """
    if experiment.work is None:
        return {}
    found: dict[str, dict[int, Curve]] = {arm: {} for arm in plans if experiment.arm(arm).reads == "end"}
    for arm in found:
        for seed, plan in plans[arm].items():
            curve = read_curve(experiment, plan) if is_finished(plan) else None
            if isinstance(curve, Curve):
                found[arm][seed] = curve
    return found


def read_curve(experiment: ExperimentConfig, plan: RunPlan) -> Curve | str:
    """A run's curve, or the reason why it has none."""
    assert experiment.work is not None
    metric, _ = work_metric(experiment)
    over = experiment.work.steps
    records, source = (logged_steps(plan), "steps") if over else (evaluations(experiment, plan), "evaluations")
    if over > len(records):
        return f"work.steps is {over}, but the run logged {len(records)} steps; each point of its curve needs {over}"
    known = ", ".join(sorted({name for record in records for name in record}))
    values = [number(record, metric) for record in records]
    if not any(map(math.isfinite, values)):
        return f"'{metric}' is not a number in any of its {source}, which have: {known}"
    if over:  # means of `over` steps each; NaN where one is no number
        values = [sum(values[end - over : end]) / over for end in range(over, len(values) + 1)]
        records = records[over - 1 :]
    costs = {}
    for name, weights in experiment.work.costs.items():
        for counter in weights:
            spent = [number(record, counter) for record in records]
            if not all(map(math.isfinite, spent)):
                return f"cost '{name}': '{counter}' is not a number in some of its {source}, which have: {known}"
            if spent != sorted(spent):
                return f"cost '{name}': '{counter}' decreases between consecutive {source}: {spent}"
        costs[name] = [sum(weight * record[counter] for counter, weight in weights.items()) for record in records]
    return Curve(values, costs)


def target_of(experiment: ExperimentConfig, baseline: Curve) -> float | str:
    """Target of the arms for the seed of this baseline run, or the reason why there is none."""
    assert experiment.work is not None
    if not isinstance(experiment.work.target, str):
        return float(experiment.work.target)
    last = experiment.work.baseline_last
    final = baseline.values[-last:]
    if len(final) < last:
        return f"its curve has {len(final)} points, but `work.baseline_last` requires the mean of {last}"
    if not all(map(math.isfinite, final)):
        return (
            f"'{work_metric(experiment)[0]}' is not a number in the last {last} points of its curve, which set "
            "the target"
        )
    return experiment.work.baseline_share * sum(final) / last


def kept_share(experiment: ExperimentConfig, plan: RunPlan) -> float | str:
    """Final value of the watched metric divided by its value before training, or the reason why there is none."""
    assert experiment.collapse is not None
    metric = experiment.collapse.metric
    records = evaluations(experiment, plan)
    if not records or records[0]["step"] != 0:
        return "it has no evaluation before training, which `collapse` needs for comparison"
    start, final = (number(record, metric) for record in (records[0], records[-1]))
    if not math.isfinite(start) or not math.isfinite(final):
        known = ", ".join(sorted(records[-1]))
        return f"'{metric}' is not a number in its first or last evaluation, which has: {known}"
    if start <= 0:
        return (
            f"'{metric}' starts at {start:g}, for which a fraction is meaningless; `collapse` needs a positive metric"
        )
    return final / start


def _all_evaluations(plan: RunPlan) -> list[dict[str, Any]]:
    """Evaluations of a run on all task sets, in order."""
    # `mmrl evaluate` appends to the same file later, possibly at an older step: not part of the run
    records = [record for record in read_evaluations(plan.run_dir) if record.get("tag") != "evaluate"]
    return [_renamed(record, plan) for record in records]


def logged_steps(plan: RunPlan) -> list[dict[str, Any]]:
    """Steps of a run, in order, with the counters of their costs, under the names of the experiment's metrics."""
    rows = read_metrics(plan.run_dir)
    seconds = accumulate(number(row, "time/step") for row in rows)
    return [
        _renamed(row, plan) | {"cost/samples": row.get("samples/total"), "cost/seconds": spent}
        for row, spent in zip(rows, seconds, strict=True)
    ]


def _renamed(record: Mapping[str, Any], plan: RunPlan) -> dict[str, Any]:
    # where the run lacks the arm's own metric, what it has under the experiment's name is another one
    kept = {name: value for name, value in record.items() if name not in plan.metrics}
    return kept | {name: record[own] for name, own in plan.metrics.items() if own in record}


def number(record: Mapping[str, Any], name: str) -> float:
    """A number of a record; NaN where it has none."""
    value = record.get(name)
    return float(value) if isinstance(value, int | float) else math.nan
