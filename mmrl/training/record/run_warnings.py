"""What a run says once instead of training on in silence: rewards that tell samples apart no longer, or never did."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mmrl.core.filters import zero_variance_groups
from mmrl.core.rollouts import Rollouts
from mmrl.training.record.jsonlines import JsonLines, read_jsonl

LOGGER = logging.getLogger("mmrl")

PATIENCE = 5
"""Steps in a row after which something is said."""
LITTLE_AGREEMENT = 0.1
"""Size of a mean rank correlation below which it is as good as none."""
WARNINGS_FILE = "warnings.jsonl"
NOT_REWARDS = {"groups": "equal_groups", "all_noise": "all_noise"}
"""Streaks that are not of one reward, and the warnings that they lead to."""


@dataclass
class _Streak:
    """Steps in a row in which something held, and the samples of them."""

    steps: int = 0
    samples: int = 0
    value: float = math.nan


@dataclass
class RunWarnings:
    """Watches the rewards of a run; each warning goes to the log and to `warnings.jsonl` once."""

    folder: Path | None
    only_logged: Collection[str] = ()
    """Reward terms of weight 0, which may well be constant."""
    said: dict[str, str] = field(default_factory=dict)
    """Warnings so far by what they are about."""
    _streaks: dict[str, _Streak] = field(default_factory=dict)
    _agreement: list[float] = field(default_factory=list)

    def watch(self, batches: Iterable[Rollouts]) -> None:
        """Look at the scored samples of a step, before a filter drops any."""
        parts = list(batches)
        for name in ("reward", *(term for term in parts[0].reward_terms if term not in self.only_logged)):
            values = torch.cat([part.reward if name == "reward" else part.reward_terms[name] for part in parts])
            found = values[torch.isfinite(values)]
            same = len(found) > 1 and bool((found == found[0]).all())
            before = self._streaks.get(name, _Streak())
            goes_on = same and (not before.steps or before.value == float(found[0]))
            self._count(name, goes_on, len(found), float(found[0]) if same else math.nan)
        grouped = any(part.num_rows > part.num_groups for part in parts)
        equal = grouped and not any(bool(zero_variance_groups(part).any()) for part in parts)
        self._count("groups", equal, sum(part.num_rows for part in parts), math.nan)

    def step(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Say what has held for `PATIENCE` steps."""
        agreement = metrics.get("srpo/agreement", math.nan)
        if math.isfinite(agreement):
            self._agreement = [*self._agreement, agreement][-PATIENCE:]
        if "srpo/noise_fraction" in metrics:
            self._count("all_noise", metrics["srpo/noise_fraction"] == 1, 0, math.nan)
        for kind, message in self._due().items():
            self.say(step, kind, message)
        return {f"warnings/{kind}": float(count) for kind, count in self._counts().items() if kind in self.said}

    def say(self, step: int, kind: str, message: str) -> None:
        """Warn once: in the log, in `warnings.jsonl` and in the report."""
        if kind in self.said:
            return
        self.said[kind] = message
        if self.folder is not None:
            LOGGER.warning("step %d: %s", step, message)
            lines = JsonLines(self.folder / WARNINGS_FILE)
            lines.append({"step": step, "kind": kind, "message": message})
            lines.close()

    def truncate_after(self, step: int) -> None:
        """Drop the warnings of later steps, which a resumed run says again."""
        if self.folder is not None:
            JsonLines(self.folder / WARNINGS_FILE).truncate_after(step)

    def state_dict(self) -> dict[str, Any]:
        """What has been said, and counts."""
        streaks = {name: [streak.steps, streak.samples, streak.value] for name, streak in self._streaks.items()}
        return {"said": dict(self.said), "streaks": streaks, "agreement": list(self._agreement)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self.said = dict(state["said"])
        self._streaks = {name: _Streak(*values) for name, values in state["streaks"].items()}
        self._agreement = list(state["agreement"])

    def _count(self, name: str, holds: bool, samples: int, value: float) -> None:
        before = self._streaks.get(name, _Streak())
        self._streaks[name] = _Streak(before.steps + 1, before.samples + samples, value) if holds else _Streak()

    def _due(self) -> dict[str, str]:
        due = {}
        for name, streak in self._streaks.items():
            if name in NOT_REWARDS or streak.steps < PATIENCE:
                continue
            label = "the total reward" if name == "reward" else f"reward {name!r}"
            due[_constant(name)] = (
                f"{label} was {streak.value:g} for all {streak.samples} samples of {streak.steps} steps, so it teaches "
                "nothing; look at the samples in the report, and at what the reward expects"
            )
        if self._streaks.get("groups", _Streak()).steps >= PATIENCE and "constant_reward" not in due:
            due["equal_groups"] = (
                f"for {self._streaks['groups'].steps} steps the samples of every task have had equal rewards, so "
                "advantages within a task are 0 and nothing is learned; more samples_per_task, a higher temperature, "
                "easier or harder tasks or a finer reward would tell them apart"
            )
        if self._streaks.get("all_noise", _Streak()).steps >= PATIENCE:
            due["all_noise"] = (
                f"for {PATIENCE} steps no two successes lay close enough to form a cluster (srpo/noise_fraction is 1), "
                "so failures are compared with the mean of all successes; a larger progress.eps, or progress.memory to "
                "keep more of them, may find clusters"
            )
        if len(self._agreement) == PATIENCE and abs(sum(self._agreement) / PATIENCE) < LITTLE_AGREEMENT:
            due["no_agreement"] = (
                f"srpo/agreement was {sum(self._agreement) / PATIENCE:.2f} on average over {PATIENCE} steps: the "
                "progress reward of failures says nothing of the simulator's own; try another latent or more data for "
                "its encoder"
            )
        return due

    def _counts(self) -> dict[str, int]:
        counts = {NOT_REWARDS.get(name, _constant(name)): streak.steps for name, streak in self._streaks.items()}
        return {"equal_groups": 0} | counts


def _constant(name: str) -> str:
    return f"constant_{name.replace('/', '.')}"


def read_warnings(run_dir: Path) -> list[str]:
    """Warnings of a run, in the order in which they were said."""
    return [str(row["message"]) for row in read_jsonl(Path(run_dir) / WARNINGS_FILE) if "message" in row]
