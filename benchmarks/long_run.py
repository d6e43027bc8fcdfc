"""`python -m benchmarks ROOM --only long-run`: whether the memory of a process grows with the steps of a run.

A room gives the configuration of a small run whose episodes, answers or prompts differ in length, as a YAML file would
hold it. Each arm takes the same steps in a process of its own and notes the resident memory after every step and the
largest within it.
"""

from __future__ import annotations

import copy
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import Arm, BenchOptions, comparison, ratio, run_arms
from benchmarks.measure import ResidentMemory
from mmrl.errors import RunError, UserError

HERE = "benchmarks.long_run"
QUICK_STEPS = 6
"""The second half of fewer has no slope."""
REPORTED = (10, 50, 100, 200)
"""Steps after which the resident memory is reported, those of them that are run, and the last one."""
BATCH = 10
"""Steps whose mean is a point of the fitted line: memory of neighbouring steps is correlated."""
KEPT, RELEASED, FIXED = "kept", "released", "kept, thresholds in the environment"
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
"""What a user can set by hand: glibc maps every block above 64 KiB for itself and keeps no free top of the heap."""
ARMS: tuple[tuple[str, bool, dict[str, str]], ...] = (
    (KEPT, False, {}),
    (RELEASED, True, {}),
    (FIXED, False, ENVIRONMENT),
)
"""Name, `trainer.release_memory` and environment of each arm."""


@dataclass(frozen=True)
class LongRun:
    """The run of a room."""

    config: dict[str, Any]
    """Configuration as in a YAML file; `{folder}` in a text is where the benchmark keeps what it builds."""
    prepare: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Runs that come first, such as a warm start, by the name of their folder under `{folder}`."""
    steps: int = 200
    """Steps of the run."""
    notes: Sequence[str] = ()
    """What a reader must know of the run."""


def compare_long_run(plan: LongRun, options: BenchOptions) -> dict[str, Any]:
    """Run the steps with and without `trainer.release_memory`, and with glibc's thresholds set by hand."""
    if options.device != "cpu":
        if options.only:
            raise UserError(f"--only long-run measures runs on a CPU; --device {options.device} has no effect on it")
        return comparison({}, notes=[f"left out: it measures runs on a CPU, not on {options.device}"])
    length = "long-run-quick" if options.quick else "long-run"
    folder = options.folder / f"{length}-{plan.config['recipe']}"  # several rooms may be measured at the same time
    steps = QUICK_STEPS if options.quick else plan.steps
    for name, config in plan.prepare.items():
        _prepare(folder, name, config, options)
    settings = {"config": plan.config, "folder": str(folder), "steps": steps}
    arms = [
        Arm(name, f"{HERE}:long_run_arm", settings | {"release": release}, environment, blocks=1, memory=False)
        for name, release, environment in ARMS
    ]
    runs = run_arms("long-run", arms, options)
    ratios = {
        "CPU time, released over kept": ratio(runs, RELEASED, KEPT),
        f"CPU time, {FIXED} over kept": ratio(runs, FIXED, KEPT),
        "peak, kept over released": ratio(runs, KEPT, RELEASED, "peak_mb"),
    }
    notes = [f"{steps} steps; {note}" for note in plan.notes[:1]] + list(plan.notes[1:])
    notes += [f"{name}: {_in_words(run['counts'])}" for name, run in runs.items() if "counts" in run]
    return comparison(runs, ratios=ratios, notes=notes)


def prepare_arm(options: dict[str, Any]) -> dict[str, Any]:
    """Carry out a run that others start from."""
    from mmrl.training.run import train

    entry, config = _load(options, options["name"], {})
    train(entry, config)
    return {"counts": {"steps": config.trainer.steps}}


def long_run_arm(options: dict[str, Any]) -> dict[str, Any]:
    """Take the steps of a run and note the memory of this process.

    Returns:
        cpu_s and wall_s: mean seconds of a step; peak_mb: largest resident memory; held_mb: that after the last step;
        counts: resident_mb after some steps, and the `growth` over the second half; series: resident memory after every
        step and the largest within it, in MB.
    """
    from mmrl.config import to_container
    from mmrl.runs.tracking import build_tracker
    from mmrl.training.processes import limit_primitive_cache, make_accelerator, seed_everything
    from mmrl.training.trainer import Trainer

    name = "released" if options["release"] else "kept"
    settings = {"trainer": {"release_memory": options["release"], "steps": options["steps"]}}
    entry, config = _load(options, f"{name}-run", settings)
    shutil.rmtree(config.output_dir, ignore_errors=True)
    if options["release"]:
        limit_primitive_cache()
    seed_everything(config.seed)
    accelerator = make_accelerator(config.trainer.mixed_precision)
    recipe = entry.load_recipe_class()(config)
    folder, filled = Path(config.output_dir), to_container(config)
    tracker = build_tracker(config.tracking, folder, total_steps=options["steps"], run_config=filled)
    try:
        recipe.policy.to(accelerator.device)
        return _measured_steps(Trainer(recipe, config, folder, accelerator, tracker), options["steps"])
    finally:
        recipe.close()
        tracker.close()


def growth(resident_mb: Sequence[float], batch: int = BATCH) -> tuple[float, float]:
    """Slope of the memory over the second half of a run, fitted to the means of batches of steps.

    Returns:
        Slope in MB per 100 steps and its standard error, by ordinary least squares; NaN with fewer than three points.
    """
    import numpy as np

    half = np.asarray(resident_mb[len(resident_mb) // 2 :], dtype=np.float64)
    batch = max(min(batch, len(half) // 3), 1)
    if len(half) < 3:
        return float("nan"), float("nan")
    means = half[len(half) % batch :].reshape(-1, batch).mean(1)
    (slope, _), covariance = np.polyfit(np.arange(len(means)) * float(batch), means, 1, cov=True)
    return 100.0 * float(slope), 100.0 * float(np.sqrt(covariance[0, 0]))


def _measured_steps(trainer: Any, steps: int) -> dict[str, Any]:
    memory = ResidentMemory()
    resident, peaks = [], []
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(steps):
        memory.reset()
        trainer.train_step()
        resident.append(memory.now_mb())
        peaks.append(memory.peak_mb())
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    slope, error = growth(resident)
    after = {f"resident_mb_{step}": resident[step - 1] for step in sorted({*REPORTED, steps}) if step <= steps}
    return {
        "cpu_s": {"total": cpu / steps},
        "wall_s": {"total": wall / steps},
        "peak_mb": {"total": max(peaks)},
        "held_mb": resident[-1],
        "counts": after | {"slope_mb_per_100_steps": slope, "slope_error": error},
        "series": {"resident_mb": resident, "peak_mb": peaks},
    }


def _prepare(folder: Path, name: str, config: dict[str, Any], options: BenchOptions) -> None:
    """Train a run that others start from, unless it is there."""
    if (folder / name / "result.json").is_file():
        return
    shutil.rmtree(folder / name, ignore_errors=True)  # one that was interrupted
    settings = {"config": config, "folder": str(folder), "name": name}
    arm = Arm(name, f"{HERE}:prepare_arm", settings, timed=False)
    found = run_arms("long-run, preparation", [arm], options)[name]
    if "error" in found:
        raise RunError(f"the run {name}, from which the benchmark starts, failed: {found['error']}")


def _load(options: dict[str, Any], name: str, changes: dict[str, Any]) -> tuple[Any, Any]:
    """Write the configuration of a run as a YAML file and read it as `mmrl train` does."""
    from omegaconf import OmegaConf

    from mmrl.config import load_run

    folder = Path(options["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    tracking = {"quiet": True, "tensorboard": False}
    values = _with_folder(copy.deepcopy(options["config"]), str(folder))
    merged = OmegaConf.merge(values, changes, {"output_dir": str(folder / name), "tracking": tracking})
    path = folder / f"{name}.yaml"
    OmegaConf.save(merged, path)
    return load_run(path)


def _with_folder(value: Any, folder: str) -> Any:
    if isinstance(value, dict):
        return {key: _with_folder(part, folder) for key, part in value.items()}
    if isinstance(value, list):
        return [_with_folder(part, folder) for part in value]
    return value.replace("{folder}", folder) if isinstance(value, str) else value


def _in_words(counts: dict[str, float]) -> str:
    after = {key.rpartition("_")[2]: mb for key, mb in counts.items() if key.startswith("resident_mb_")}
    text = ", ".join(f"{mb:.0f} MB after {step}" for step, mb in after.items())
    slope, error = counts["slope_mb_per_100_steps"], counts["slope_error"]
    return f"{text} steps; {slope:+.1f} +- {error:.1f} MB per 100 steps over the second half"
