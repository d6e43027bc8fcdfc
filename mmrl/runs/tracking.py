"""The tracker of a run's metrics and its sinks: JSON Lines, the console, TensorBoard, wandb and trackio."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import re
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import Context, ContextVar
from dataclasses import dataclass
from datetime import timedelta
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO
from weakref import WeakValueDictionary

from mmrl.errors import UserError
from mmrl.fields import rare
from mmrl.recipes import EVALUATIONS, all_recipes, metric_tables
from mmrl.runs.metrics import DIVERSITY, METRICS, STAGES, STAGES_BETWEEN, label, measured
from mmrl.runs.notebook import NotebookSink, in_notebook
from mmrl.runs.records import JsonLines, read_steps
from mmrl.runs.statistics import HEADLINES, SHARES

if TYPE_CHECKING:
    from rich.progress import Progress


_HEADER_EVERY = 25
QUIET_S = 10.0
"""Seconds between two lines without a terminal, such as in the log of a batch job."""
COLUMNS: dict[str, tuple[int, str, *tuple[str, ...]]] = {
    "reward": (8, ".4f", "reward/mean"),
    "success": (7, ".2f", "episode/success"),
    "return": (8, ".3f", "episode/return"),
    "turns": (5, ".1f", "episode/turns"),
    "calls": (5, ".2f", "episode/calls"),
    "invalid": (7, ".2f", "episode/unreadable"),
    "refused": (7, ".2f", "episode/refused"),
    "cut": (5, ".2f", "episode/cut"),
    "overflow": (8, ".0f", "env/overflow"),
    "failed": (6, ".0f", "env/failed"),
    "loss": (9, ".4f", "loss/total"),
    "KL": (9, ".2e", "policy/kl_ref", "policy/kl_old"),
    "entropy": (8, ".3f", "policy/entropy"),
    "dec/s": (7, ".0f", "tokens/per_second"),
}
"""Columns of the console: width, format, and metrics, of which the first one available in a step is shown."""
FAULTS = ("refused", "cut", "overflow", "failed")
"""Columns that appear once they are not 0."""
TOOL_ERRORS = "/tool_errors/"
"""Between the family and the kind of the metrics that count errors of tools."""
ENDS = {"low": "Lower", "high": "Upper"}
WILDCARD = re.compile("<(.+?)>")


class Sink(Protocol):
    """Receiver of metrics."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Receive the metrics of one finished step."""

    def evaluation(self, step: int, tag: str, split: str, metrics: Mapping[str, float]) -> None:
        """Receive the metrics of one evaluation."""

    def truncate_after(self, step: int) -> None:
        """Forget records of later steps before a resumed run writes them again."""

    def close(self) -> None:
        """Write pending records."""


class JsonlSink:
    """`metrics.jsonl` and `evaluations.jsonl` of the run folder; every record is on disk when `log` returns."""

    def __init__(self, run_dir: Path) -> None:
        self._metrics = JsonLines(run_dir / "metrics.jsonl")
        self._evaluations = JsonLines(run_dir / "evaluations.jsonl")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one record; `time` is seconds since the epoch."""
        # wall-clock time, so that runs on several machines can be put side by side
        self._metrics.append({"step": step, "time": round(time.time(), 3), **metrics})

    def evaluation(self, step: int, tag: str, split: str, metrics: Mapping[str, float]) -> None:
        """Append one record."""
        self._evaluations.append({"step": step, "tag": tag, "split": split, **metrics})

    def truncate_after(self, step: int) -> None:
        """Cut both files back to a step."""
        self._metrics.truncate_after(step)
        self._evaluations.truncate_after(step)

    def close(self) -> None:
        """Close both files."""
        self._metrics.close()
        self._evaluations.close()


class ConsoleSink:
    """A progress bar with the remaining time and one table line per step.

    Without a terminal, there is at most one line every 10 seconds, which ends with the remaining time.
    """

    def __init__(self, total_steps: int, *, every: int = 1, quiet: bool = False, stream: TextIO | None = None) -> None:
        from rich.console import Console

        # soft_wrap: without a terminal, rich would break lines at a guessed width
        self._console = Console(file=stream or sys.stdout, highlight=False, soft_wrap=True, quiet=quiet)
        self._total_steps = total_steps
        self._every = max(1, every)
        self._columns: list[str] = []
        self._lines = 0
        self._began: tuple[int, float] | None = None
        self._shown_s = -math.inf
        self.bar: Progress | None = None
        """The progress bar; None without a terminal."""
        if self._console.is_terminal and not quiet:
            self.bar = _progress_bar(self._console)
            self._task = self.bar.add_task("steps", total=total_steps)
            self.bar.start()
        _CONSOLES[id(self)] = self

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Move the bar and show the available `COLUMNS` and the seconds of each stage."""
        if self.bar is not None:
            self.bar.update(self._task, completed=step)
        now = time.monotonic()
        # from the first step logged, so that a resumed run's estimate leaves out the steps before it
        self._began = self._began or (step, now)
        # a log file gets a line every 10 s, even if steps are faster
        due = step % self._every == 0 and (self.bar is not None or now - self._shown_s >= QUIET_S)
        if due or step == self._total_steps or self._lines == 0:
            self._shown_s = now
            # a column stays once a step had it, so that lines keep their order
            columns = [name for name in COLUMNS if name in self._columns or _is_shown(name, metrics)]
            if columns != self._columns or self._lines % _HEADER_EVERY == 0:
                self._columns = columns
                self._console.print(_header(columns, self._total_steps), style="bold", markup=False)
            self._lines += 1
            left = "" if self.bar is not None else _left(self._began, (step, now), self._total_steps)
            self._console.print(_step_line(columns, step, self._total_steps, metrics) + left, markup=False)

    def evaluation(self, step: int, tag: str, split: str, metrics: Mapping[str, float]) -> None:
        """Show each accuracy and score with its interval, then held-out rewards and diversity without intervals."""
        count = f" of {int(metrics['n'])} tasks" if metrics.get("n") else ""
        line = f"evaluation at step {step} ({tag}, {split}{count}): {_evaluation_text(metrics)}"
        self._console.print(line, style="green", markup=False)
        for metric, column, values in _parts(metrics):
            cells = [f"{value} {estimate_text(name, metrics)}" for value, name in values.items()]
            self._console.print(f"  {label(metric)} by {column}: {', '.join(cells)}", style="green", markup=False)

    def truncate_after(self, step: int) -> None:
        """Start the bar at the step that the run resumes from."""
        if self.bar is not None:
            self.bar.reset(self._task, completed=step)

    def close(self) -> None:
        """Remove the bar from the screen."""
        _CONSOLES.pop(id(self), None)
        if self.bar is not None:
            self.bar.stop()


class TensorBoardSink:
    """Scalars for TensorBoard in `tensorboard/` of the run folder."""

    def __init__(self, run_dir: Path) -> None:
        if not tensorboard_installed():
            raise UserError("tracking.tensorboard=true requires tensorboard: pip install tensorboard")
        self._folder = run_dir / "tensorboard"
        self._purge_step: int | None = None
        self._writer: Any = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write each metric as a scalar."""
        for name, value in metrics.items():
            self._open().add_scalar(name, value, step)

    def evaluation(self, step: int, tag: str, split: str, metrics: Mapping[str, float]) -> None:
        """Write each metric below the split's name."""
        for name, value in metrics.items():
            self._open().add_scalar(f"{split}/{name}", value, step)

    def truncate_after(self, step: int) -> None:
        """Make TensorBoard hide later steps of earlier event files."""
        # closed, so that later events go to a new file with a purge step
        self.close()
        self._purge_step = step + 1

    def close(self) -> None:
        """Write pending events."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self) -> Any:
        if self._writer is None:
            # takes seconds to import
            from torch.utils.tensorboard import SummaryWriter

            if self._purge_step is not None:
                # else TensorBoard would read the new file before the old one
                _wait_for_a_later_name(self._folder)
            self._writer = SummaryWriter(str(self._folder), purge_step=self._purge_step)
        return self._writer


class ServiceSink:
    """wandb or trackio, which share `init`, `log` and `finish`."""

    def __init__(self, package: str, project: str, run_name: str, config: Mapping[str, Any]) -> None:
        try:
            # by name, so that neither is needed unless it is asked for
            service: Any = importlib.import_module(package)
        except ImportError as error:
            raise UserError(
                f"tracking.{package}={project}, but {package} is not installed ({error}): pip install {package}, "
                f"or remove tracking.{package} from the configuration"
            ) from error
        # a run that the user's program has open must stay open: by default, wandb's `init` would return it, and
        # trackio's, in the same context, would finish it
        separate = {"reinit": "create_new"} if package == "wandb" and service.run is not None else {}
        options = {"project": project, "name": run_name, "config": dict(config), **separate}
        self._run = Context().run(service.init, **options)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of one step."""
        self._run.log(dict(metrics), step=step)

    def evaluation(self, step: int, tag: str, split: str, metrics: Mapping[str, float]) -> None:
        """Send the metrics of one evaluation below the split's name."""
        self._run.log({f"{split}/{name}": value for name, value in metrics.items()}, step=step)

    def truncate_after(self, step: int) -> None:
        """Do nothing: a resumed run is a new run of the service."""

    def close(self) -> None:
        """Finish the run of the service."""
        self._run.finish()


def tensorboard_installed() -> bool:
    """Whether the tensorboard package can be imported."""
    return importlib.util.find_spec("tensorboard") is not None


def _parts(names: Collection[str]) -> Iterator[tuple[str, str, dict[str, str]]]:
    """Metric, data column and the metric's name by value of the column."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for name in names:
        metric, _, part = name.rpartition("/")
        column, equals, value = part.partition("=")
        # only what breaks down a headline metric, and no ends of intervals
        if metric in names and name.startswith(HEADLINES) and part not in ENDS:
            found.setdefault((metric, column) if equals else (metric, "task"), {})[value if equals else part] = name
    for (metric, column), parts in found.items():
        yield metric, column, parts


# held weakly: a run that never came to its end, as after an error in a notebook, must not silence the bars of the next
_CONSOLES: WeakValueDictionary[int, ConsoleSink] = WeakValueDictionary()
"""Consoles of the runs in this process, the latest last."""


_HIDDEN: ContextVar[bool] = ContextVar("hidden", default=False)


@contextmanager
def bars_hidden(hidden: bool) -> Iterator[None]:
    """Show no progress bar inside the context if `hidden` is set, as with `tracking.quiet`."""
    token = _HIDDEN.set(hidden)
    try:
        yield
    finally:
        _HIDDEN.reset(token)


@contextmanager
def progress(unit: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on the terminal, below the run's bar if there is one; nothing if the run shows no bar.

    Yields:
        A function that moves it by a number of units.
    """
    from rich.console import Console

    console = Console()
    runs = list(_CONSOLES.values())
    if _HIDDEN.get() or in_notebook() or not (runs[-1].bar is not None if runs else console.is_terminal):
        yield lambda count: None
        return
    # two live displays on one terminal would draw over each other
    running = runs[-1].bar if runs else None
    with nullcontext(running) if running is not None else _progress_bar(console) as bar:
        task = bar.add_task(unit, total=total)
        try:
            yield lambda count: bar.advance(task, count)
        finally:
            bar.remove_task(task)


def _progress_bar(console: Any) -> Progress:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        "elapsed",
        TimeElapsedColumn(),
        "left",
        TimeRemainingColumn(),
        console=console,
        transient=True,
        refresh_per_second=2,
        speed_estimate_period=3600,  # rich forgets older samples, and a step may take longer than its 30 s
    )


def _evaluation_text(metrics: Mapping[str, float]) -> str:
    shown = [f"{label(name)} {estimate_text(name, metrics)}" for name in measured([metrics], HEADLINES)]
    heldout = [f"{label(name)} {metrics[name]:.3f}" for name in measured([metrics], ("heldout/",))]
    parts = [", ".join(shown) or "nothing measured"]
    parts += [f"held out: {', '.join(heldout)}"] if heldout else []
    parts += [f"diversity {metrics[DIVERSITY]:.2f}"] if DIVERSITY in metrics else []
    return "; ".join(parts)


def _step_text(metrics: Mapping[str, float]) -> str:
    found = ((name, _value(name, metrics)) for name in COLUMNS if _is_shown(name, metrics))
    numbers = [f"{name} {value:{COLUMNS[name][1]}}" for name, value in found]
    return ", ".join([*numbers, f"seconds {_seconds_by_stage(metrics).strip()}{_environment_text(metrics)}"])


def _header(columns: Sequence[str], total_steps: int) -> str:
    cells = [f"{name:>{COLUMNS[name][0]}}" for name in columns]
    return " ".join([f"{'step':>{_step_width(total_steps)}}", *cells, " seconds"])


def _step_line(columns: Sequence[str], step: int, total_steps: int, metrics: Mapping[str, float]) -> str:
    cells = [_cell(_value(name, metrics), *COLUMNS[name][:2]) for name in columns]
    first = f"{f'{step}/{total_steps}':>{_step_width(total_steps)}}"
    return " ".join([first, *cells, _seconds_by_stage(metrics)]).rstrip() + _environment_text(metrics)


def _value(column: str, metrics: Mapping[str, float]) -> float | None:
    return next((metrics[name] for name in COLUMNS[column][2:] if name in metrics), None)


def _is_shown(column: str, metrics: Mapping[str, float]) -> bool:
    value = _value(column, metrics)
    return value is not None and (column not in FAULTS or value != 0)


def _environment_text(metrics: Mapping[str, float]) -> str:
    """Seconds of an environment's step and errors of tools, each from a comma on; empty if there are none."""
    text = ""
    if "time/env_step_p50" in metrics:
        text = f", environment step {metrics['time/env_step_p50']:.2g} (p90 {metrics['time/env_step_p90']:.2g})"
    kinds = [(name.partition(TOOL_ERRORS)[2], n) for name, n in metrics.items() if TOOL_ERRORS in name and n]
    return text + (f", tool errors {', '.join(f'{kind} {n:.2f}' for kind, n in kinds)}" if kinds else "")


def _left(began: tuple[int, float], current: tuple[int, float], total_steps: int) -> str:
    """Time that the remaining steps take at the speed so far; empty if it is not known yet."""
    # speed over all steps so far: single steps vary with the length of answers
    steps = current[0] - began[0]
    if steps <= 0 or current[0] >= total_steps:
        return ""
    seconds = (current[1] - began[1]) / steps * (total_steps - current[0])
    return f", {timedelta(seconds=round(seconds))} left"


def _step_width(total_steps: int) -> int:
    return max(len("step"), 2 * len(str(total_steps)) + 1)


def _cell(value: float | None, width: int, form: str) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width}{form}}"


def _seconds_by_stage(metrics: Mapping[str, float]) -> str:
    inside, between = (
        [f"{stage} {metrics[f'time/{stage}']:.2f}" for stage in stages if metrics.get(f"time/{stage}", 0.0) >= 0.005]
        for stages in (STAGES, STAGES_BETWEEN)
    )
    total = metrics.get("time/step")
    shown = "" if total is None else f" {total:.2f}"
    shown += f" ({', '.join(inside)})" if inside else ""
    return shown + "".join(f" + {stage}" for stage in between)


def estimate_text(name: str, metrics: Mapping[str, float]) -> str:
    """A fraction in percent, or any other measurement unchanged."""
    low, high = metrics.get(f"{name}/low"), metrics.get(f"{name}/high")
    share = name.startswith(SHARES)
    # shares in per cent, scores with three digits
    factor, digits = (100.0, 1) if share else (1.0, 3)
    value = f"{factor * metrics[name]:.{digits}f}{'%' if share else ''}"
    if low is None or high is None or math.isnan(low) or math.isnan(high):
        return value
    return f"{value} [{factor * low:.{digits}f}, {factor * high:.{digits}f}]"


def _wait_for_a_later_name(folder: Path) -> None:
    """Wait, a second at most, until a new event file comes last.

    TensorBoard reads files in the order of their names, events.out.tfevents.<second>.<host>.<process>.<count>, as
    texts: within one second file 10 comes before file 9.
    """
    seconds = [path.name.split(".")[3] for path in folder.glob("events.out.tfevents.*")]
    latest = max((int(text) for text in seconds if text.isdigit()), default=0)
    # time.time(), as the file's name is made of it
    while latest <= time.time() < latest + 1:
        time.sleep(0.05)


@dataclass
class TrackingConfig:
    """Destinations of metrics in addition to `metrics.jsonl` and `evaluations.jsonl`."""

    quiet: bool = rare(False)
    """Do not print anything on the console."""
    console_every: int = rare(1)
    """Print a console line every this many steps; evaluations are always shown."""
    tensorboard: bool | None = rare(None)
    """Write TensorBoard events; null means if tensorboard is installed."""
    wandb: str | None = None
    """Weights & Biases project to log to; null disables it."""
    trackio: str | None = rare(None)
    """Trackio project to log to; null disables it."""
    run_name: str | None = rare(None)
    """Name of the run in wandb and trackio; null uses the name of the run folder."""
    strict: bool = rare(False)
    """Raise an error for metrics that are not defined in a METRICS table; used in tests."""


class Tracker:
    """Passes every metric to the JSON Lines files and all other sinks; `strict` rejects undefined metrics."""

    def __init__(
        self,
        run_dir: Path,
        sinks: Sequence[Sink] = (),
        *,
        strict: bool = False,
        definitions: Mapping[str, str] | None = None,
    ) -> None:
        self._sinks: list[Sink] = [JsonlSink(Path(run_dir)), *sinks]
        self._strict = strict
        self._definitions = metric_definitions() if definitions is None else definitions

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one finished step, counted from 1; non-finite values are written as null."""
        self._check(metrics)
        for sink in self._sinks:
            sink.log(step, metrics)

    def evaluation(self, step: int, tag: str, split: str, metrics: Mapping[str, float]) -> None:
        """Record one evaluation of a split, tagged before, during or after training; step 0 is the initial policy."""
        self._check(metrics)
        for sink in self._sinks:
            sink.evaluation(step, tag, split, metrics)

    def truncate_after(self, step: int) -> None:
        """Drop the records of later steps; called once when a run resumes from the checkpoint of `step`."""
        for sink in self._sinks:
            sink.truncate_after(step)

    def close(self) -> None:
        """Close every sink."""
        for sink in self._sinks:
            sink.close()

    def _check(self, metrics: Mapping[str, float]) -> None:
        # a run must not end over a metric that lacks its sentence; the tests do
        if not self._strict:
            return
        for name in metrics:
            if describe_metric(name, self._definitions) is None:
                near = get_close_matches(name, self._definitions, n=3)
                hint = f"; did you mean {', '.join(near)}?" if near else ""
                raise ValueError(f"metric {name!r} is not described in METRICS of its package's entries.py{hint}")


def build_tracker(
    config: TrackingConfig,
    run_dir: Path,
    *,
    total_steps: int,
    run_config: Mapping[str, Any] | None = None,
    recipe: str = "",
) -> Tracker:
    """Create the tracker for a configuration."""
    run_dir = Path(run_dir)
    sinks: list[Sink] = []
    for package, project in (("wandb", config.wandb), ("trackio", config.trackio)):
        if project is not None:
            # the folder's name, so that a run has one name everywhere
            name = config.run_name or run_dir.resolve().name
            sinks.append(ServiceSink(package, project, name, run_config or {}))
    wanted = tensorboard_installed() if config.tensorboard is None else config.tensorboard
    if wanted:
        sinks.append(TensorBoardSink(run_dir))
    if in_notebook() and not config.quiet:
        sinks.append(NotebookSink(total_steps, _step_text, _evaluation_text))
    else:
        sinks.append(ConsoleSink(total_steps, every=config.console_every, quiet=config.quiet))
    return Tracker(run_dir, sinks, strict=config.strict, definitions=metric_definitions(recipe))


@functools.cache
def metric_definitions(recipe: str = "") -> dict[str, str]:
    """Definitions of metrics by name: shared ones, those of a recipe's package and of packages that it builds on.

    Without a recipe of the table, the sentences of all packages, and of shared names those that fit every package.
    """
    known = recipe in all_recipes() or recipe in EVALUATIONS
    tables = (METRICS, *metric_tables(recipe), *(() if known else (METRICS,)))
    return {name: sentence for table in tables for name, sentence in table.items()}


def describe_metric(name: str, definitions: Mapping[str, str] | None = None) -> str | None:
    """Sentence that defines a metric; None if there is none.

    `reward/format` is found under `reward/<term>`, `accuracy/greedy` under `accuracy/<greedy|sampled>`, which precedes
    `accuracy/<verifier>`. `/low`, `/high` and `/column=value` may follow any metric.
    """
    table = metric_definitions() if definitions is None else definitions
    whole, _, last = name.rpartition("/")
    # an interval's end is described by its metric
    if last in ENDS and describe_metric(whole, table) is not None:
        return f"{ENDS[last]} end of the 95% interval of {whole}."
    fitting = [pattern for pattern in table if _expression(pattern).fullmatch(name)]
    if fitting:
        # the most specific pattern that fits
        return table[min(reversed(fitting), key=openness)]  # of equally open ones that of the recipe's own package
    sentence = describe_metric(whole, table) if "=" in last else None
    return None if sentence is None else f"{sentence.rstrip('.')}, for {last}."


def openness(pattern: str) -> list[int]:
    """For each part of a metric's name: 0 if it is fixed, 1 if it is one of some values, 2 if it is any."""
    return [max((1 if "|" in name else 2 for name in WILDCARD.findall(part)), default=0) for part in pattern.split("/")]


@functools.cache
def _expression(pattern: str) -> re.Pattern[str]:
    """`<a|b>` is one of its values, `<any>` one part of a name without `=`."""
    parts = [
        re.escape(part) if not number % 2 else f"(?:{part})" if "|" in part else "[^/=]+"
        for number, part in enumerate(WILDCARD.split(pattern))
    ]
    return re.compile("".join(parts))


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Read `metrics.jsonl` of a run folder: one record a step in rising order, the later of two records of a step."""
    path = Path(run_dir) / "metrics.jsonl"
    # the later one of two records of a step, as a run that was killed may leave
    records = {record["step"]: record for record in read_steps(path)}
    return [_numbers(records[step], path) for step in sorted(records)]


def read_evaluations(run_dir: Path, split: str | None = None, tag: str | None = None) -> list[dict[str, Any]]:
    """Read `evaluations.jsonl` of a run folder in ascending order of steps, optionally for one split and tag."""
    path = Path(run_dir) / "evaluations.jsonl"
    records = {}
    for record in read_steps(path):
        record = _numbers(record, path, texts=("tag", "split"))
        if split in (None, record.get("split")) and tag in (None, record.get("tag")):
            records[record["step"], record.get("tag"), record.get("split")] = record
    return sorted(records.values(), key=lambda record: record["step"])


def _numbers(record: dict[str, Any], path: Path, texts: Sequence[str] = ()) -> dict[str, Any]:
    """A record with NaN for null; raises UserError if a value has a type that the suite does not write."""
    # one message for all kinds of edited files
    for name, value in record.items():
        if value is not None and not isinstance(value, str if name in texts else int | float):
            kind = "a text" if name in texts else "a number"
            found = f"step {record['step']} has {name} {value!r:.60}"
            raise UserError(f"{path}: {found}; expected {kind}; fix or remove that line")
    return {name: math.nan if value is None and name not in texts else value for name, value in record.items()}
