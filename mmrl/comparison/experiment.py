"""An experiment file: arms on shared seeds, their metric and their budget."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from mmrl.comparison.evidence import EvidenceConfig, check_subjects
from mmrl.errors import UserError, did_you_mean
from mmrl.fields import bounded, choice, only_with
from mmrl.files import is_file, label_problem, own_config

BASELINE_FINAL = "baseline_final"
MIN_OF_ARMS_FINAL = "min_of_arms_final"
BASELINE_SPENDS = ("reach", "all")
METRIC_OVER = ("last_evaluation", "steps")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass
class PrepareConfig:
    """A run that all arms share, such as the supervised warm start."""

    config: str = MISSING
    """Configuration file of the run."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Values that override the file, by dotted key."""
    run_dir: str = MISSING
    """Its run folder, relative to the output folder; a run that is already finished there is not repeated."""


@dataclass
class ArmConfig:
    """One of the compared methods."""

    config: str | None = None
    """Configuration file; null means the experiment's `base`."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Values that this arm changes, by dotted key; {output_dir} in a text is the output folder, {seed} the run's seed,
    which gives an arm other data at each seed."""
    metrics: dict[str, str] = field(default_factory=dict)
    """Names of the experiment's metrics in runs of this arm, if its recipe uses different names."""
    runs_of: str | None = None
    """Another arm whose runs this arm reads, with its own `metrics`, such as a rule that every run measures in addition
    to what it trains. This arm has no runs of its own."""
    value_of: str | None = None
    """Arm whose chosen value of the swept parameter this arm uses, for example a shuffled-reward control, which has no
    signal to tune on."""
    reads: str = choice("end", ("end", "start"))
    """Evaluation of its runs to compare: end (the last one) or start (before any update). With `runs_of`, start makes
    an arm that represents the initial model."""


@dataclass
class SweepConfig:
    """A parameter chosen on seeds that the comparison does not use, per arm or for all arms together."""

    parameter: str = "trainer.learning_rate"
    """Dotted key of the parameter."""
    values: list[Any] = field(default_factory=list)
    """Values tried for every arm."""
    seeds: list[int] = field(default_factory=list)
    """Seeds of the sweep; they must differ from the seeds of the comparison."""
    metric: str | None = None
    """Metric by which the value is chosen; null means the experiment's."""
    higher_is_better: bool | None = None
    """Whether larger values of the metric are better; null means the experiment's setting."""
    extend: int = bounded(0, at_least=0)
    """Maximum number of values added for an arm, each spaced like the last two: beyond the edge if it is best there,
    and smaller learning rates if the best one ends worse than the evaluation before training."""
    shared: bool = False
    """Choose one value for all arms, the one with the best mean over arms, instead of one per arm. If seeds differ more
    than values do, the best value of a single arm is a matter of luck."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Overrides that runs of the sweep get after all others, such as fewer steps."""


@dataclass
class WorkConfig:
    """Cost of each arm to reach a target, and its ratio to the baseline's.

    Costs are counted from the start of the arm's own run; shared preparations are not part of them.
    """

    metric: str | None = None
    """Evaluation metric whose curve is read; null means the experiment's."""
    higher_is_better: bool | None = None
    """Whether larger values of the metric are better; null means the experiment's setting."""
    target: str | int | float = BASELINE_FINAL
    """`baseline_final`, the baseline's own final value at each seed, or one number for all seeds."""
    baseline_last: int = only_with(bounded(1, at_least=1), target=BASELINE_FINAL)
    """Number of last evaluations of the baseline that are averaged to its final value; more than one reduces noise in
    the target."""
    baseline_share: float = only_with(bounded(1.0, above=0, at_most=1), target=BASELINE_FINAL)
    """Fraction of the baseline's final value used as the target."""
    steps: int = bounded(0, at_least=0)
    """Number of training steps averaged per point of the curve, for a metric that is logged at each step, such as
    episode/success; 0 uses the evaluations."""
    baseline_spends: str = choice("reach", BASELINE_SPENDS)
    """Cost of the baseline in the ratios: reach (until its own curve reaches the target) or all (its whole run)."""
    costs: dict[str, dict[str, float]] = field(default_factory=dict)
    """Costs by name, each a weighted sum of evaluation counters such as {cost/forward_rows: 1, cost/train_rows: 3}."""

    def validate(self) -> None:
        """Check that the fields are consistent; raises ValueError with the key."""
        _check_number("work.target", self.target, BASELINE_FINAL)
        if not self.costs:
            raise ValueError("`work.costs` is empty; add at least one cost, such as images: {cost/samples: 1}")
        for name, weights in self.costs.items():
            _check_cost(name, weights)


@dataclass
class AtConfig:
    """Values of the arms at equal cost; requires `work`, whose metric is used."""

    cost: str = MISSING
    """Name of the cost in `work.costs`."""
    value: str | int | float = MIN_OF_ARMS_FINAL
    """`min_of_arms_final` (for each seed, the largest cost that every finished arm has reached) or one number."""


@dataclass
class CollapseConfig:
    """Criterion for collapsed runs: their final value is below a fraction of their first value."""

    metric: str = MISSING
    """Evaluation metric for which higher is better, such as a reward that is never optimised."""
    below: float = bounded(0.5, above=0, at_most=1)
    """Fraction of the value before training below which the final value counts as collapsed."""


@dataclass
class StoredArm:
    """Numbers that a page of docs/results states for one arm, in the units of the page."""

    value: float = MISSING
    """Mean over the seeds."""
    difference: list[float] = field(default_factory=list)
    """Mean, lower and upper end of the paired difference to the baseline; only the two ends if the page states no mean,
    which is then computed from the values. Empty for the baseline, or if there is none."""
    seeds: list[float] = field(default_factory=list)
    """Value of each seed in the experiment's order, or the minimum and the maximum."""
    curve: list[list[float]] = field(default_factory=list)
    """Learning curve: a [step, mean, minimum, maximum] of the seeds for each point."""


@dataclass
class StoredConfig:
    """Numbers of a comparison whose runs no longer exist, from which `scripts/figures.py` draws its figure."""

    unit: str = ""
    """Readable name of the measured quantity with its unit; empty means the figure's."""
    baseline: str = ""
    """Arm that the differences are relative to; empty means the experiment's."""
    curves_title: str = ""
    """Title of the learning curves."""
    curve_seeds: int = 0
    """Number of seeds of the learning curves; 0 means all seeds of the experiment."""
    arms: dict[str, StoredArm] = field(default_factory=dict)
    """Numbers of each row of the figure, from top to bottom; a row does not have to be an arm with runs."""

    def validate(self, baseline: str) -> None:
        """Check that the numbers are complete; raises ValueError with the row."""
        if baseline not in self.arms:
            raise ValueError(f"`figure.stored.arms` lacks the baseline '{baseline}'; it has: {', '.join(self.arms)}")
        for name, arm in self.arms.items():
            ends = arm.difference
            if len(ends) not in (0, 2, 3) or (ends and not ends[-2] <= ends[0] <= ends[-1]):
                raise ValueError(f"`figure.stored.arms.{name}.difference` is {ends}; give [mean, low, high]")
            if any(len(point) != 4 for point in arm.curve):
                raise ValueError(f"a point of `figure.stored.arms.{name}.curve` is not [step, mean, minimum, maximum]")


@dataclass
class FigureConfig:
    """Presentation of the figure of a comparison."""

    claim: str = ""
    """The finding in one sentence, used as the title if the runs agree with the stored findings; otherwise the title is
    the name."""
    labels: dict[str, str] = field(default_factory=dict)
    """Readable names of arms."""
    unit: str = ""
    """Readable name of the metric with its unit; empty shows the metric's own name."""
    highlight: list[str] = field(default_factory=list)
    """Arms that the claim is about; all others are grey. If empty, every arm has its own colour."""
    stored: StoredConfig | None = None
    """Numbers from the page to draw if the runs no longer exist."""


@dataclass
class ExperimentConfig:
    """A comparison of arms on the same seeds and the same budget."""

    name: str = MISSING
    """Name in the figure and in comparison.json."""
    arms: dict[str, ArmConfig | None] = field(default_factory=dict)
    """The compared methods by name; an empty entry is `base` unchanged."""
    baseline: str = MISSING
    """Arm that the others are compared with."""
    seeds: list[int] = field(default_factory=list)
    """Seeds of the comparison; every arm is run once per seed."""
    metric: str = MISSING
    """Compared metric; see `metric_over`."""
    metric_over: str = choice("last_evaluation", METRIC_OVER)
    """last_evaluation, or steps: the mean over all training steps of a metric logged at each step, such as
    episode/success, the success rate of the training episodes over the whole budget."""
    base: str | None = None
    """Configuration file of arms that do not set their own."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Overrides that every arm gets before its own."""
    prepare: list[PrepareConfig] = field(default_factory=list)
    """Runs that are made first, in this order."""
    sweep: SweepConfig | None = None
    """Parameter to choose per arm before the comparison; null for none."""
    secondary_metrics: list[str] = field(default_factory=list)
    """Additional metrics to report, from the last evaluation or else the last step; `split/name` selects another task
    set."""
    work: WorkConfig | None = None
    """Cost of each arm until it reaches a target; null for none."""
    at: AtConfig | None = None
    """Values at equal cost; null for none."""
    collapse: CollapseConfig | None = None
    """Criterion for collapsed runs; null disables it."""
    split: str | None = None
    """Task set whose evaluation is compared; null means the first one."""
    higher_is_better: bool = True
    """Whether larger values of the metric are better; used to choose the sweep's value and to count wins."""
    margin: float | None = bounded(None, above=0)
    """Smallest difference of the metric that matters, in its own unit, fixed before the runs. Each difference then gets
    a verdict: holds, no effect within the margin, inconclusive or negative. Null gives no verdicts."""
    budget: str = ""
    """Budget of every arm, in words."""
    prepare_minutes: float = bounded(0.0, at_least=0)
    """Minutes on one core for the preparations."""
    run_minutes: float | None = bounded(None, above=0)
    """Minutes on one core for a run of an arm, from a pilot; null if unknown."""
    jobs: int = bounded(2, at_least=1)
    """Number of parallel runs, with one thread each."""
    keep_checkpoints: bool = True
    """Whether finished runs of the sweep and of the comparison keep their checkpoints, which take 1.6 GB each for a
    model with 135 million parameters. Checkpoints of preparations are always kept."""
    timeout_s: float = bounded(7200.0, above=0)
    """Time limit in seconds after which a run is stopped and counted as failed."""
    figure: FigureConfig = field(default_factory=FigureConfig)
    """Title, names and emphasis of comparison.png."""
    evidence: EvidenceConfig | None = None
    """Results of a finished comparison and their meaning; null before it has run."""

    def arm(self, name: str) -> ArmConfig:
        """Settings of one arm."""
        return self.arms[name] or ArmConfig()

    def validate(self) -> None:
        """Check that the fields are consistent; raises ValueError with the key."""
        self._check_arms()
        _check_seeds("seeds", self.seeds)
        self._check_sweep()
        first = next((arm for arm in self.arms if self.arm(arm).reads == "start"), None)
        if self.metric_over == "steps" and first is not None:
            raise ValueError(f"`metric_over` is steps, but arms.{first} reads the start, which has no steps")
        self._check_work()
        self._check_losses()
        self._check_reserved()
        stored = self.figure.stored
        if stored is not None:
            stored.validate(stored.baseline or self.baseline)
        shown = [*self.arms, *(arm for arm in (stored.arms if stored else ()) if arm not in self.arms)]
        for key, named in (("labels", self.figure.labels), ("highlight", self.figure.highlight)):
            for arm in named:
                if arm not in shown:
                    hint = did_you_mean(arm, shown)
                    raise ValueError(f"`figure.{key}` contains '{arm}'; {hint}arms: {', '.join(shown)}")
        if self.evidence is not None:
            # evidence may only speak of what is measured
            metrics = [self.metric, *self.secondary_metrics]
            self.evidence.check(self.arms, self.baseline, metrics, self.higher_is_better, self.margin)
            if self.run_minutes is None:
                raise ValueError(
                    "`evidence` requires `run_minutes`, from which `mmrl reproduce` estimates its run time"
                )

    def source(self, name: str) -> str:
        """Arm whose runs an arm reads: its own, or those of `runs_of`."""
        return self.arm(name).runs_of or name

    def tuned(self, name: str) -> str:
        """Arm whose sweep chooses an arm's value: its own, or that of `value_of`."""
        return self.arm(self.source(name)).value_of or self.source(name)

    def _check_arms(self) -> None:
        # one arm has nothing to be compared with
        if len(self.arms) < 2:
            raise ValueError(f"`arms` needs at least two entries, got {len(self.arms)}")
        for arm in self.arms:
            if not _NAME.fullmatch(arm):
                raise ValueError(f"arm name '{arm}' is used as a folder name; use letters, digits, '.', '_' and '-'")
            if problem := label_problem(arm):
                raise ValueError(f"arm name '{arm:.130}' is used as a folder name; {problem}")
            self._check_runs_of(arm)
            self._check_value_of(arm)
            if self.arm(self.source(arm)).config is None and self.base is None:
                raise ValueError(f"arm '{arm}' has no `config` and there is no `base`")
        if self.baseline not in self.arms:
            hint = did_you_mean(self.baseline, self.arms)
            raise ValueError(f"`baseline` is '{self.baseline}'; {hint}arms: {', '.join(self.arms)}")

    def _check_runs_of(self, arm: str) -> None:
        settings = self.arm(arm)
        if settings.runs_of is None:
            return
        # chains of arms that read one another would hide whose runs they are
        running = [name for name in self.arms if self.arm(name).runs_of is None]
        if settings.runs_of not in running:
            raise ValueError(f"arms.{arm}.runs_of is '{settings.runs_of}'; arms with runs: {', '.join(running)}")
        if settings.config is not None or settings.overrides:
            raise ValueError(f"arm '{arm}' reads runs of '{settings.runs_of}', so it must not have config or overrides")
        if not settings.metrics and settings.reads == "end":
            difference = "set its `metrics`, or `reads: start`"
            raise ValueError(f"arm '{arm}' reads runs of '{settings.runs_of}'; {difference}")

    def _check_value_of(self, arm: str) -> None:
        named = self.arm(arm).value_of
        if named is None:
            return
        if self.sweep is None or self.sweep.shared:
            raise ValueError(f"arms.{arm}.value_of requires a `sweep` that is not shared")
        tuned = [name for name in self.arms if self.arm(name).value_of is self.arm(name).runs_of is None]
        if named not in tuned or self.arm(arm).runs_of is not None:
            raise ValueError(f"arms.{arm}.value_of is '{named}'; arms with their own sweep: {', '.join(tuned)}")

    def _check_sweep(self) -> None:
        if self.sweep is None:
            return
        _check_seeds("sweep.seeds", self.sweep.seeds)
        if not self.sweep.values:
            raise ValueError("`sweep.values` is empty; add the values to try, or remove `sweep`")
        numbers = [value for value in self.sweep.values if isinstance(value, int | float) and value > 0]
        if self.sweep.extend and (self.sweep.shared or len(set(numbers)) < max(2, len(self.sweep.values))):
            raise ValueError(
                "`sweep.extend` requires at least two different positive values, and `sweep.shared` to be off"
            )
        if len(set(map(str, self.sweep.values))) < len(set(map(repr, self.sweep.values))):
            raise ValueError(f"`sweep.values` has a number and a text that read alike: {self.sweep.values}")
        # a value chosen on a seed must not be judged on it
        shared = sorted(set(self.sweep.seeds) & set(self.seeds))
        if shared:
            raise ValueError(f"seeds {shared} are in `seeds` and in `sweep.seeds`; the comparison needs fresh seeds")

    def _check_work(self) -> None:
        if self.work is not None:
            self.work.validate()
            if self.arm(self.baseline).reads == "start":
                raise ValueError(
                    f"`work` compares costs with the baseline's, but arms.{self.baseline} reads the start, which costs "
                    "nothing; choose an arm that trains as the `baseline`"
                )
        if self.at is not None:
            if self.work is None:
                raise ValueError("`at` requires `work`, which defines the metric and the costs")
            if self.at.cost not in self.work.costs:
                raise ValueError(f"`at.cost` is '{self.at.cost}'; costs of `work`: {', '.join(self.work.costs)}")
            _check_number("at.value", self.at.value, MIN_OF_ARMS_FINAL)

    def _check_losses(self) -> None:
        chosen = [("", self.metric, self.higher_is_better)]
        for section, part in (("sweep.", self.sweep), ("work.", self.work)):
            if part is not None and part.metric is not None and part.higher_is_better is None:
                chosen.append((section, part.metric, self.higher_is_better))
        for section, metric, higher_is_better in chosen:
            if "/loss/" in f"/{metric}" and higher_is_better:
                raise ValueError(
                    f"less of `{section}metric` {metric} is better; set `{section}higher_is_better: false`"
                )

    def _check_reserved(self) -> None:
        swept = [] if self.sweep is None else [self.sweep.parameter]
        for where, overrides in _all_overrides(self):
            for text in dotted_overrides(overrides, Path()):
                key = text.partition("=")[0]
                # the experiment sets them for each run
                if key in ("seed", "output_dir") and not where.startswith("prepare"):
                    raise ValueError(f"`{where}` sets '{key}', which the experiment sets itself for every run")
                if key in swept and where.startswith(("arms", "sweep")):
                    raise ValueError(f"`{where}` sets '{key}', which `sweep` chooses")


def load_experiment(path: Path) -> ExperimentConfig:
    """Read and check an experiment file."""
    from mmrl.config import load

    experiment = load(path, ExperimentConfig)
    _keep_references(experiment)
    here = Path(path).parent
    if experiment.base is not None:
        experiment.base = str(_existing(experiment.base, here, f"{path}: base"))
    for arm, settings in experiment.arms.items():
        if settings is not None and settings.config is not None:
            settings.config = str(_existing(settings.config, here, f"{path}: arms.{arm}.config"))
    for index, preparation in enumerate(experiment.prepare):
        preparation.config = str(_existing(preparation.config, here, f"{path}: prepare[{index}].config"))
    if experiment.evidence is not None:
        check_subjects(experiment.evidence, str(path))
    return experiment


def _keep_references(experiment: ExperimentConfig) -> None:
    """Set overrides back to the texts of the file: their references and escaped dollars are resolved by the runs.

    So what an environment variable holds is in no command, marker or result.
    """
    from mmrl.config import to_container

    given = to_container(experiment)
    experiment.overrides = given["overrides"]
    for arm, settings in experiment.arms.items():
        if settings is not None:
            settings.overrides = given["arms"][arm]["overrides"]
    if experiment.sweep is not None:
        experiment.sweep.values = given["sweep"]["values"]
        experiment.sweep.overrides = given["sweep"]["overrides"]
    for preparation, written in zip(experiment.prepare, given["prepare"], strict=True):
        preparation.overrides = written["overrides"]


def as_file(experiment: ExperimentConfig) -> dict[str, Any]:
    """Content of the experiment as a file, with overrides as they are written in files."""
    from mmrl.config import escaped

    content = dataclasses.asdict(experiment)
    written: dict[str, Any] = escaped(content)
    parts = [(written, content), *((written["arms"][arm], part) for arm, part in content["arms"].items())]
    parts += [(written["sweep"], content["sweep"]), *zip(written["prepare"], content["prepare"], strict=True)]
    for part, before in parts:
        if part is not None:
            part |= {key: before[key] for key in ("overrides", "values") if key in before}
    return written


def dotted_overrides(
    values: Mapping[str, Any], output_dir: Path, seed: int | None = None, prefix: str = ""
) -> list[str]:
    """Command-line form of nested values that are written as in a configuration file."""
    from mmrl.config import as_override

    found = []
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            found += dotted_overrides(value, output_dir, seed, f"{prefix}{key}.")
        else:
            found.append(as_override(f"{prefix}{key}", _placed(value, output_dir, seed)))
    return found


def _placed(value: Any, output_dir: Path, seed: int | None) -> Any:
    """A value with the experiment's folder for `{output_dir}` in its texts, and the run's seed for `{seed}`."""
    from mmrl.config import escaped

    if isinstance(value, Mapping):
        return {key: _placed(part, output_dir, seed) for key, part in value.items()}
    if isinstance(value, list):
        return [_placed(part, output_dir, seed) for part in value]
    if not isinstance(value, str):
        return value
    if seed is not None:
        if value == "{seed}":
            return seed
        value = value.replace("{seed}", str(seed))
    return value.replace("{output_dir}", escaped(str(output_dir)))


def _all_overrides(experiment: ExperimentConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "overrides", experiment.overrides
    for arm in experiment.arms:
        yield f"arms.{arm}.overrides", experiment.arm(arm).overrides
    if experiment.sweep is not None:
        yield "sweep.overrides", experiment.sweep.overrides
    for index, preparation in enumerate(experiment.prepare):
        yield f"prepare[{index}].overrides", preparation.overrides


def _check_seeds(key: str, seeds: list[int]) -> None:
    if not seeds:
        raise ValueError(f"`{key}` is empty; add the seeds to run")
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"`{key}` contains a seed more than once: {seeds}")


def _check_number(key: str, value: str | int | float, word: str) -> None:
    if isinstance(value, str) and value != word:
        raise ValueError(f"`{key}` is '{value}'; allowed: {word} or a number")


def _check_cost(name: str, weights: Mapping[str, float]) -> None:
    from mmrl.runs.metrics import METRICS
    from mmrl.runs.tracking import metric_definitions

    counters = [metric for metric in METRICS | metric_definitions() if metric.startswith("cost/")]
    if not weights:
        raise ValueError(f"`work.costs.{name}` is empty; add weights of {', '.join(counters)}")
    for counter, weight in weights.items():
        if counter not in counters:
            hint = did_you_mean(counter, counters)
            raise ValueError(
                f"`work.costs.{name}` has an unknown counter '{counter}'; {hint}counters: {', '.join(counters)}"
            )
        if weight <= 0:
            raise ValueError(f"`work.costs.{name}`: the weight of '{counter}' is {weight}; it must be positive")


def _existing(name: str, here: Path, where: str) -> Path:
    # from the working folder first, as on the command line
    for path in (own_config(Path(name)), here / name):
        if is_file(path):
            return path
    raise UserError(f"{where}: file {name} not found, neither relative to the working folder nor to {here}")
