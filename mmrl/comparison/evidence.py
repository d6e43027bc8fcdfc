"""Findings of an experiment, kept in its file: differences between arms, next to the claims of the papers.

The pages of methods, `mmrl explain` and `mmrl reproduce` read them from here.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from mmrl.errors import UserError, did_you_mean
from mmrl.fields import choice
from mmrl.files import parse_yaml, read_text
from mmrl.runs.statistics import verdict

VERDICTS = ("holds", "holds in part", "no effect within the margin", "inconclusive", "negative")
"""The claim was observed; part of it was observed; any difference is too small to matter; the interval allows both; the
opposite was observed."""
UNITS = {"points": (100.0, 1), "tokens": (1.0, 1), "cm": (1.0, 2), "score": (1.0, 3)}
"""Unit of a difference, with its factor relative to the metric and its number of decimals."""


@dataclass
class FindingConfig:
    """One difference between two arms, and what it shows about a row of the catalogue or a recipe."""

    about: list[str] = field(default_factory=list)
    """Catalogue rows and recipes that the arm represents."""
    arm: str = MISSING
    """The measured arm."""
    against: str | None = None
    """The arm it is compared with; null means the baseline."""
    metric: str | None = None
    """Compared metric; null means the experiment's."""
    higher_is_better: bool | None = None
    """Whether larger values of the metric are better; null means the experiment's setting."""
    unit: str = choice("points", tuple(UNITS))
    """Unit of the three numbers below; points are percentage points."""
    difference: float = MISSING
    """Mean difference over paired seeds."""
    low: float = MISSING
    """Lower end of its 95% interval."""
    high: float = MISSING
    """Upper end of its 95% interval."""
    verdict: str = choice("inconclusive", VERDICTS)
    """Whether the paper's claim was observed here."""
    paper: str = ""
    """Result that the paper reports for the claim; empty if it reports none of this kind."""
    note: str = ""
    """Additional result, in words."""

    def validate(self) -> None:
        """Check that the numbers are an interval; raises ValueError naming the arm."""
        if not self.about:
            raise ValueError(f"a finding on arm '{self.arm}' has an empty `about`; list rows or recipes in it")
        if not self.low <= self.difference <= self.high:
            raise ValueError(
                f"finding on arm '{self.arm}': {self.difference:g} is not between {self.low:g} and {self.high:g}"
            )

    @property
    def shown(self) -> str:
        """Difference and interval, such as "+2.3 points (+1.0 to +3.6)"."""
        return f"{signed(self.difference, self.unit)} {self.unit} ({self.interval})"

    @property
    def interval(self) -> str:
        """The interval, such as "+1.0 to +3.6"."""
        return f"{signed(self.low, self.unit)} to {signed(self.high, self.unit)}"

    def expected(self, n: int, fresh: int) -> tuple[float, float]:
        """Range that contains the mean over fresh seeds with 95% probability, given n stored seeds.

        The half-width of the stored interval grows by sqrt(1 + n / fresh): the interval for the mean of further draws
        from the same normal distribution.
        """
        half = (self.high - self.low) / 2 * math.sqrt(1 + n / fresh)
        return self.difference - half, self.difference + half


@dataclass
class EvidenceConfig:
    """Results of an experiment as shown on its page, and what `mmrl reproduce` needs to repeat them."""

    page: str = MISSING
    """Name of its page in docs/results."""
    setting: str = MISSING
    """Task and model in one line."""
    findings: list[FindingConfig] = field(default_factory=list)
    """Differences between arms."""
    chosen: dict[str, Any] = field(default_factory=dict)
    """Value of the swept parameter that the sweep chose, by arm; a repetition sweeps again if it is missing."""

    def check(
        self,
        arms: Collection[str],
        baseline: str,
        metrics: Sequence[str],
        higher_is_better: bool,
        margin: float | None,
    ) -> None:
        """Check against an experiment's arms and metrics, its own first; raises ValueError with the culprit."""
        if margin is None:
            raise ValueError("`evidence` needs `margin`, the smallest difference in the metric that matters")
        if not self.findings:
            raise ValueError("`evidence.findings` is empty; add the differences between arms, or remove `evidence`")
        for found in self.findings:
            found.validate()
            for arm in (found.arm, found.against or baseline):
                _check_known("evidence.findings: arm", arm, arms)
            if found.arm == (found.against or baseline):
                raise ValueError(f"evidence.findings compares arm '{found.arm}' with itself")
            _check_known("evidence.findings: metric", found.metric or metrics[0], metrics)
            _check_verdict(found, higher_is_better, margin if found.metric in (None, metrics[0]) else None)
        for arm in self.chosen:
            _check_known("evidence.chosen: arm", arm, arms)


def findings_about(name: str, folder: Path) -> Iterator[tuple[FindingConfig, str]]:
    """The findings on a row or recipe from the experiments in a folder, each with its page.

    `against` and `metric` are filled in. The findings are read as they are written, without the rest of the experiments
    and their checks, which take seconds.
    """
    for path in sorted(folder.glob("*.yaml")):
        text = read_text(path)
        written = re.search(r"^evidence:\n(?:[ #].*\n|\n)*", text, re.MULTILINE)
        if written is not None and re.search(rf"\b{re.escape(name)}\b", written[0]):
            evidence = parse_yaml(written[0], path)["evidence"]
            for finding in (FindingConfig(**finding) for finding in evidence["findings"]):
                if name in finding.about:
                    finding.against = finding.against or _field(path, "baseline")
                    finding.metric = finding.metric or _field(path, "metric")
                    yield finding, evidence["page"]


def _field(path: Path, name: str) -> str:
    """A text of an experiment's file, or of the one that it extends; empty if neither has it."""
    text = read_text(path)
    found = re.search(rf"^{name}: *(\S+)", text, re.MULTILINE)
    parent = re.search(r"^extends: *(\S+)", text, re.MULTILINE)
    return found[1] if found else _field(path.parent / parent[1], name) if parent else ""


def signed(value: float, unit: str) -> str:
    """A difference with its sign and the number of decimals of its unit."""
    return f"{value:+.{UNITS[unit][1]}f}"


def check_subjects(evidence: EvidenceConfig, where: str) -> None:
    """Reject findings about anything that is neither a row of the catalogue nor a recipe."""
    from mmrl.core.catalogue import all_objectives, all_preferences
    from mmrl.recipes import all_recipes

    known = {**all_objectives(), **all_preferences(), **all_recipes()}
    for name in (name for found in evidence.findings for name in found.about):
        if name not in known:
            hint = did_you_mean(name, known)
            raise UserError(
                f"{where}: evidence about '{name}', which is not an objective or a recipe; {hint}see `mmrl list`"
            )


def _check_known(what: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        hint = did_you_mean(name, known)
        raise ValueError(f"{what} '{name}' is not in the experiment; {hint}it has: {', '.join(known)}")


def _check_verdict(found: FindingConfig, higher_is_better: bool, margin: float | None) -> None:
    """Check the verdict against the interval and, where one was stated, the margin; raises ValueError."""
    higher = higher_is_better if found.higher_is_better is None else found.higher_is_better
    low, high = (found.low, found.high) if higher else (-found.high, -found.low)
    if margin is not None:
        scale, decimals = UNITS[found.unit]
        off = 0.5 * 10.0**-decimals  # by which rounding may have moved an end
        ends = itertools.product((low - off, low, low + off), (high - off, high, high + off))
        right = dict.fromkeys(verdict(*pair, margin * scale) for pair in [(low, high), *ends])
        if found.verdict.removesuffix(" in part") not in right:
            reason = f"{found.shown} with margin {margin:g} is '{next(iter(right))}', not '{found.verdict}'"
            raise ValueError(f"finding on arm '{found.arm}': {reason}")
    elif (found.verdict.startswith("holds") and low <= 0) or (found.verdict == "negative" and high >= 0):
        raise ValueError(f"finding on arm '{found.arm}': the verdict '{found.verdict}' contradicts {found.shown}")
