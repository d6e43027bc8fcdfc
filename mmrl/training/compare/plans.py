"""The runs that follow from an experiment: configuration, overrides and folder of each."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from mmrl.training.compare.experiment import ExperimentConfig
from mmrl.training.compare.overrides import dotted_overrides, effective_overrides


@dataclass(frozen=True)
class RunPlan:
    """One run of an experiment."""

    label: str
    """Path of the run folder below the output folder."""
    config: Path
    """Configuration file."""
    overrides: tuple[str, ...]
    """Dotted assignments without the run folder."""
    run_dir: Path
    """Run folder."""
    metrics: Mapping[str, str] = field(default_factory=dict)
    """Names of the experiment's metrics in the run, where they differ."""
    reads: str = "end"
    """Whether its last or its first evaluation counts."""

    def fingerprint(self) -> dict[str, Any]:
        """What the run is made of: a changed file, parent file or override gives another fingerprint."""
        return {"config_sha256": _digest(self.config), "overrides": effective_overrides(self.overrides)}


def plan_preparations(experiment: ExperimentConfig, output_dir: Path) -> list[RunPlan]:
    """Runs that come before the arms."""
    return [
        RunPlan(
            label=preparation.run_dir,
            config=Path(preparation.config),
            overrides=tuple(dotted_overrides(preparation.overrides, output_dir)),
            run_dir=output_dir / preparation.run_dir,
        )
        for preparation in experiment.prepare
    ]


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
    overrides = dotted_overrides({**experiment.overrides, **settings.overrides}, output_dir)
    label = f"runs/{arm}/seed-{seed}"
    if experiment.sweep is not None:
        overrides += dotted_overrides({experiment.sweep.parameter: value}, output_dir)
        if sweeping:
            label = f"sweep/{arm}/{_folder_name(value)}/seed-{seed}"
            overrides += dotted_overrides(experiment.sweep.overrides, output_dir)
    config = Path(str(settings.config or experiment.base))
    return RunPlan(label, config, (*overrides, f"seed={seed}"), output_dir / label, metrics, reads)


def plan_sweep(experiment: ExperimentConfig, output_dir: Path) -> list[RunPlan]:
    """Every run of the sweep, seeds outermost; none without a sweep."""
    sweep = experiment.sweep
    if sweep is None:
        return []
    return [
        plan_arm_run(experiment, output_dir, arm, seed, value, sweeping=True)
        for seed in sweep.seeds
        for value in sweep.values
        for arm in experiment.arms
        if experiment.source(arm) == arm
    ]


def forget_digests() -> None:
    """Read configuration files anew for the next fingerprints; one call sees one state of the files."""
    _digest.cache_clear()


@lru_cache
def _digest(config: Path) -> str:
    from omegaconf import OmegaConf

    digest = hashlib.sha256()
    path: Path | None = config
    while path is not None:
        digest.update(path.read_bytes())
        content = OmegaConf.to_container(OmegaConf.load(path))
        parent = content.get("extends") if isinstance(content, dict) else None
        path = None if parent is None else path.parent / str(parent)
    return digest.hexdigest()


def _folder_name(value: Any) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", str(value))
