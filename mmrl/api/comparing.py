"""`mmrl.compare`: methods against each other on the same seeds, from Python objects."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmrl.api.inputs import absolute
from mmrl.api.result import Run, Table, evaluation_rows
from mmrl.api.rows import reusable
from mmrl.api.training import RUNS, _filled, _inputs, train
from mmrl.errors import UserError, did_you_mean
from mmrl.runs.folder import FINISHED, has_begun
from mmrl.runs.tracking import read_evaluations
from mmrl.workers import given

LOGGER = logging.getLogger("mmrl")
INPUTS = ("method", "model", "data", "eval_data", "reward", "env", "steps", "options")
"""Arguments of `train` that `_inputs` takes one by one; all others are options."""


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

    Finished runs are kept, so that a call that was interrupted goes on; runs of other settings are refused. The
    learning rate of each arm is the caller's choice: tune each by the same sweep before, on other held-out rows;
    `mmrl compare` does that from a file.

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
        UserError: an arm is wrong, has no such metric, or its folder has a run of other settings.
    """
    from mmrl.runs.statistics import paired_difference, verdict
    from mmrl.training.run import read_result

    names = list(arms)
    if not names:
        raise UserError("arms is empty; pass methods to compare, such as {'grpo': {}, 'dapo': {}}")
    baseline = baseline or names[0]
    if baseline not in arms:
        raise UserError(f"baseline '{baseline}' is not an arm; {did_you_mean(baseline, names)}arms: {', '.join(names)}")
    if not margin > 0:
        raise UserError(f"margin is {margin}; pass the smallest difference that matters, such as 0.02 for 2 points")
    chosen = list(range(1, seeds + 1)) if isinstance(seeds, int) else list(seeds)
    if not chosen or len(set(chosen)) < len(chosen):
        raise UserError(f"seeds is {seeds}; pass a positive number of seeds, or different seeds")
    common |= {name: reusable(common[name]) for name in ("data", "eval_data") if name in common}
    arguments = {name: _arguments(name, own, common) for name, own in arms.items()}
    folder = absolute(output_dir if output_dir is not None else RUNS / "compare")
    values: dict[str, list[float]] = {name: [] for name in names}
    for seed in chosen:
        for name in names:
            place = folder / name / f"seed-{seed}"
            asked = arguments[name] | {"seed": seed}
            if has_begun(place):
                _check_settings(place, asked)
            if read_result(place).get("status") in FINISHED:
                run = Run(place)
            else:
                run = train(**asked | {"output_dir": place, "resume": (place / "config.yaml").is_file()})
            # the first run decides for all
            metric, value = _last_value(run, metric, name)
            values[name].append(value)
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


def _arguments(arm: str, own: Mapping[str, Any], common: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `train` for one arm, whose own come before the common ones, option by option."""
    from mmrl.training.run import flat_settings

    found = {"method": arm, **common, **own}
    if not isinstance(found.get("model") or "", str | Path | Mapping):
        raise UserError("model is an object, which the first run would train for all others; pass its folder or hub id")
    shared = flat_settings(common.get("options") or {})
    for option in shared:
        if option.rpartition(".")[2] in own:
            name = option.rpartition(".")[2]
            raise UserError(
                f"arm {arm} sets {name}, but `options` of all arms set {option}; pass it in the arm's `options`"
            )
    return found | {"options": shared | flat_settings(own.get("options") or {})}


def _check_settings(place: Path, asked: Mapping[str, Any]) -> None:
    """Refuse a run that was made with other settings, rows or functions than are asked for now."""
    from omegaconf import OmegaConf

    from mmrl.config import load_omega, to_container
    from mmrl.training.run import changed_settings, flat_settings, listed_changes

    settings = dict(asked)
    method, model, data, eval_data, reward, env, steps, options = (settings.pop(name, None) for name in INPUTS)
    inputs = _inputs(method, place, True, model, data, eval_data, reward, env, steps, options, settings)
    with given.having(inputs.objects):
        changed = changed_settings(place, _filled(inputs))
    stored: Any = OmegaConf.to_container(load_omega(place / "config.yaml"))
    known, default = flat_settings(stored), flat_settings(to_container(inputs.entry.default_config()))
    # options that have come with a newer version have changed nothing at their defaults
    changed = {key: pair for key, pair in changed.items() if key in known or pair[1] != default.get(key, pair)}
    if changed:
        raise UserError(
            f"{place} was made with other settings: {listed_changes(changed)}; choose another output_dir, or delete it"
        )


def _last_value(run: Run, metric: str, arm: str) -> tuple[str, float]:
    """A metric, by default the first, and its value in a run's last evaluation of its first split."""
    # a later `evaluate` is not part of the run
    rows = evaluation_rows(row for row in read_evaluations(run.folder) if row.get("tag") != "evaluate")
    if not rows:
        raise UserError(f"arm {arm} has no evaluation; pass eval_data")
    split, step = rows[0]["split"], max(row["step"] for row in rows)
    last = {row["metric"]: row["value"] for row in rows if row["split"] == split and row["step"] == step}
    name = metric or next(iter(last))
    if name not in last or last[name] is None or not math.isfinite(last[name]):
        raise UserError(f"arm {arm} has no {name} at step {step}; {did_you_mean(name, last)}metrics: {', '.join(last)}")
    return name, float(last[name])
