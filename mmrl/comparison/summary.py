"""Results of an experiment's finished runs: values by seed, paired differences, work, the sweep, failures.

Work is read from the curve of a metric over what a run had spent at each evaluation. A seed on which an arm never
reaches the target still bounds the ratio of costs: it would have needed more than it spent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmrl.comparison.curves import (
    Curve,
    Curves,
    evaluations,
    kept_share,
    last_value,
    last_values,
    read_curve,
    read_curves,
    start_value,
    sweep_metric,
    target_of,
    work_metric,
)
from mmrl.comparison.experiment import BASELINE_FINAL, ExperimentConfig
from mmrl.comparison.plans import RunPlan, failure_of, is_finished, plan_arm_run, plan_sweep, tuned_arms
from mmrl.comparison.results import (
    ArmResult,
    CollapseArm,
    CollapseResult,
    Comparison,
    CostRatio,
    CostResult,
    Difference,
    EqualCostResult,
    Reach,
    RunFailure,
    SeedValues,
    SweepArm,
    SweepResult,
    SweepRow,
    WorkResult,
)
from mmrl.runs.statistics import (
    first_reach,
    mean_interval,
    paired_difference,
    ratio_bounds,
    ratio_interval,
    value_at,
    verdict,
)

Plans = Mapping[str, Mapping[int, RunPlan]]
Bounds = tuple[float, float]


def plan_comparison(experiment: ExperimentConfig, folder: Path) -> dict[str, dict[int, RunPlan]]:
    """Every run of the comparison (arm to seed to plan), with the values that the sweep has chosen so far."""
    chosen = chosen_values(experiment, folder)
    return {
        arm: {seed: plan_arm_run(experiment, folder, arm, seed, chosen[arm]) for seed in experiment.seeds}
        for arm in experiment.arms
    }


def chosen_values(experiment: ExperimentConfig, folder: Path) -> dict[str, Any]:
    """Arm to the swept parameter's chosen value; None without a sweep or before any of its runs finished."""
    sweep = sweep_result(experiment, folder)
    return dict.fromkeys(experiment.arms) | ({} if sweep is None else sweep.chosen)


def summarise(experiment: ExperimentConfig, folder: Path, status: str = "done", command: str = "") -> Comparison:
    """Results of the finished runs."""
    plans = plan_comparison(experiment, folder)
    values = {arm: last_values(experiment, by_seed, experiment.metric) for arm, by_seed in plans.items()}
    curves = read_curves(experiment, plans)
    return Comparison(
        status=status,
        command=command,
        name=experiment.name,
        budget=experiment.budget,
        metric=experiment.metric,
        higher_is_better=experiment.higher_is_better,
        margin=experiment.margin,
        baseline=experiment.baseline,
        seeds=experiment.seeds,
        sweep=sweep_result(experiment, folder),
        arms=_arms(experiment, folder, plans, values),
        differences=_judged(experiment, _differences(experiment, values, experiment.higher_is_better)),
        work=_work(experiment, curves),
        at=_at_equal_cost(experiment, curves),
        collapse=_collapse(experiment, plans),
        failures=_failures(experiment, folder, plans),
    )


def sweep_result(experiment: ExperimentConfig, folder: Path) -> SweepResult | None:
    """Results of every value in every arm, and the value with the best mean; None without a sweep."""
    sweep = experiment.sweep
    if sweep is None:
        return None
    metric, higher_is_better = sweep_metric(experiment)
    arms = {arm: _sweep_rows(experiment, folder, arm) for arm in tuned_arms(experiment)}
    joint = _mean_rows(arms) if sweep.shared else []
    best = {arm: _best_row(joint or rows, higher_is_better) for arm, rows in arms.items()}
    chosen = {arm: row.value for arm in experiment.arms if (row := best[experiment.tuned(arm)]) is not None}
    return SweepResult(
        parameter=sweep.parameter,
        seeds=sweep.seeds,
        overrides=sweep.overrides,
        metric=metric,
        chosen=chosen,
        # a better value may be outside
        arms={arm: SweepArm(rows, at_edge=_beyond(rows, best[arm]) is not None) for arm, rows in arms.items()},
    )


def sweep_values(experiment: ExperimentConfig, folder: Path) -> dict[str, list[Any]]:
    """Values that each arm tries, as far as known from its finished runs; empty without a sweep."""
    found = sweep_result(experiment, folder)
    if found is None:
        return {}
    values = {}
    for arm, tried in found.arms.items():
        added = sweep_next(experiment, tried)
        values[arm] = [row.value for row in tried.rows] + ([] if added is None else [added[0]])
    return values


def sweep_next(experiment: ExperimentConfig, tried: SweepArm) -> tuple[Any, str] | None:
    """The value that an arm's sweep adds to those that it has tried, with the reason; None if there is none."""
    sweep, rows = experiment.sweep, tried.rows
    assert sweep is not None
    # an edge is one only when every value that was tried has its runs
    unfinished = any(value is None for row in rows for value in row.values.values())
    if unfinished or len(rows) - len(sweep.values) >= sweep.extend:
        return None
    best = _best_row(rows, sweep_metric(experiment)[1])
    value, reason = _beyond(rows, best), "since the best value is at the edge"
    # a smaller rate changes the model less; smaller values of other options need not
    if value is None and below_start(experiment, best) and sweep.parameter.endswith("learning_rate"):
        value = _beyond(rows, min(rows, key=lambda row: row.value))
        reason = "since no value ends better than the start"
    # whole numbers end at 1
    return None if value is None or any(value == row.value for row in rows) else (value, reason)


def below_start(experiment: ExperimentConfig, row: SweepRow | None) -> bool:
    """Whether runs with a value of the sweep are known to end worse than their model was before training."""
    if row is None or row.mean is None or row.start is None:
        return False
    return row.mean < row.start if sweep_metric(experiment)[1] else row.mean > row.start


def _beyond(rows: Sequence[SweepRow], best: SweepRow | None) -> float | None:
    """Where the sweep would go on beyond a value at its edge; None for values inside, and for other than numbers."""
    if best is None or len(rows) < 2 or not all(type(row.value) in (int, float) for row in rows):
        return None
    numbers = sorted(row.value for row in rows)
    for edge, inner in ((numbers[0], numbers[1]), (numbers[-1], numbers[-2])):
        if best.value == edge:
            # as far as from the one before
            beyond = edge * edge / inner if inner else edge
            whole = all(isinstance(value, int) for value in numbers)
            # short, since it names a folder
            return max(1, round(beyond)) if whole else float(f"{beyond:.4g}")
    return None


def _sweep_rows(experiment: ExperimentConfig, folder: Path, arm: str) -> list[SweepRow]:
    """The file's values, and those beyond them of which a run has finished."""
    assert experiment.sweep is not None
    rows = [_sweep_row(experiment, folder, arm, value) for value in experiment.sweep.values]
    while (added := sweep_next(experiment, SweepArm(rows, at_edge=False))) is not None:
        row = _sweep_row(experiment, folder, arm, added[0])
        if row.mean is None:
            break
        rows.append(row)
    return rows


def _sweep_row(experiment: ExperimentConfig, folder: Path, arm: str, value: Any) -> SweepRow:
    assert experiment.sweep is not None
    seeds = experiment.sweep.seeds
    plans = {seed: plan_arm_run(experiment, folder, arm, seed, value, sweeping=True) for seed in seeds}
    metric = sweep_metric(experiment)[0]
    finished = last_values(experiment, plans, metric)
    starts = [start_value(experiment, plans[seed], metric) for seed in finished]
    # over the finished seeds; the table shows which are missing
    mean = sum(finished.values()) / len(finished) if finished else None
    known = [start for start in starts if start is not None]
    start = sum(known) / len(known) if known and len(known) == len(starts) else None
    return SweepRow(value, {seed: finished.get(seed) for seed in plans}, mean, start)


def _mean_rows(arms: Mapping[str, list[SweepRow]]) -> list[SweepRow]:
    """Mean over arms of each value's mean over seeds; None unless every arm has all of its seeds."""
    found = []
    for rows in zip(*arms.values(), strict=True):
        values = [list(row.values.values()) for row in rows]
        # a mean over fewer runs would favour the value whose bad runs failed
        whole = all(value is not None for own in values for value in own)
        mean = sum(row.mean or 0.0 for row in rows) / len(rows) if whole else None
        found.append(SweepRow(rows[0].value, {}, mean))
    return found


def _best_row(rows: Sequence[SweepRow], higher_is_better: bool) -> SweepRow | None:
    """Value with the best mean, the first one in case of ties; None if nothing finished.

    Values without some of their seeds only count if all are: seeds differ, and high rates fail on bad ones.
    """
    finished = [row for row in rows if row.mean is not None]
    whole = [row for row in finished if None not in row.values.values()]
    sign = 1 if higher_is_better else -1
    return max(whole or finished, key=lambda row: sign * (row.mean or 0.0), default=None)


def _arms(
    experiment: ExperimentConfig, folder: Path, plans: Plans, values: Mapping[str, Mapping[int, float]]
) -> dict[str, ArmResult]:
    chosen = chosen_values(experiment, folder)
    parameter = None if experiment.sweep is None else experiment.sweep.parameter
    found = {}
    for arm in experiment.arms:
        own = _seed_values({seed: values[arm].get(seed) for seed in experiment.seeds}, values[arm])
        secondary = {}
        for metric in experiment.secondary_metrics:
            measured = last_values(experiment, plans[arm], metric)
            secondary[metric] = _seed_values(dict(measured), measured)
        value = None if parameter is None else {parameter: chosen[arm]}
        found[arm] = ArmResult(**vars(own), chosen=value, secondary=secondary)
    return found


def _seed_values(shown: dict[int, float | None], measured: Mapping[int, float]) -> SeedValues:
    if not measured:
        return SeedValues(shown)
    return SeedValues(shown, **mean_interval(list(measured.values()))._asdict())


def _differences(
    experiment: ExperimentConfig, values: Mapping[str, Mapping[int, float]], higher_is_better: bool
) -> dict[str, Difference]:
    baseline = values[experiment.baseline]
    others = [arm for arm in values if arm != experiment.baseline]
    return {arm: _difference(experiment.seeds, values[arm], baseline, higher_is_better) for arm in others}


def _judged(experiment: ExperimentConfig, differences: dict[str, Difference]) -> dict[str, Difference]:
    """The differences with their verdicts, where the experiment has stated a margin."""
    if experiment.margin is None:
        return differences
    judged = {}
    for arm, found in differences.items():
        if found.low is not None and found.high is not None:
            ends = (found.low, found.high) if experiment.higher_is_better else (-found.high, -found.low)
            found = replace(found, verdict=verdict(*ends, experiment.margin))
        judged[arm] = found
    return judged


def _difference(
    seeds: Sequence[int], values: Mapping[int, float], baseline: Mapping[int, float], higher_is_better: bool
) -> Difference:
    # only seeds that both have: a difference of means over other seeds would compare seeds
    paired = [seed for seed in seeds if seed in values and seed in baseline]
    per_seed = {seed: values[seed] - baseline[seed] for seed in paired}
    missing = [seed for seed in seeds if seed not in paired]
    result = Difference(per_seed, missing, ties=list(per_seed.values()).count(0.0))
    if not paired:
        return result
    found = paired_difference([values[s] for s in paired], [baseline[s] for s in paired])
    # a tie is no win for anybody
    wins = found.wins if higher_is_better else sum(x < 0 for x in per_seed.values())
    return replace(result, **found._asdict() | {"wins": wins})


def _work(experiment: ExperimentConfig, curves: Curves) -> WorkResult | None:
    """Cost of each arm until it reached the target, and the baseline's cost over the arm's."""
    work = experiment.work
    if work is None:
        return None
    metric, higher_is_better = work_metric(experiment)
    targets = _targets(experiment, curves)
    return WorkResult(
        metric=metric,
        higher_is_better=higher_is_better,
        target=work.target,
        baseline_last=work.baseline_last,
        baseline_share=work.baseline_share,
        baseline_spends=work.baseline_spends,
        targets={seed: targets.get(seed) for seed in experiment.seeds},
        costs={name: _cost(experiment, name, curves, targets) for name in work.costs},
    )


def _targets(experiment: ExperimentConfig, curves: Curves) -> dict[int, float]:
    """Seed to target; seeds whose baseline gives none are absent."""
    assert experiment.work is not None
    if experiment.work.target != BASELINE_FINAL:
        return dict.fromkeys(experiment.seeds, float(experiment.work.target))
    found = {seed: target_of(experiment, curve) for seed, curve in curves[experiment.baseline].items()}
    # a target that cannot be read is a text with the reason
    return {seed: target for seed, target in found.items() if isinstance(target, float)}


def _cost(experiment: ExperimentConfig, name: str, curves: Curves, targets: Mapping[int, float]) -> CostResult:
    assert experiment.work is not None
    # turned around if less is better, so that reaching is always from below
    sign = 1.0 if work_metric(experiment)[1] else -1.0
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
        # all of the run: what the baseline spent in any case
        baseline = {seed: (end, end) for seed, end in ends.items()}
    return CostResult(
        weights=experiment.work.costs[name],
        arms={arm: _reach(experiment.seeds, found) for arm, found in reach.items()},
        ratios={
            arm: _ratio(experiment.seeds, found, baseline) for arm, found in reach.items() if arm != experiment.baseline
        },
    )


def _reach(seeds: Sequence[int], reach: Mapping[int, Bounds]) -> Reach:
    never = [seed for seed in seeds if seed in reach and math.isinf(reach[seed][1])]
    return Reach(
        needed={seed: reach[seed][1] if seed in reach and seed not in never else None for seed in seeds},
        spent={seed: reach[seed][0] for seed in never},
        reached=len(reach) - len(never),
        n=len(reach),
        # on these seeds what was spent is a lower bound
        never=never,
        at_first_evaluation=[seed for seed in seeds if seed in reach and reach[seed][0] == 0 and seed not in never],
        missing_seeds=[seed for seed in seeds if seed not in reach],
    )


def _ratio(seeds: Sequence[int], arm: Mapping[int, Bounds], baseline: Mapping[int, Bounds]) -> CostRatio:
    bounds = {seed: ratio_bounds(baseline[seed], arm[seed]) for seed in seeds if seed in arm and seed in baseline}
    return CostRatio(
        per_seed={seed: list(pair) for seed, pair in bounds.items()},
        missing_seeds=[seed for seed in seeds if seed not in bounds],
        never=[seed for seed in bounds if math.isinf(arm[seed][1])],
        baseline_never=[seed for seed in bounds if math.isinf(baseline[seed][1])],
        **(ratio_interval(list(bounds.values()))._asdict() if bounds else {}),
    )


def _at_equal_cost(experiment: ExperimentConfig, curves: Curves) -> EqualCostResult | None:
    """Each arm's value at equal cost, seed by seed, and the paired differences."""
    at = experiment.at
    if at is None:
        return None
    metric, higher_is_better = work_metric(experiment)
    costs = _equal_costs(experiment, curves)
    values: dict[str, dict[int, float]] = {}
    for arm, by_seed in curves.items():
        # between two evaluations on a straight line
        read = {seed: value_at(curve.costs[at.cost], curve.values, costs[seed]) for seed, curve in by_seed.items()}
        values[arm] = {seed: read[seed] for seed in experiment.seeds if math.isfinite(read.get(seed, math.nan))}
    return EqualCostResult(
        metric=metric,
        cost=at.cost,
        value=at.value,
        costs={seed: costs.get(seed) for seed in experiment.seeds},
        arms={
            arm: _seed_values({seed: found.get(seed) for seed in experiment.seeds}, found)
            for arm, found in values.items()
        },
        differences=_differences(experiment, values, higher_is_better),
    )


def _equal_costs(experiment: ExperimentConfig, curves: Curves) -> dict[int, float]:
    """Cost at which the curves of a seed are read: the given one, or the least that a finished arm has spent."""
    assert experiment.at is not None
    at, costs = experiment.at, {}
    for seed in experiment.seeds:
        spent = [by_seed[seed].costs[at.cost][-1] for by_seed in curves.values() if seed in by_seed]
        if spent:
            # the least of what finished arms have spent, so that no curve is extended
            costs[seed] = min(spent) if isinstance(at.value, str) else float(at.value)
    return costs


def _collapse(experiment: ExperimentConfig, plans: Plans) -> CollapseResult | None:
    """Fraction of each arm's finished runs that end below the given fraction of their first value."""
    if experiment.collapse is None:
        return None
    arms = {}
    # the model before training has lost nothing
    for arm, by_seed in ((arm, plans[arm]) for arm in plans if experiment.arm(arm).reads == "end"):
        found = {seed: kept_share(experiment, plan) for seed, plan in by_seed.items() if is_finished(plan)}
        kept = {seed: share for seed, share in found.items() if isinstance(share, float)}
        # NaN and texts are seeds whose share is not known
        collapsed = [seed for seed, share in kept.items() if share < experiment.collapse.below]
        arms[arm] = CollapseArm(
            kept={seed: kept.get(seed) for seed in experiment.seeds},
            collapsed=collapsed,
            share=len(collapsed) / len(kept) if kept else None,
            n=len(kept),
            missing_seeds=[seed for seed in experiment.seeds if seed not in kept],
        )
    return CollapseResult(experiment.collapse.metric, experiment.collapse.below, arms)


def _failures(experiment: ExperimentConfig, folder: Path, plans: Plans) -> list[RunFailure]:
    swept = plan_sweep(experiment, folder, sweep_values(experiment, folder))
    required = [(plan, sweep_metric(experiment)[0]) for plan in swept]
    required += [(plan, experiment.metric) for by_seed in plans.values() for plan in by_seed.values()]
    failures = []
    for plan, metric in required:
        reason = failure_of(plan) or _no_value(experiment, plan, metric)
        if reason is not None:
            failures.append(RunFailure(plan.label, reason))
    # one entry a run, with its last reason
    failures = list({failure.run: failure for failure in failures}.values())
    named = {failure.run for failure in failures}
    for arm, by_seed in plans.items():
        for plan in by_seed.values():
            read = plan.reads == "end" and is_finished(plan)
            reasons = list(_unreadable(experiment, arm, plan)) if read else []
            if reasons and plan.label not in named:
                failures.append(RunFailure(plan.label, "; ".join(reasons)))
    return failures


def _no_value(experiment: ExperimentConfig, plan: RunPlan, metric: str) -> str | None:
    """Why a finished run lacks the metric that it is judged by; None if it has it or is not finished."""
    if not is_finished(plan) or last_value(experiment, plan, metric) is not None:
        return None
    own = plan.metrics.get(metric, metric)
    if experiment.metric_over == "steps" and metric == experiment.metric:
        return f"'{own}' is not a number in any of its steps; see {plan.run_dir / 'metrics.jsonl'}"
    # under the names that the run itself uses
    last = evaluations(experiment, replace(plan, metrics={}))[-1:]
    known = sorted({name for record in last for name in record})
    return f"'{own}' is not a number in its last evaluation, which has: {', '.join(known)}"


def _unreadable(experiment: ExperimentConfig, arm: str, plan: RunPlan) -> Iterator[str]:
    """Reasons why a finished run gives no curve, no target or no fraction of its start value."""
    if experiment.work is not None:
        curve = read_curve(experiment, plan)
        if not isinstance(curve, Curve):
            yield curve
        elif arm == experiment.baseline and isinstance(target := target_of(experiment, curve), str):
            yield target
    if experiment.collapse is not None and isinstance(share := kept_share(experiment, plan), str):
        yield share
