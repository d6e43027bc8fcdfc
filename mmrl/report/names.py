"""Readable names and units of metrics, for legends and axes."""

from __future__ import annotations

import re
from collections.abc import Sequence

NAMES = {
    "policy/kl_ref": "from the reference",
    "policy/kl_old": "from the sampling policy",
    "policy/clip_fraction_low": "by the lower bound",
    "policy/clip_fraction_high": "by the upper bound",
    "policy/kl_coef": "KL coefficient",
    "reward/zero_variance_groups": "groups with equal rewards",
    "update/zero_advantage_groups": "groups without an advantage",
    "reward/std": "standard deviation",
    "reward/std_within_groups": "standard deviation within groups",
    "response/length_max": "longest",
    "response/length_mean": "mean",
    "response/finished_fraction": "finished",
    "optim/lr": "learning rate",
    "optim/grad_norm": "gradient norm",
    "memory/peak_mb": "peak memory",
    "memory/worker_mb": "largest environment",
    "tokens/per_second": "decisions",
    "loss/nll": "negative log-likelihood",
}
"""Metric to its name in a legend, where its own last part says too little."""
FAMILIES = {
    "sim": "simulators",
    "optim": "optimiser",
    "data": "data",
    "time": "seconds",
    "rollers": "rollout workers",
    "replay": "replay buffer",
    "update": "groups of the update",
}
ABBREVIATIONS = {"kl": "KL", "lr": "learning rate", "std": "standard deviation", "logp": "log-probability"}
UNITS = {
    "nats": r".*\bnats\b",
    "decisions": r".*\b(length|in decisions|decisions \(tokens, steps\) in a response)\b",
    "decisions a second": r".*over its seconds",
    "steps": r"Mean control steps",
}
"""Unit to how the definitions of such metrics read."""


def readable_name(metric: str, among: Sequence[str] = ()) -> str:
    """A metric's name in words, without its family where the others on the chart share that."""
    if metric in NAMES:
        return NAMES[metric]
    family, _, rest = metric.partition("/")
    shared = all(name.partition("/")[0] == family for name in among)
    parts = [rest] if rest and shared else [FAMILIES.get(family, family), rest]
    words = " ".join(filter(None, parts)).replace("/", ", ").replace("pass_at_", "pass@").split("_")
    return " ".join(ABBREVIATIONS.get(word, word) for word in words)


def unit_of(sentence: str) -> str:
    """Unit that a metric's definition names; empty without one."""
    return next((unit for unit, pattern in UNITS.items() if re.match(pattern, sentence)), "")
