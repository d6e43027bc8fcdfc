"""Configuration of a reward sum's terms, and the scores that the sum returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from mmrl.fields import bounded, choice, rare
from mmrl.rewards.answers import TAGS
from mmrl.rewards.reward_loading import function_source, source_digest

SANDBOXES = ("none", "strict")
ROWS = ("auto", "independent", "together")


@dataclass
class RewardConfig:
    """One term of the sum."""

    name: str = ""
    """Name of the term in metrics and reports: a built-in reward (see `mmrl list rewards`), `module:function`,
    `file.py:function`, or any name when `function` is given."""

    function: str | None = rare(None)
    """The function, if `name` is only a label."""

    weight: float = 1.0
    """Factor of this term in the sum; 0 only logs it."""

    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the function, the same for all rows."""

    timeout_s: float = rare(bounded(10.0, above=0))
    """Seconds that one call in a worker process may take, modules that it imports not counted; what takes longer is
    stopped and counted."""

    batch_timeout_s: float | None = rare(bounded(None, above=0))
    """Seconds for all rows of a call of the sum together, after which those without an answer count as hung; empty:
    timeout_s x (10 + rows / workers), in which every row may hang."""

    memory_mb: float | None = rare(bounded(None, above=0))
    """MiB that a worker process may hold with what it starts; a row that makes it hold more is stopped and counted.
    Empty: half of the machine's or container's memory, and with sandbox=strict 4096."""

    workers: int | None = rare(bounded(None, at_least=1))
    """Most worker processes, which terms with the same limits share; empty: half of the cores, 1 to 8."""

    isolate: bool | None = rare(None)
    """Run in worker processes; empty: yes for math and for users' functions, no for the other built-in ones."""

    sandbox: str = rare(choice("none", SANDBOXES))
    """none: the function runs with your rights, in a process that may fail; strict: for functions that run code a model
    wrote: no network, writes only in a temporary folder, bounded memory, CPU time, files and processes, none of your
    environment variables, no sight of other processes (Linux; refused where a promise cannot be kept)."""

    rows: str = rare(choice("auto", ROWS))
    """auto: users' functions get all rows in one call; if that raises, each row alone, so that those that raise are
    known, and then all others in one call; independent: each row alone, spread over the workers; together: always all
    rows, for functions that compare them."""

    chat: bool | None = rare(None)
    """Give prompts and completions as lists of chat turns (true) or as text (false); empty: as the data set has its
    questions, as TRL does."""


READ_MARKS = ("format", "exact", "choice", "number", "math")
"""Built-in rewards that look for marks of thoughts and answers."""


def readers_of(rewards: Sequence[RewardConfig], stop: Sequence[str] = ()) -> dict[str, str]:
    """Source of each term's function, or the marks that a built-in one looks for, and the sampler's stop strings."""
    marks = " ".join(dict.fromkeys(tag for tags in TAGS.values() for tag in tags))
    functions = {reward.name: reward.function or reward.name for reward in rewards}
    own = {spec: marks if spec in READ_MARKS else function_source(spec) for spec in functions.values()}
    return {f"reward {name}": own[spec] for name, spec in functions.items()} | {"sampler.stop": " ".join(stop)}


PLACES = ("path", "device")
"""Options that say where something is on this machine."""


def about_rewards(rewards: Sequence[RewardConfig]) -> list[dict[str, Any]]:
    """Everything that scores depend on except paths and devices, for the protocol of an evaluation."""
    functions = {reward.name: reward.function or reward.name for reward in rewards}
    return [
        {
            "name": reward.name,
            "function": PurePath(functions[reward.name]).name,
            "code": source_digest(functions[reward.name]),
            "weight": reward.weight,
            "options": {name: value for name, value in reward.options.items() if name not in PLACES},
        }
        for reward in rewards
    ]


def refuse_weights(weights: Mapping[str, float], where: str) -> None:
    """Refuse weights of terms that are only reported, other than 0 and the default; raises ValueError."""
    for name, weight in weights.items():
        if weight not in (0.0, 1.0):
            raise ValueError(f"{where}: '{name}' has weight {weight:g}, but it is only reported; leave weight out")


@dataclass(frozen=True)
class TrainerState:
    """Progress of a run, given to functions that take `trainer_state`; names as in transformers' TrainerState."""

    global_step: int = 0
    """Steps done."""
    max_steps: int = 0
    """Steps of the run; 0 outside a run."""
    epoch: float = 0.0
    """Passes over the training data."""


@dataclass
class RewardResult:
    """Rewards of B rows."""

    total: list[float]
    """Weighted sums; NaN where a term failed or no term applied."""

    terms: dict[str, list[float]]
    """Unweighted values by term; NaN where it failed or did not apply."""

    errors: dict[str, int] = field(default_factory=dict)
    """Failed rows by "term/kind", kinds as in `mmrl.rewards.calling.FAILURE_KINDS`."""

    examples: dict[str, str] = field(default_factory=dict)
    """The first message of each entry of `errors`."""

    traces: dict[str, str] = field(default_factory=dict)
    """The traceback that belongs to it, where a function raised."""
