"""`mmrl reproduce`: the experiment behind a row or recipe again, on a few fresh seeds, against the stored interval.

Only the arms of the findings run, at the values that the sweep had chosen; where these are not stored, the sweep comes
first. The mean of k fresh seeds agrees with n stored ones if it is within their interval, widened by sqrt(1 + n / k):
where it falls with 95% probability if both come from the same distribution.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from mmrl.comparison.evidence import UNITS, EvidenceConfig, FindingConfig, signed
from mmrl.comparison.experiment import ArmConfig, ExperimentConfig, FigureConfig, as_file, load_experiment
from mmrl.comparison.plans import planned_minutes
from mmrl.comparison.run import CommandBuilder, run_experiment, train_command
from mmrl.comparison.summary import summarise
from mmrl.errors import RunError, UserError, did_you_mean
from mmrl.files import CONFIGS, write_atomically

EXPERIMENTS = CONFIGS / "experiments"
FIRST_SEED = 201


def measured(folder: Path = EXPERIMENTS) -> dict[str, ExperimentConfig]:
    """Read the experiments that have evidence, by file name."""
    found = {path.stem: load_experiment(path) for path in sorted(folder.glob("*.yaml"))}
    return {name: experiment for name, experiment in found.items() if experiment.evidence is not None}


def chosen(name: str, folder: Path = EXPERIMENTS) -> tuple[str, ExperimentConfig, list[FindingConfig]]:
    """Find the experiment with a name, or the cheapest one about a row or recipe, and its findings on that name."""
    known = measured(folder)
    if name in known:
        return name, known[name], evidence_of(known[name]).findings
    about = findings_by_subject(known).get(name, {})
    if not about:
        subjects = (*known, *findings_by_subject(known))
        hint = did_you_mean(name, subjects)
        raise UserError(f"no experiment has measured '{name}'; {hint}`mmrl reproduce --list` shows what was measured")
    cheapest = min(about, key=lambda stem: minutes(known[stem], about[stem], 2))
    return cheapest, known[cheapest], about[cheapest]


def findings_by_subject(known: Mapping[str, ExperimentConfig]) -> dict[str, dict[str, list[FindingConfig]]]:
    """Sort findings by row or recipe, then by experiment."""
    found: dict[str, dict[str, list[FindingConfig]]] = {}
    for stem, experiment in known.items():
        for finding in evidence_of(experiment).findings:
            for name in finding.about:
                found.setdefault(name, {}).setdefault(stem, []).append(finding)
    return found


def evidence_of(experiment: ExperimentConfig) -> EvidenceConfig:
    """Evidence of an experiment; raises an error if it has none."""
    if experiment.evidence is None:
        raise UserError(f"experiment '{experiment.name}' has no `evidence`")
    return experiment.evidence


def minutes(experiment: ExperimentConfig, findings: Sequence[FindingConfig], seeds: int) -> float:
    """Minutes on one core that repeating findings takes."""
    evidence = evidence_of(experiment)
    runs = {experiment.source(arm) for arm in _arms(experiment, findings)}
    sweep = experiment.sweep
    tried = len(sweep.seeds) * len(sweep.values) if sweep and not runs <= evidence.chosen.keys() else 0
    return planned_minutes(experiment, len(runs) * seeds, len(runs) * tried)


def listed(folder: Path = EXPERIMENTS) -> list[str]:
    """Lines that list, for each experiment, the rows and recipes it measured and how long two fresh seeds take."""
    lines = []
    for name, experiment in measured(folder).items():
        findings = evidence_of(experiment).findings
        about = ", ".join(dict.fromkeys(name for found in findings for name in found.about))
        lines.append(f"{name:<26}{max(1.0, minutes(experiment, findings, 2)):>5.0f} min  {about}")
    return lines


def reproduce(
    name: str,
    output: Path | None = None,
    *,
    seeds: int = 2,
    jobs: int | None = None,
    folder: Path = EXPERIMENTS,
    command: CommandBuilder = train_command,
    say: Callable[[str], None],
) -> bool:
    """Repeat the findings of an experiment, row or recipe, and report whether they agree with the stored intervals."""
    stem, experiment, findings = chosen(name, folder)
    output = output or Path("runs/reproduce") / (stem if stem == name else f"{stem}-{name}")
    small = smaller(experiment, findings, seeds)
    say(f"{stem}: {len(small.arms)} arms on fresh seeds {', '.join(map(str, small.seeds))}, into {output}")
    path = _written(small, output)
    run_experiment(path, output, jobs=jobs, command=command, announce=say)
    agreed = [_agrees(small, found, len(experiment.seeds), output, say) for found in findings]
    verdict = "reproduced" if all(agreed) else "not reproduced"
    rule = f"the stored intervals, widened for {seeds} fresh seeds"
    say(f"{name}: {verdict}; {sum(agreed)} of {len(agreed)} differences lie within {rule}")
    return all(agreed)


def smaller(experiment: ExperimentConfig, findings: Sequence[FindingConfig], seeds: int) -> ExperimentConfig:
    """Reduce an experiment to the arms and metrics of findings, on fresh seeds, with the values of its sweep."""
    evidence, sweep = evidence_of(experiment), experiment.sweep
    used = {*experiment.seeds, *(sweep.seeds if sweep else ())}
    fresh = [seed for seed in range(FIRST_SEED, FIRST_SEED + seeds + len(used)) if seed not in used][:seeds]
    swept = bool(sweep) and not set(map(experiment.source, _arms(experiment, findings))) <= evidence.chosen.keys()
    arms: dict[str, ArmConfig | None] = {}
    about = dict.fromkeys(itertools.chain(*((experiment.source(arm), arm) for arm in _arms(experiment, findings))))
    for arm in about:
        settings = experiment.arm(arm)
        if sweep is not None and not swept and settings.runs_of is None:
            overrides = {**settings.overrides, sweep.parameter: evidence.chosen[arm]}
            settings = replace(settings, overrides=overrides)
        # an arm whose `value_of` is left out gets its own sweep
        arms[arm] = replace(settings, value_of=settings.value_of if swept and settings.value_of in about else None)
    labels = {arm: label for arm, label in experiment.figure.labels.items() if arm in arms}
    metrics = dict.fromkeys(found.metric for found in findings if found.metric and found.metric != experiment.metric)
    return replace(
        experiment,
        arms=arms,
        baseline=_against(experiment, findings[0]),
        seeds=fresh,
        sweep=sweep if swept else None,
        secondary_metrics=list(metrics),
        work=None,
        at=None,
        collapse=None,
        evidence=None,
        figure=FigureConfig(labels=labels, unit=experiment.figure.unit),  # the claim is of the stored result
    )


def _arms(experiment: ExperimentConfig, findings: Sequence[FindingConfig]) -> list[str]:
    pairs = ((_against(experiment, found), found.arm) for found in findings)
    return list(dict.fromkeys(itertools.chain(*pairs)))


def _against(experiment: ExperimentConfig, found: FindingConfig) -> str:
    return found.against or experiment.baseline


def _written(experiment: ExperimentConfig, output: Path) -> Path:
    """Write an experiment into its folder, with its configurations by their whole paths."""
    from omegaconf import OmegaConf

    content = as_file(experiment)
    for part in filter(None, (content, *content["arms"].values(), *content["prepare"])):
        for key in ("base", "config"):
            if part.get(key):
                part[key] = str(Path(part[key]).resolve())
    output.mkdir(parents=True, exist_ok=True)
    path = output / "experiment.yaml"
    write_atomically(path, OmegaConf.to_yaml(OmegaConf.create(content)))
    return path


def _agrees(
    experiment: ExperimentConfig, found: FindingConfig, n: int, output: Path, say: Callable[[str], None]
) -> bool:
    """Compare the mean difference of the fresh seeds with the range in which it is expected."""
    metric, baseline = found.metric or experiment.metric, found.against or experiment.baseline
    arms = summarise(experiment, output).arms
    values = [
        arms[arm] if metric == experiment.metric else arms[arm].secondary[metric] for arm in (found.arm, baseline)
    ]
    mine, others = (entry.values for entry in values)
    pairs = [(mine.get(seed), others.get(seed)) for seed in experiment.seeds]
    differences = [a - b for a, b in pairs if a is not None and b is not None]
    if not differences:
        raise RunError(f"no pair of {found.arm} and {baseline} has finished; see {output / 'comparison.json'}")
    factor, _ = UNITS[found.unit]
    mean = factor * math.fsum(differences) / len(differences)
    low, high = found.expected(n, len(differences))
    within = low <= mean <= high
    expected = f"expected {signed(low, found.unit)} to {signed(high, found.unit)}"
    stored = f"stored {found.shown} over {n} seeds"
    fresh = f"{signed(mean, found.unit)} {found.unit} over {len(differences)} fresh seeds"
    where = "within" if within else "outside"
    say(f"{found.arm} - {baseline}, {metric}: {fresh}; {stored}; {expected}: {where}")
    return within
