"""Configuration of the terms of a reward sum, and the scores that the sum returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from mmrl.fields import bounded, choice, rare
from mmrl.rewards.answers import TAGS
from mmrl.rewards.reward_loading import function_source, named_digests, source_digest

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
    """Weight of this term in the sum; 0 only logs it."""

    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the function, the same for all rows."""

    timeout_s: float = rare(bounded(10.0, above=0))
    """Time limit in seconds for one call in a worker process, excluding imports. Calls that exceed it are stopped and
    counted as failures."""

    batch_timeout_s: float | None = rare(bounded(None, above=0))
    """Time limit in seconds for all rows of one call of the sum; unfinished rows are then counted as hung. Default:
    timeout_s x (10 + rows / workers), enough for every row to time out."""

    memory_mb: float | None = rare(bounded(None, above=0))
    """Memory limit in MiB for a worker process and its child processes; rows that exceed it are stopped and counted as
    failures. Default: half of the machine's or container's memory, or 4096 with sandbox=strict."""

    workers: int | None = rare(bounded(None, at_least=1))
    """Maximum number of worker processes; terms with the same limits share them. Default: half of the cores, 1 to 8."""

    isolate: bool | None = rare(None)
    """Run in worker processes. Default: true for math and users' functions, false for other built-in rewards."""

    sandbox: str = rare(choice("none", SANDBOXES))
    """none: the function runs with your permissions, in a separate process so that a crash does not stop the run.
    strict: for functions that run model-written code. It has no network, writes only to a temporary folder, has limits
    on memory, CPU time, files and processes, gets none of your environment variables, and cannot see other processes
    (Linux only; raises an error if any of this cannot be guaranteed)."""

    rows: str = rare(choice("auto", ROWS))
    """auto: users' functions get all rows in one call; if that raises, each row is passed separately to find the
    failing ones, and then all others in one call. independent: each row is passed separately, distributed over the
    workers. together: always all rows, for functions that compare them."""

    shuffle: bool = rare(False)
    """Control experiment: pay each response the value of another one that is scored in the same call, so that the
    term carries no signal. Metrics report the true values."""

    chat: bool | None = rare(None)
    """Pass prompts and completions as lists of chat turns (true) or as text (false). Default: the same format as the
    dataset's questions, like TRL."""


READ_MARKS = ("format", "exact", "choice", "number", "math")
"""Built-in rewards that look for reasoning and answer markers."""


def readers_of(rewards: Sequence[RewardConfig], stop: Sequence[str] = ()) -> dict[str, str]:
    """Source of each term's function, or the markers that a built-in reward looks for, and stop strings."""
    marks = " ".join(dict.fromkeys(tag for tags in TAGS.values() for tag in tags))
    functions = {reward.name: reward.function or reward.name for reward in rewards}
    own = {spec: marks if spec in READ_MARKS else function_source(spec) for spec in functions.values()}
    return {f"reward {name}": own[spec] for name, spec in functions.items()} | {"sampler.stop": " ".join(stop)}


PLACES = ("path", "device")
"""Options that contain local paths or devices."""


def about_rewards(rewards: Sequence[RewardConfig]) -> list[dict[str, Any]]:
    """Everything that scores depend on, except paths and devices, for the protocol of an evaluation."""
    functions = {reward.name: reward.function or reward.name for reward in rewards}
    named = {reward.name: named_digests(_options(reward)) for reward in rewards}
    return [
        {
            "name": reward.name,
            "function": PurePath(functions[reward.name]).name,
            "code": source_digest(functions[reward.name]),
            "weight": reward.weight,
            "options": _options(reward),
            # only if there is any, so that earlier evaluations stay comparable
            **({"named": named[reward.name]} if named[reward.name] else {}),
        }
        for reward in rewards
    ]


def _options(reward: RewardConfig) -> dict[str, Any]:
    """Options of a term except paths and devices."""
    return {name: value for name, value in reward.options.items() if name not in PLACES}


def refuse_weights(weights: Mapping[str, float], where: str) -> None:
    """Raise ValueError if a term that is only reported has a weight other than 0 or the default."""
    for name, weight in weights.items():
        if weight not in (0.0, 1.0):
            raise ValueError(f"{where}: '{name}' has weight {weight:g}, but it is only reported; leave weight out")


@dataclass(frozen=True)
class TrainerState:
    """Progress of a run, passed to functions that take `trainer_state`; names as in transformers' TrainerState."""

    global_step: int = 0
    """Number of completed steps."""
    max_steps: int = 0
    """Number of steps of the run; 0 outside a run."""
    epoch: float = 0.0
    """Number of epochs over the training data."""


@dataclass
class RewardResult:
    """Rewards of B rows."""

    total: list[float]
    """Weighted sums; NaN if a term failed or no term applied."""

    terms: dict[str, list[float]]
    """Unweighted values by term; NaN if it failed or did not apply."""

    errors: dict[str, int] = field(default_factory=dict)
    """Failed rows by "term/kind", kinds as in `mmrl.rewards.calling.FAILURE_KINDS`."""

    examples: dict[str, str] = field(default_factory=dict)
    """The first message of each entry of `errors`."""

    traces: dict[str, str] = field(default_factory=dict)
    """The traceback of each example, if a function raised."""
