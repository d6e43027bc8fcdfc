"""`mmrl compare`: run arms on shared seeds side by side, pair them seed by seed, write every result and failure.

Order: the preparations, then the sweep (every value on the sweep's seeds, the best mean chosen per arm), then the
comparison on fresh seeds. Runs that are finished with the same settings are kept, interrupted ones continue from
their last checkpoint, failed ones are listed and tried again at the next call.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from mmrl.comparison import plans as run_status
from mmrl.comparison.curves import absent_metrics
from mmrl.comparison.experiment import ExperimentConfig, load_experiment
from mmrl.comparison.figures import draw
from mmrl.comparison.plans import RunPlan, forget_digests, plan_arm_run, plan_lines, plan_preparations, plan_sweep
from mmrl.comparison.results import Comparison, SweepArm, comparison_lines, failure_text
from mmrl.comparison.summary import (
    below_start,
    plan_comparison,
    summarise,
    sweep_next,
    sweep_result,
    sweep_values,
)
from mmrl.errors import RunError, UserError
from mmrl.files import last_line, read_text, shortened_name, write_atomically
from mmrl.runs.records import finite_or_none
from mmrl.training.settings import RollersConfig
from mmrl.trust import check_foreign, restricted

_POLL_S = 0.1
_GRACE_S = 10.0


@dataclass(frozen=True)
class Job:
    """A command to run."""

    label: str
    """Name in messages."""
    command: tuple[str, ...]
    """Program and arguments."""
    log: Path
    """File for standard output and error."""
    before: Callable[[], None] | None = None
    """Called immediately before the start."""


@dataclass(frozen=True)
class JobResult:
    """Result of a command."""

    job: Job
    """The command."""
    returncode: int
    """Exit status; negative for a signal."""
    seconds: float
    """Run time."""
    timed_out: bool
    """Whether it was stopped at the time limit."""

    @property
    def reason(self) -> str | None:
        """Reason of a failure, with the last line of output; None after success."""
        if self.timed_out:
            return f"stopped after {self.seconds:.0f} s, its time limit"
        if self.returncode == 0:
            return None
        return f"exit code {self.returncode}: {last_line(self.job.log)}"


@dataclass
class _Running:
    job: Job
    process: subprocess.Popen[bytes]
    started: float


def run_jobs(jobs: Sequence[Job], limit: int, timeout_s: float, on_done: Callable[[JobResult], None]) -> None:
    """Run commands, at most `limit` in parallel; when this call ends, for any reason, its commands have ended too."""
    waiting = deque(jobs)
    running: list[_Running] = []
    with _signals_raise():
        try:
            _run(waiting, running, limit, timeout_s, on_done)
        finally:
            for entry in running:
                _stop(entry.process)


def _run(
    waiting: deque[Job],
    running: list[_Running],
    limit: int,
    timeout_s: float,
    on_done: Callable[[JobResult], None],
) -> None:
    while waiting or running:
        while waiting and len(running) < limit:
            running.append(_start(waiting.popleft()))
        for entry in list(running):
            result = _poll(entry, timeout_s)
            if result is not None:
                running.remove(entry)
                on_done(result)
        if running:
            time.sleep(_POLL_S)


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """SIGTERM and SIGHUP, which otherwise end a process on the spot, raise SystemExit, so that commands are stopped."""

    def leave(signum: int, frame: FrameType | None) -> None:
        sys.exit(128 + signum)

    previous: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for ends in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(ends) == signal.SIG_DFL:
                previous[ends] = signal.signal(ends, leave)
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


def _start(job: Job) -> _Running:
    if job.before is not None:
        job.before()
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with job.log.open("ab") as log:
        process = subprocess.Popen(
            job.command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # a separate group, so that its worker processes end with it
        )
    return _Running(job, process, time.monotonic())


def _poll(entry: _Running, timeout_s: float) -> JobResult | None:
    seconds = time.monotonic() - entry.started
    code = entry.process.poll()
    if code is not None:
        return JobResult(entry.job, code, seconds, timed_out=False)
    if seconds <= timeout_s:
        return None
    _stop(entry.process)
    return JobResult(entry.job, entry.process.returncode, seconds, timed_out=True)


def _stop(process: subprocess.Popen[bytes]) -> None:
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            continue
        return


class SharedRay:
    """A Ray instance on this machine that is started when a run first needs it.

    Args:
        configs: all configurations of the experiment.
        jobs: wanted number of runs at a time.
    """

    def __init__(self, configs: Sequence[Any], jobs: int) -> None:
        self.wanted = [options for config in configs if (options := own_ray(config)) is not None]
        """Options of the runs that would start their own Ray."""
        self._address = ""
        self.jobs = jobs
        """Number of parallel runs; fewer than requested if the GPUs have no room for the workers of that many."""

    def arguments(self, config: Any) -> list[str]:
        """Additional arguments of a run that make its workers join this Ray."""
        if own_ray(config) is None:
            return []
        if not self._address:
            self._start()
        return [f"rollers.address={self._address}"]

    def close(self) -> None:
        """Stop Ray and everything that still runs in it."""
        if self._address:
            import ray

            ray.shutdown()

    def _start(self) -> None:
        from mmrl.training.ray_rollers import start_ray

        self._address = start_ray(self.jobs * max(options.workers * options.num_cpus for options in self.wanted)).gcs
        import ray

        gpus = max(options.workers * options.num_gpus for options in self.wanted)
        if gpus:
            self.jobs = max(1, min(self.jobs, int(ray.cluster_resources().get("GPU", 0.0) / gpus)))


def own_ray(config: Any) -> RollersConfig | None:
    """Worker options of a run that would start its own Ray; None for other runs."""
    options: RollersConfig | None = getattr(config, "rollers", None)
    return options if options is not None and options.engine == "ray" and not options.address else None


BAD_CONFIGURATION = 2  # exit code of the command line for mistakes in what was asked

CommandBuilder = Callable[[RunPlan, bool], Sequence[str]]


def train_command(plan: RunPlan, resume: bool) -> list[str]:
    """Command that trains one run, or continues it from its last checkpoint."""
    from mmrl.config import as_override, escaped

    command = [sys.executable, "-m", "mmrl.cli", "train", str(plan.config), *plan.overrides]
    return [*command, as_override("output_dir", escaped(str(plan.run_dir))), *(["--resume"] if resume else [])]


def run_experiment(
    path: Path,
    output_dir: Path,
    *,
    jobs: int | None = None,
    only_report: bool = False,
    command: CommandBuilder = train_command,
    announce: Callable[[str], None] | None = None,
    allow: Sequence[str] | None = None,
) -> Path:
    """Run the unfinished runs of an experiment file and write comparison.json and its figures.

    The figures are comparison.png, and work.png where the experiment has costs. `allow` lists the code outside the
    suite that the experiment may name (`mmrl.trust`); None if the caller has read the file.
    """
    experiment = load_experiment(path)
    # one call sees one state of the files, as they are now
    forget_digests()
    folder = Path(output_dir)
    starts = command is train_command and not only_report
    names = None if allow is None or only_report else _allowed_code(experiment, path, folder, allow)
    with restricted(names):
        # every configuration is read before the first run, which may take hours
        configs = _checked_configurations(experiment, folder) if starts else []
        folder.mkdir(parents=True, exist_ok=True)
        invocation = shlex.join(["mmrl", "compare", str(path), "--output", str(output_dir)])
        ray = SharedRay(configs, jobs or experiment.jobs)
        session = _Session(experiment, folder, invocation, ray, command, announce or say)
        if not only_report:
            for line in plan_lines(experiment):
                session.announce(line)
            # Ray is stopped with the call, also after an error
            with closing(ray):
                session.prepare()
                session.sweep()
                session.compare()
    comparison = session.summary("done")
    for line in (*comparison_lines(comparison), *absent_metrics(experiment, plan_comparison(experiment, folder))):
        session.announce(line)
    has_pairs = any(difference.n for difference in comparison.differences.values())
    earlier = (folder / "comparison.json").exists()
    if has_pairs or not (only_report and earlier):  # a report on nothing must not replace one
        session.save(comparison)
    if not has_pairs:
        reason = failure_text(comparison.failures)
        raise RunError(f"no pair of runs has finished: {reason}; see {folder / 'comparison.json'}")
    return folder


def planned(path: Path, output_dir: Path, allow: Sequence[str] | None = None) -> list[str]:
    """Read every configuration of an experiment file, and return what its runs would cost."""
    experiment = load_experiment(path)
    with restricted(None if allow is None else _allowed_code(experiment, path, output_dir, allow)):
        _checked_configurations(experiment, output_dir)
    return list(plan_lines(experiment))


def _allowed_code(
    experiment: ExperimentConfig, path: Path, folder: Path, allow: Sequence[str]
) -> Collection[str] | None:
    """Code outside the suite that the experiment may run; raises UserError naming code that `allow` does not list."""
    from mmrl.config import given_values

    content = {plan.label: given_values(plan.config, plan.overrides) for _, plan in _plans(experiment, folder)}
    return check_foreign(content, read_text(path), str(path), allow)


@dataclass
class _Session:
    """One call: the experiment, where it writes, and how it starts runs."""

    experiment: ExperimentConfig
    folder: Path
    invocation: str
    ray: SharedRay
    command: CommandBuilder
    announce: Callable[[str], None]

    def prepare(self) -> None:
        """Run the preparations, one after another."""
        for plan in plan_preparations(self.experiment, self.folder):
            # the arms build on the preparation, so nothing goes on without it
            for label, reason in self.run([plan], keep=True).items():
                raise RunError(f"preparation {label} failed: {reason}; log: {self._log(plan)}")

    def sweep(self) -> None:
        """Try every value of the swept parameter for every arm."""
        if self.experiment.sweep is None:
            return
        shared = self.experiment.sweep.shared
        values: dict[str, list[Any]] = {}
        # again with what the finished runs add
        while values != (values := self._sweep_values(values)):
            self.run(plan_sweep(self.experiment, self.folder, values))
        found = sweep_result(self.experiment, self.folder)
        assert found is not None
        for arm in self.experiment.arms:
            if arm not in found.chosen:
                text = failure_text(self.write("failed").failures)
                own = f"run of the sweep finished for arm '{arm}'"
                raise RunError(f"no {'value of the sweep finished for all arms' if shared else own}: {text}")
            note = self._note(found.arms[arm], found.chosen[arm]) if arm in found.arms else ""
            self.announce(f"{arm}: chose {self.experiment.sweep.parameter}={found.chosen[arm]}{note}")

    def _sweep_values(self, before: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        """Values that each arm tries now; those added to the ones before are announced, unless they are not allowed."""
        values, found = sweep_values(self.experiment, self.folder), sweep_result(self.experiment, self.folder)
        assert found is not None
        for arm, tried in found.arms.items():
            value, reason = sweep_next(self.experiment, tried) or (None, "")
            if not reason or value in before.get(arm, ()):
                continue
            plan = plan_arm_run(self.experiment, self.folder, arm, found.seeds[0], value, sweeping=True)
            try:
                if self.command is train_command:
                    _load(plan)
                self.announce(f"{arm}: also tries {found.parameter}={value}, {reason}")
            except UserError as error:
                self.announce(f"{arm}: the sweep stops before {found.parameter}={value}: {error}")
                values[arm].remove(value)
        return values

    def _note(self, tried: SweepArm, value: Any) -> str:
        """Caveats of the chosen value, for the console."""
        row, note = next(row for row in tried.rows if row.value == value), ""
        if tried.at_edge:
            small = value == min(row.value for row in tried.rows)
            asks = ": does it beat the start at all?" if small and row.start is None else ""
            note = f" (the {'smallest' if small else 'largest'} tried{asks})"
        if below_start(self.experiment, row):
            note += f"; it ends worse than the start: {row.mean:.4g} against {row.start:.4g}"
        return f"{note}; no value has all of its seeds" if None in row.values.values() else note

    def compare(self) -> None:
        """Run every arm on every seed of the comparison, with the runs of a pair close together."""
        plans = plan_comparison(self.experiment, self.folder)
        # seeds outermost and by label: arms that read another arm's runs add none of their own
        runs = {by_seed[seed].label: by_seed[seed] for seed in self.experiment.seeds for by_seed in plans.values()}
        self.run(list(runs.values()))

    def run(self, plans: Sequence[RunPlan], keep: bool = False) -> dict[str, str]:
        """Start the unfinished runs and write comparison.json whenever one ends."""
        # finished with the same settings; others run again or continue
        waiting = {plan.label: plan for plan in plans if not run_status.is_finished(plan)}
        if len(waiting) < len(plans):
            self.announce(f"{len(plans) - len(waiting)} of {len(plans)} runs have already finished")
        resumed = {label for label, plan in waiting.items() if run_status.prepare_folder(plan)}
        queue = [
            Job(label, self._program(plan, label in resumed), self._log(plan), partial(run_status.mark, plan))
            for label, plan in waiting.items()
        ]
        failed: dict[str, str] = {}
        ended = 0

        def on_done(result: JobResult) -> None:
            nonlocal ended
            ended += 1
            label = result.job.label
            reason = self._check_result(waiting[label], result)
            if reason is not None:
                failed[label] = reason
            elif not keep and not self.experiment.keep_checkpoints:
                shutil.rmtree(waiting[label].run_dir / "checkpoints", ignore_errors=True)
            outcome = reason or f"done in {result.seconds:.0f} s"
            self.announce(f"[{ended}/{len(queue)}] {label}: {outcome}")
            # after each end, so that a comparison that is stopped has what was finished
            self.write("running")
            # a rejected configuration would be rejected with every seed
            if result.returncode == BAD_CONFIGURATION and label not in resumed and not result.timed_out:
                raise UserError(f"run {label} was rejected: {reason}; log: {result.job.log}")

        run_jobs(queue, self.ray.jobs, self.experiment.timeout_s, on_done)
        return failed

    def write(self, status: str) -> Comparison:
        """Summarise all runs so far into comparison.json; `status` "done" or "failed" also draws the figures."""
        return self.save(self.summary(status))

    def summary(self, status: str) -> Comparison:
        """All runs so far, with the command of each arm."""
        comparison = summarise(self.experiment, self.folder, status, self.invocation)
        for arm, by_seed in plan_comparison(self.experiment, self.folder).items():
            first = next(iter(by_seed.values()))
            comparison.arms[arm].command = _shown(self.command(first, False))
        return comparison

    def save(self, comparison: Comparison) -> Comparison:
        """Write comparison.json, and the figures if the comparison has ended."""
        text = json.dumps(finite_or_none(comparison.as_dict()), indent=1, ensure_ascii=False)
        write_atomically(self.folder / "comparison.json", text + "\n")
        if comparison.status != "running":
            draw(self.experiment, self.folder, comparison)
        return comparison

    def _program(self, plan: RunPlan, resume: bool) -> tuple[str, ...]:
        return (*self.command(plan, resume), *(self.ray.arguments(_load(plan)) if self.ray.wanted else ()))

    def _check_result(self, plan: RunPlan, result: JobResult) -> str | None:
        reason = result.reason
        # a program may end with code 0 before its run is done
        if reason is None and not run_status.is_finished(plan):
            reason = "it ended without a result.json with status done"
        if reason is not None:
            run_status.mark(plan, reason)
        return reason

    def _log(self, plan: RunPlan) -> Path:
        return self.folder / "logs" / f"{shortened_name(plan.label.replace('/', '_'), 200)}.log"


def _checked_configurations(experiment: ExperimentConfig, folder: Path) -> list[Any]:
    """Read every configuration with its overrides, so that a typo in the last arm shows before the first run."""
    starts = _arms_read_at_start(experiment)
    configs = []
    for arm, plan in _plans(experiment, folder):
        configs.append(config := _load(plan))
        if arm in starts and not config.evaluation.at_start:
            raise UserError(
                f"{starts[arm]} uses the evaluation before training, but evaluation.at_start of {plan.label} is "
                "false; set it to true"
            )
    return configs


def _plans(experiment: ExperimentConfig, folder: Path) -> Iterator[tuple[str, RunPlan]]:
    """Every configuration with its overrides: the preparations, without an arm, then the first seed of each arm."""
    for plan in plan_preparations(experiment, folder):
        yield "", plan
    for arm in experiment.arms:
        # an arm without a sweep has one configuration
        for value in [None] if experiment.sweep is None else experiment.sweep.values:
            yield arm, plan_arm_run(experiment, folder, arm, experiment.seeds[0], value)


def _load(plan: RunPlan) -> Any:
    from mmrl.config import load_run

    try:
        return load_run(plan.config, plan.overrides)[1]
    except UserError as error:
        raise UserError(f"run {plan.label} would be rejected: {error}") from error


def _arms_read_at_start(experiment: ExperimentConfig) -> dict[str, str]:
    """Arms of which the evaluation before any update counts, and the setting that reads it."""
    found = {} if experiment.collapse is None else dict.fromkeys(experiment.arms, "`collapse`")
    reading = [arm for arm in experiment.arms if experiment.arm(arm).reads == "start"]
    return found | {experiment.source(arm): f"arms.{arm}.reads" for arm in reading}


def _shown(command: Sequence[str]) -> str:
    module = [sys.executable, "-m", "mmrl.cli"]
    return shlex.join(["mmrl", *command[3:]] if list(command[:3]) == module else command)


def say(line: str) -> None:
    """Print a line without buffering."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
