"""Runs the arms of a comparison, each in a fresh process, alternating, and summarises their measurements.

An arm is a function `module:function` that takes a dict of JSON values and returns what `benchmarks.measure.repeat`
returns, with "counts" (any numbers worth reporting), "checks" (results of `check`) and "series" (lists of numbers, one
a step) added where it has some.
A room of the benchmark (see `benchmarks.ROOMS`) offers

    NAMES: tuple[str, ...]                                   what `--only` takes
    compare(options: BenchOptions) -> dict[str, dict]        one comparison for each name, built with `comparison`

and looks like this:

    def compare(options):
        return {name: COMPARISONS[name](options) for name in options.chosen(NAMES)}

    def _sampling(options):
        arms = [
            Arm("one by one", "benchmarks.diffusion.comparisons:sample_arm", {"together": False}),
            Arm("together", "benchmarks.diffusion.comparisons:sample_arm", {"together": True}),
        ]
        runs = run_arms("sampling", arms, options)
        speed = ratio(runs, "one by one", "together", minimum=2.0, goal=2.5, bound=bound)
        memory = ratio(runs, "one by one", "together", "peak_mb")
        return comparison(runs, ratios={"time": speed, "memory": memory}, floor={...})

    def sample_arm(arm):                                     # runs in its own process
        model = ...
        def once(watch):
            with watch.stage("encode"):
                ...
        return repeat(once, arm["repetitions"], arm["device"]) | {"counts": {"images": 8}}
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.worker import answer_to
from mmrl.errors import UserError
from mmrl.fields import bounded, field_problems

KEPT_BYTES = str(2**20)
"""Size above which freed blocks are returned to the system in processes that measure memory. Otherwise glibc would keep
them, and peaks would not be comparable. This costs time (a quarter of a TRL step), so time is measured in other
processes."""


@dataclass(frozen=True)
class Arm:
    """One way to do the work."""

    name: str
    """Name in the results."""
    function: str
    """`module:function`, called in a fresh process with the options."""
    options: dict[str, Any] = field(default_factory=dict)
    """JSON values; `repetitions` and `device` are added from the benchmark's own options."""
    environment: dict[str, str] = field(default_factory=dict)
    """Additional environment variables of the process."""
    blocks: int | None = None
    """Maximum number of processes that measure time, if fewer than the benchmark's own number are enough for
    orientation."""
    timed: bool = True
    """False for an arm that only returns counts or checks: it runs once."""
    memory: bool = True
    """False for an arm whose memory is used by other processes; no process measures it."""


@dataclass
class BenchOptions:
    """Options of `python -m benchmarks`."""

    blocks: int = bounded(0, at_least=1)
    """Number of processes per arm that measure time, in turns with the other arms; one more measures memory. 0 = 5, or
    1 with `quick`."""
    repetitions: int = bounded(0, at_least=1)
    """Number of timed repetitions per process, after one warm-up; 0 = 2, or 1 with `quick`."""
    threads: int = bounded(1, at_least=1)
    """Threads per process."""
    quick: bool = False
    """Tiny sizes, all in this process: a smoke test that takes seconds."""
    device: str = "cpu"
    """cpu or cuda."""
    only: list[str] = field(default_factory=list)
    """Names of comparisons; empty = all that need only this package."""
    against: str | None = None
    """Another library to compare with."""
    model: Path | None = None
    """Model folder to use instead of building a model."""
    family: str = "qwen2_5_vl"
    """Architecture of the model to build."""
    folder: Path = Path("runs/bench")
    """Folder for built models and questions."""

    def __post_init__(self) -> None:
        self.blocks = self.blocks or (1 if self.quick else 5)
        self.repetitions = self.repetitions or (1 if self.quick else 2)

    def validate(self) -> None:
        """Check the bounds of the numbers; raises UserError."""
        for problem in field_problems(self):
            raise UserError(f"--{problem}")

    def chosen(self, names: Sequence[str]) -> list[str]:
        """Names to run, in the order of `names`; raises UserError for an unknown name."""
        unknown = [name for name in self.only if name not in names]
        if unknown:
            raise UserError(f"--only {unknown[0]}: unknown comparison; available: {', '.join(names)}")
        return [name for name in names if not self.only or name in self.only]


def run_arms(title: str, arms: Sequence[Arm], options: BenchOptions) -> dict[str, dict[str, Any]]:
    """Run every arm `options.blocks` times in turns, A B C A B C ..., then once more for its memory."""
    found: dict[str, list[dict[str, Any]]] = {arm.name: [] for arm in arms}
    spacious: dict[str, dict[str, Any]] = {}
    errors: dict[str, str] = {}
    for block in range(options.blocks + 1):
        for arm in arms:
            for_memory = block == options.blocks
            if arm.name in errors or not _is_due(arm, block, options):
                continue
            answer = _run_process(arm, options, for_memory)
            if "error" in answer:
                errors[arm.name] = answer["error"]
                progress(f"{title}: {arm.name}: failed: {answer['error']}\n{answer.get('traceback', '')}")
                continue
            progress(f"{title}: {arm.name}: {_in_short(answer, block, for_memory)}")
            if for_memory:
                spacious[arm.name] = answer
            else:
                found[arm.name].append(answer)
    return {arm.name: _summary(found[arm.name], spacious.get(arm.name), errors.get(arm.name)) for arm in arms}


def ratio(
    runs: Mapping[str, dict[str, Any]],
    baseline: str,
    ours: str,
    quantity: str = "cpu_s",
    stage: str = "total",
    *,
    minimum: float | None = None,
    goal: float | None = None,
    bound: float | None = None,
) -> dict[str, Any]:
    """Divide the cost of the baseline by the cost of an arm, block by block.

    Args:
        runs: result of `run_arms`.
        baseline: arm in the numerator.
        ours: arm in the denominator.
        quantity: cpu_s, wall_s or peak_mb.
        stage: stage of the two.
        minimum: value that the median must reach.
        goal: value that it should reach.
        bound: value that a count of operations allows.

    Returns:
        median, min and max over the blocks (there is one for memory); `met`, `goal_met` and the share `of_bound`
        where a minimum, goal or bound is given; only `error` where an arm failed.
    """
    failed = [name for name in (baseline, ours) if "error" in runs[name]]
    if failed:
        return {"baseline": baseline, "arm": ours, "error": f"{' and '.join(failed)} failed"}
    pairs = zip(_values(runs[baseline], quantity, stage), _values(runs[ours], quantity, stage), strict=False)
    values = [first / second for first, second in pairs]
    middle = statistics.median(values)
    found: dict[str, Any] = {"baseline": baseline, "arm": ours, "quantity": quantity, "stage": stage}
    found |= {"median": middle, "min": min(values), "max": max(values)}
    found |= {} if minimum is None else {"minimum": minimum, "met": middle >= minimum}
    found |= {} if goal is None else {"goal": goal, "goal_met": middle >= goal}
    return found | ({} if bound is None else {"bound": bound, "of_bound": middle / bound})


def check(value: float, limit: float, *, above: bool = False) -> dict[str, Any]:
    """Compare a number with a limit; a failed check makes the benchmark fail.

    Args:
        value: the number.
        limit: its largest allowed value, or with `above` its smallest.
        above: whether the number must be above the limit (a negative control).

    Returns:
        value, limit, whether it is the largest allowed value (`at_most`) and `passed`.
    """
    passed = value >= limit if above else value <= limit
    return {"value": value, "limit": limit, "at_most": not above, "passed": bool(passed)}


def comparison(
    runs: Mapping[str, dict[str, Any]],
    *,
    ratios: Mapping[str, dict[str, Any]] | None = None,
    floor: Mapping[str, Any] | None = None,
    checks: Mapping[str, dict[str, Any]] | None = None,
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """Put the parts of one comparison together."""
    every = {**(checks or {})}
    for name, run in runs.items():
        every |= {f"{name}/{key}": value for key, value in run.get("checks", {}).items()}
    failed = any("error" in run for run in runs.values()) or any(not found["passed"] for found in every.values())
    return {
        "arms": dict(runs),
        "ratios": dict(ratios or {}),
        "floor": dict(floor or {}),
        "checks": every,
        "notes": list(notes),
        "failed": failed,
    }


def progress(text: str) -> None:
    """Write a line of progress to standard error; standard output is reserved for the result."""
    sys.stderr.write(f"{text.rstrip()}\n")
    sys.stderr.flush()


def _is_due(arm: Arm, block: int, options: BenchOptions) -> bool:
    if not arm.timed:
        return block == 0
    if block == options.blocks:
        # A GPU's allocator tells the peak of every run.
        return arm.memory and options.device == "cpu" and not options.quick
    return block < min(arm.blocks or options.blocks, options.blocks)


def _run_process(arm: Arm, options: BenchOptions, for_memory: bool) -> dict[str, Any]:
    repetitions = 1 if for_memory else options.repetitions
    asked = {
        "function": arm.function,
        "options": {"repetitions": repetitions, "device": options.device, **arm.options},
    }
    environment = _environment(arm, options, for_memory)
    if options.quick:
        with _changed_environment(environment):
            return answer_to(asked)
    with tempfile.TemporaryDirectory(prefix="mmrl-bench-") as folder:
        request, result = Path(folder) / "request.json", Path(folder) / "result.json"
        request.write_text(json.dumps(asked), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.worker", str(request), str(result)],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        if result.is_file():
            return dict(json.loads(result.read_text(encoding="utf-8")))
    return {"error": f"the process exited with code {done.returncode}", "traceback": done.stderr[-2000:]}


@contextlib.contextmanager
def _changed_environment(values: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _environment(arm: Arm, options: BenchOptions, for_memory: bool) -> dict[str, str]:
    count = str(options.threads)
    fixed = {"OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count, "TOKENIZERS_PARALLELISM": "false"}
    fixed |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    if options.device == "cpu":
        fixed["CUDA_VISIBLE_DEVICES"] = ""
    if for_memory:
        fixed |= {"MALLOC_MMAP_THRESHOLD_": KEPT_BYTES, "MALLOC_TRIM_THRESHOLD_": KEPT_BYTES}
    return fixed | arm.environment


def _summary(blocks: list[dict[str, Any]], spacious: dict[str, Any] | None, error: str | None) -> dict[str, Any]:
    summed: dict[str, Any] = {} if error is None else {"error": error}
    for block in blocks[:1]:
        summed |= {key: block.get(key, {}) for key in ("counts", "checks")}
        summed |= {"series": block["series"]} if "series" in block else {}
    timed = [block for block in blocks if "cpu_s" in block]
    if timed:
        for quantity in ("cpu_s", "wall_s"):
            stages = dict.fromkeys(stage for block in timed for stage in block[quantity])
            values = {stage: [block[quantity].get(stage, 0.0) for block in timed] for stage in stages}
            summed[quantity] = {stage: statistics.median(numbers) for stage, numbers in values.items()}
        roomy = spacious or timed[-1]
        summed |= {key: roomy[key] for key in ("peak_mb", "held_mb")}
    return summed | {"blocks": [{key: block[key] for key in ("cpu_s", "wall_s")} for block in timed]}


def _values(run: Mapping[str, Any], quantity: str, stage: str) -> list[float]:
    if quantity == "peak_mb":
        return [run["peak_mb"][stage]]
    return [block[quantity][stage] for block in run["blocks"]]


def _in_short(answer: Mapping[str, Any], block: int, for_memory: bool) -> str:
    if "cpu_s" not in answer:
        return "done"
    if for_memory:
        return f"memory: peak {answer['peak_mb']['total']:.0f} MB"
    return f"block {block + 1}: {answer['cpu_s']['total']:.3f} CPU s, {answer['wall_s']['total']:.3f} s"
