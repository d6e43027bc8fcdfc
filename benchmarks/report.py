"""Settings, versions and machine of a benchmark, and its results as a table."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.harness import BenchOptions
from mmrl.files import write_atomically

PACKAGES = ("torch", "transformers", "trl", "accelerate", "peft", "diffusers", "mujoco", "gymnasium", "numpy")


def print_each(compare: Callable[..., Any], cases: Collection[str], **counts: int) -> None:
    """Compare all cases or --case, with counts as further options; print each as JSON and write all to --out."""
    parser = argparse.ArgumentParser(description=compare.__doc__)
    for name, default in counts.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--case", choices=cases, help="one alone")
    parser.add_argument("--out", type=Path)
    given = vars(parser.parse_args())
    out, only, results = given.pop("out"), given.pop("case"), {}
    for case in [only] if only else cases:
        results[case] = compare(case, **given)
        sys.stdout.write(f"{json.dumps({case: results[case]}, indent=1)}\n")
        sys.stdout.flush()
    if out is not None:
        write_atomically(out, json.dumps(results, indent=1))


def settings_of(options: BenchOptions) -> dict[str, Any]:
    """The options as JSON values."""
    return {key: str(value) if isinstance(value, Path) else value for key, value in dataclasses.asdict(options).items()}


def describe_versions() -> dict[str, str]:
    """Versions of Python and of the installed `PACKAGES`."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def describe_machine(options: BenchOptions) -> dict[str, Any]:
    """Processor, cores, load and the GPU that the arms used."""
    machine: dict[str, Any] = {
        "system": platform.platform(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": options.threads,
        "load_after": os.getloadavg()[0],
    }
    if options.device == "cuda":
        import torch

        machine["gpu"] = torch.cuda.get_device_name()
    return machine


def table(comparisons: Mapping[str, Mapping[str, Any]]) -> str:
    """Comparisons as human-readable text."""
    return "\n".join(line for name, found in comparisons.items() for line in _lines(name, found))


def _lines(name: str, found: Mapping[str, Any]) -> Iterator[str]:
    yield ""
    yield f"== {name} =="
    width = max(map(len, found["arms"]), default=0)
    for arm, run in found["arms"].items():
        yield f"{arm:<{width}}  {_arm_text(run)}"
    for title, entry in found["ratios"].items():
        yield f"{title}: {_ratio_text(entry)}"
    for title, entry in found["checks"].items():
        sign, verdict = ("<=" if entry["at_most"] else ">="), ("passed" if entry["passed"] else "FAILED")
        yield f"check {title}: {entry['value']:.3g} {sign} {entry['limit']:.3g}: {verdict}"
    for note in found["notes"]:
        yield f"note: {note}"


def _arm_text(run: Mapping[str, Any]) -> str:
    parts = [f"failed: {run['error']}"] if "error" in run else []
    if "cpu_s" in run:
        parts.append(f"{run['cpu_s']['total']:8.3f} CPU s  {run['wall_s']['total']:8.3f} s")
    if "peak_mb" in run:
        parts.append(f"peak {run['peak_mb']['total']:7.0f} MB")
    stages = {stage: seconds for stage, seconds in run.get("cpu_s", {}).items() if stage != "total"}
    if stages:
        parts.append("(" + ", ".join(f"{stage} {seconds:.3f}" for stage, seconds in stages.items()) + ")")
    return "  ".join(parts)


def _ratio_text(entry: Mapping[str, Any]) -> str:
    if "error" in entry:
        return f"none, {entry['error']}"
    text = f"{entry['median']:.2f}x ({entry['min']:.2f}-{entry['max']:.2f})"
    if "minimum" in entry:
        text += f", minimum {entry['minimum']:g}: {'met' if entry['met'] else 'NOT MET'}"
    if "goal" in entry:
        text += f", goal {entry['goal']:g}: {'met' if entry['goal_met'] else 'not met'}"
    if "bound" in entry:
        text += f", bound {entry['bound']:.2f} ({entry['of_bound']:.0%} of it)"
    return text


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
