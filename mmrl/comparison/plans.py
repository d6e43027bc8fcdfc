"""The runs that an experiment consists of: configuration, overrides and folder of each."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from mmrl.comparison.experiment import ExperimentConfig, dotted_overrides
from mmrl.config import escaped, given_values, load_omega
from mmrl.errors import UserError
from mmrl.files import LARGEST_YAML, read_file, read_json_object, shortened_name, write_atomically
from mmrl.runs.folder import FINISHED, owner_of


@dataclass(frozen=True)
class RunPlan:
    """One run of an experiment."""

    label: str
    """Path of the run folder relative to the output folder."""
    config: Path
    """Configuration file."""
    overrides: tuple[str, ...]
    """Dotted overrides, without the run folder."""
    run_dir: Path
    """Run folder."""
    metrics: Mapping[str, str] = field(default_factory=dict)
    """Names of the experiment's metrics in the run, if they differ."""
    reads: str = "end"
    """Whether its last or its first evaluation is used."""
    after: tuple[RunPlan, ...] = ()
    """Preparations whose results its overrides name."""

    def fingerprint(self) -> dict[str, Any]:
        """Inputs of the run: a changed file, parent file, override or preparation gives another fingerprint."""
        own = {"config_sha256": _digest(self.config), "overrides": _effective(self.overrides)}
        return own | ({"after": {plan.label: plan.fingerprint() for plan in self.after}} if self.after else {})


def plan_preparations(experiment: ExperimentConfig, output_dir: Path) -> list[RunPlan]:
    """Runs made before those of the arms."""
    plans: list[RunPlan] = []
    for preparation in experiment.prepare:
        overrides = tuple(dotted_overrides(preparation.overrides, output_dir))
        place, config = output_dir / preparation.run_dir, Path(preparation.config)
        plans.append(RunPlan(preparation.run_dir, config, overrides, place, after=_named(plans, overrides)))
    return plans


def _named(preparations: Sequence[RunPlan], overrides: Sequence[str]) -> tuple[RunPlan, ...]:
    """Preparations whose folders occur in overrides."""
    text = "\n".join(overrides)
    folders = [re.escape(escaped(str(plan.run_dir))) for plan in preparations]
    return tuple(
        # not the folder whose name only begins like it
        plan
        for plan, folder in zip(preparations, folders, strict=True)
        if re.search(rf"{folder}(?![\w.-])", text)
    )


def plan_arm_run(
    experiment: ExperimentConfig,
    output_dir: Path,
    arm: str,
    seed: int,
    value: Any = None,
    sweeping: bool = False,
) -> RunPlan:
    """One run of one arm."""
    metrics, reads, arm = experiment.arm(arm).metrics, experiment.arm(arm).reads, experiment.source(arm)
    settings = experiment.arm(arm)
    overrides = dotted_overrides({**experiment.overrides, **settings.overrides}, output_dir, seed)
    given = [text.partition("=")[0] for text in overrides]
    # options that the arm's own section leaves out, in front: the fingerprints of other runs stay as they were
    overrides[:0] = [
        text
        for text in dotted_overrides(experiment.overrides, output_dir, seed)
        if not any(f"{text.partition('=')[0]}.".startswith(f"{key}.") for key in given)
    ]
    label = f"runs/{arm}/seed-{seed}"
    if experiment.sweep is not None:
        overrides += dotted_overrides({experiment.sweep.parameter: value}, output_dir)
        if sweeping:
            label = sweep_label(arm, value, seed)
            overrides += dotted_overrides(experiment.sweep.overrides, output_dir, seed)
    config = Path(str(settings.config or experiment.base))
    after = _named(plan_preparations(experiment, output_dir), overrides)
    return RunPlan(label, config, (*overrides, f"seed={seed}"), output_dir / label, metrics, reads, after)


def sweep_label(arm: str, value: Any, seed: int) -> str:
    """Label of an arm's run with one value of the swept parameter."""
    text = str(value)
    name = re.sub(r"[^A-Za-z0-9_.-]+", "_", text)
    if name != text:  # other characters could have become the same name
        name += f"-{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"
    name = shortened_name(name)
    return f"sweep/{arm}/{name}/seed-{seed}"


def plan_sweep(
    experiment: ExperimentConfig, output_dir: Path, values: Mapping[str, Sequence[Any]] | None = None
) -> list[RunPlan]:
    """Every run of the sweep, with seeds in the outer loop, at the experiment's values or each arm's own."""
    sweep = experiment.sweep
    if sweep is None:
        return []
    values = values or dict.fromkeys(tuned_arms(experiment), sweep.values)
    return [
        plan_arm_run(experiment, output_dir, arm, seed, value, sweeping=True)
        for seed in sweep.seeds
        # arms next to each other at the same value
        for value in {str(value): value for value in itertools.chain(*values.values())}.values()
        for arm in values
        if value in values[arm]
    ]


def running_arms(experiment: ExperimentConfig) -> list[str]:
    """Arms that have their own runs."""
    return [arm for arm in experiment.arms if experiment.source(arm) == arm]


def tuned_arms(experiment: ExperimentConfig) -> list[str]:
    """Arms that have runs of the sweep."""
    return [arm for arm in running_arms(experiment) if experiment.tuned(arm) == arm]


def plan_lines(experiment: ExperimentConfig) -> Iterator[str]:
    """Yield how many runs an experiment has, their time on one core, and which difference matters."""
    sweep = experiment.sweep
    runs = len(running_arms(experiment)) * len(experiment.seeds)
    tried = 0 if sweep is None else len(tuned_arms(experiment)) * len(sweep.values) * len(sweep.seeds)
    text = f"plan: {len(experiment.prepare)} preparation(s), {tried} runs of the sweep, {runs} of the comparison"
    if experiment.run_minutes is not None:
        text += f"; about {planned_minutes(experiment, runs, tried) / 60:.1f} CPU hours"
        if sweep is not None and sweep.extend:
            each = experiment.run_minutes * _sweep_share(experiment) * len(sweep.seeds)
            text += f", plus {each:.2g} minutes for each value that it adds"
    yield text
    if experiment.margin is not None:
        yield f"margin: a difference in {experiment.metric} matters from {experiment.margin:g} on"


def planned_minutes(experiment: ExperimentConfig, runs: int, tried: int) -> float:
    """Minutes on one core for the preparations and the given number of runs of the comparison and the sweep."""
    return experiment.prepare_minutes + (experiment.run_minutes or 0.0) * (runs + tried * _sweep_share(experiment))


def _sweep_share(experiment: ExperimentConfig) -> float:
    """Length of a run of the sweep as a fraction of one of the comparison, by their numbers of steps."""
    if experiment.sweep is None:
        return 1.0
    arm, value = tuned_arms(experiment)[0], experiment.sweep.values[0]
    plans = [plan_arm_run(experiment, Path(), arm, 0, value, sweeping) for sweeping in (True, False)]
    short, whole = ((given_values(plan.config, plan.overrides).get("trainer") or {}).get("steps") for plan in plans)
    if isinstance(short, int) and isinstance(whole, int) and whole > 0:
        return short / whole
    return 1.0  # epochs, or a reference


def _effective(overrides: Sequence[str]) -> list[str]:
    """Overrides without those that a later one of the same key takes back, in the order in which they count."""
    last: dict[str, str] = {}
    for text in overrides:
        key = text.partition("=")[0]
        last.pop(key, None)
        last[key] = text
    return list(last.values())


def forget_digests() -> None:
    """Reread configuration files for the next fingerprints, so that one call sees one state of the files."""
    _digest.cache_clear()


@lru_cache
def _digest(config: Path) -> str:
    from omegaconf import OmegaConf

    digest = hashlib.sha256()
    path: Path | None = config
    while path is not None:
        digest.update(read_file(path, LARGEST_YAML))
        content = OmegaConf.to_container(load_omega(path))
        parent = content.get("extends") if isinstance(content, dict) else None
        path = None if parent is None else path.parent / str(parent)
    return digest.hexdigest()


MARKER = "experiment_run.json"


def is_finished(plan: RunPlan) -> bool:
    """Whether the run has finished with the settings that are planned now."""
    result = _read_json(plan, "result.json")
    if result is None or result.get("status") not in FINISHED:
        return False
    marker = _read_json(plan, MARKER)
    return _agrees_with_config(plan) if marker is None else _same_run(plan, marker)


def failure_of(plan: RunPlan) -> str | None:
    """Reason for the last failure with these settings, or None."""
    marker = _read_json(plan, MARKER)
    if marker is None or not _same_run(plan, marker):
        return None
    return marker.get("failed")


def prepare_folder(plan: RunPlan) -> bool:
    """Prepare a run's folder for its start.

    A folder of the same settings with a checkpoint is kept for continuing, unless that run had failed. A finished
    run of other settings is moved aside; what remains of failed and interrupted ones is removed.
    """
    owner = owner_of(plan.run_dir)
    if owner is not None:
        raise UserError(
            f"{plan.run_dir} is in use by {owner}; another `mmrl compare` of this experiment may be running"
        )
    marker = _read_json(plan, MARKER)
    if marker is None:
        if plan.run_dir.is_dir() and any(plan.run_dir.iterdir()):
            raise UserError(
                f"{plan.run_dir} contains files that no experiment wrote, or a run with settings other than "
                f"{plan.config} {' '.join(plan.overrides)}; remove it or choose another output folder"
            )
        return False
    saved = any((plan.run_dir / "checkpoints").glob("step-*"))
    if saved and marker.get("failed") is None and _same_run(plan, marker):
        return True
    if (plan.run_dir / "result.json").is_file() and marker.get("failed") is None:
        names = (plan.run_dir.with_name(f"{plan.run_dir.name}.replaced-{i}") for i in itertools.count(1))
        plan.run_dir.rename(next(path for path in names if not path.exists()))
    else:
        shutil.rmtree(plan.run_dir)
    return False


def mark(plan: RunPlan, failed: str | None = None) -> None:
    """Record in the run's folder which settings it was started with and, if it failed, why."""
    plan.run_dir.mkdir(parents=True, exist_ok=True)
    content = {**plan.fingerprint(), "config": str(plan.config), "failed": failed}
    write_atomically(plan.run_dir / MARKER, json.dumps(content, indent=1) + "\n")


def _same_run(plan: RunPlan, marker: Mapping[str, Any]) -> bool:
    overrides = marker.get("overrides") or []
    if not isinstance(overrides, list) or not all(isinstance(text, str) for text in overrides):
        return False
    planned = plan.fingerprint()
    # markers of earlier versions do not say from which preparations the run started
    known = {"after": planned.get("after"), **marker, "overrides": _effective(overrides)}
    return all(known.get(key) == value for key, value in planned.items())


def _agrees_with_config(plan: RunPlan) -> bool:
    from omegaconf import OmegaConf

    try:
        saved = OmegaConf.to_container(load_omega(plan.run_dir / "config.yaml"))
    except (OSError, UserError):
        return False
    given = OmegaConf.merge(load_omega(plan.config), OmegaConf.from_dotlist(list(plan.overrides)))
    wanted = OmegaConf.to_container(given)
    if not isinstance(saved, dict) or not isinstance(wanted, dict):
        return False
    own = {key: value for key, value in wanted.items() if key not in ("extends", "output_dir")}
    return _contains(saved, own)


def _contains(saved: Mapping[Any, Any], wanted: Mapping[Any, Any]) -> bool:
    for key, value in wanted.items():
        if isinstance(value, dict):
            if not _contains(saved.get(key) or {}, value):
                return False
        elif not isinstance(value, list) and saved.get(key) != value:  # saved lists carry filled-in defaults
            return False
    return True


def _read_json(plan: RunPlan, name: str) -> dict[str, Any] | None:
    try:
        return read_json_object(plan.run_dir / name)
    except UserError:
        return None
