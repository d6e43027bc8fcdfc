"""Calls of reward functions that always return: a value for each row, or a failure."""

from __future__ import annotations

import asyncio
import inspect
import math
import signal
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias

from mmrl.rewards.answers import completion_text
from mmrl.rewards.reward_config import TrainerState
from mmrl.workers.wire import error_text

MAX_MESSAGE_CHARS = 400
MAX_TRACE_CHARS = 4000
ROWS = ("prompts", "completions")
EASYR1 = {"reward_inputs": True, "reward_input": False, "batch": True, "sequential": False}
"""First arguments of EasyR1's functions, values of their module's `REWARD_TYPE`, and whether they take all rows.

Source: hiyouga/EasyR1 verl/workers/reward/function.py."""
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
OURS = (__file__, asyncio.__path__[0], inspect.getfile(ThreadPoolExecutor))
"""Files whose frames are removed from a traceback."""


@dataclass(frozen=True)
class RewardFailure:
    """Reason why a reward function returned no usable value."""

    kind: str
    """Row of `FAILURE_KINDS`."""
    message: str
    trace: str = ""
    """The traceback of the user's own code, if that raised."""


RewardOutcome: TypeAlias = "float | RewardFailure | None"
"""A finite reward, None if the reward does not apply, or a failure."""


@dataclass
class Batch:
    """Arguments of a reward function, with one entry per row in every list."""

    prompts: list[Any]
    completions: list[Any]
    columns: dict[str, list[Any]]
    state: TrainerState | None = None
    """Passed as `trainer_state`; None if the function does not take it."""

    def __len__(self) -> int:
        return len(self.completions)

    def select(self, rows: Sequence[int]) -> Batch:
        """Return a batch with the given rows."""
        columns = {name: [values[row] for row in rows] for name, values in self.columns.items()}
        # the state is the run's, not a row's
        return Batch([self.prompts[row] for row in rows], [self.completions[row] for row in rows], columns, self.state)


@dataclass(frozen=True)
class Signature:
    """Columns and options that a reward function takes by name."""

    required: tuple[str, ...]
    optional: tuple[str, ...]
    takes_all: bool
    """Whether it has **kwargs and therefore gets every column."""
    refused: tuple[str, ...] = ()
    """Arguments passed in every call (prompts or completions) that it does not take."""
    unfilled: tuple[str, ...] = ()
    """Arguments without a default that must be set in the term's options."""


def signature_of(function: Callable[..., Any]) -> Signature:
    """Read which named arguments a reward function takes, apart from prompts and completions."""
    parameters = _parameters(function)
    # such as some built-ins: everything is passed by name
    if parameters is None:
        return Signature((), (), takes_all=True)
    takes_all = any(p.kind == p.VAR_KEYWORD for p in parameters)
    # EasyR1's functions get one argument with all that they read
    if _takes_all_rows(function) is not None:
        own = [p for p in parameters[1:] if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        optional = ("completion_lengths", *(p.name for p in own if p.kind != p.POSITIONAL_ONLY))
        unfilled = tuple(p.name for p in own if p.default is p.empty)
        return Signature(("answer",), optional, takes_all, unfilled=unfilled)
    # variadic arguments have no name to pass a column by
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    names = [p.name for p in named]
    named = [p for p in named if p.name not in ROWS]
    return Signature(
        required=tuple(p.name for p in named if p.default is p.empty),
        optional=tuple(p.name for p in named if p.default is not p.empty),
        takes_all=takes_all,
        refused=() if takes_all else tuple(name for name in ROWS if name not in names),
    )


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """The arguments of a function; None if they cannot be read."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None


def _takes_all_rows(function: Callable[..., Any]) -> bool | None:
    """Whether a function of EasyR1, which is called by position, takes all rows; None for other functions."""
    parameters = _parameters(function)
    # a function of this suite takes prompts and completions by name
    if not parameters or parameters[0].kind not in POSITIONAL or {p.name for p in parameters} & set(ROWS):
        return None
    # the module's setting wins over the name of the argument
    declared = getattr(function, "__globals__", {}).get("REWARD_TYPE")
    return EASYR1.get(declared if isinstance(declared, str) else parameters[0].name)


def call(function: Callable[..., Any], batch: Batch, options: Mapping[str, Any]) -> list[RewardOutcome] | RewardFailure:
    """Call f(prompts, completions, **columns) like TRL; one outcome per row, or one failure for the whole call."""
    # the options of the user win over the state
    shared = dict(options) if batch.state is None else {"trainer_state": batch.state, **options}
    try:
        values = _values(function, batch, shared)
        return _check_values(_finished(values) if inspect.isawaitable(values) else values, len(batch))
    except TimeoutError as error:
        return _raised(error, "timeout")
    except KeyboardInterrupt as error:
        # in a worker Ctrl-C is ignored, so this one was raised by the function itself
        if not _ignores_interrupts():
            raise
        return _raised(error)
    except BaseException as error:  # sys.exit() in a reward must not end the training
        return _raised(error)


def _values(function: Callable[..., Any], batch: Batch, shared: Mapping[str, Any]) -> Any:
    takes_all_rows = _takes_all_rows(function)
    # the usual form, that of TRL
    if takes_all_rows is None:
        return function(prompts=batch.prompts, completions=batch.completions, **batch.columns, **shared)
    lengths = batch.columns.get("completion_lengths", [None] * len(batch))
    inputs = [
        {"response": completion_text(completion), "response_length": length, "ground_truth": answer}
        for completion, length, answer in zip(batch.completions, lengths, batch.columns["answer"], strict=True)
    ]
    # EasyR1's own two conventions: all rows, or one at a time
    scores = function(inputs, **shared) if takes_all_rows else [function(each, **shared) for each in inputs]
    # EasyR1's functions may return parts, of which "overall" is the reward
    return [score["overall"] if isinstance(score, Mapping) else score for score in scores]


def _finished(values: Awaitable[Any]) -> Any:
    """The result of an async function, also inside a program that already runs an event loop."""

    async def wait() -> Any:
        return await values

    # the usual case: no event loop in this thread
    if not _in_a_loop():
        return asyncio.run(wait())
    # a loop in this thread cannot run another one, so a second thread does
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, wait()).result()


def _in_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _raised(error: BaseException, kind: str = "raised") -> RewardFailure:
    return RewardFailure(kind, _describe(error), _trace(error))


def _trace(error: BaseException) -> str:
    """The traceback without the frames of this file and of the event loop."""
    found = traceback.TracebackException.from_exception(error)
    # frames of the user's own code are the ones that help
    own = [frame for frame in found.stack if not frame.filename.startswith(OURS)]
    found.stack = traceback.StackSummary.from_list(own)
    return "".join(found.format())[-MAX_TRACE_CHARS:].rstrip()


def _ignores_interrupts() -> bool:
    return signal.getsignal(signal.SIGINT) == signal.SIG_IGN


def _describe(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    # the last frame is where it was raised
    place = f" ({frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno})" if frames else ""
    text = " ".join(error_text(error).split())  # one line, even of an exception with many
    return f"{type(error).__name__}: {text}"[:MAX_MESSAGE_CHARS] + place


def _check_values(values: Any, rows: int) -> list[RewardOutcome] | RewardFailure:
    # tensors, arrays and series
    if not isinstance(values, list | tuple) and hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, list | tuple):
        return RewardFailure("wrong_length", f"returned {_shown(values)}, {_expected(rows)}")
    if len(values) != rows:
        found, asked = (f"{n} {what}{'' if n == 1 else 's'}" for n, what in ((len(values), "value"), (rows, "row")))
        return RewardFailure("wrong_length", f"returned {found} for {asked}, {_expected(rows)}")
    return [_check_value(value) for value in values]


def _shown(value: Any) -> str:
    return f"the one value {value}" if isinstance(value, int | float) else f"a {type(value).__name__}"


def _expected(rows: int) -> str:
    whole = "; for a reward of the whole batch, repeat it for each row: [value] * len(completions)" if rows > 1 else ""
    return f"expected a list of {rows} numbers, one per row{whole}"


def _check_value(value: Any) -> RewardOutcome:
    if value is None:
        return None
    # float("0.5") would work, but a text is more likely the wrong variable
    if isinstance(value, str | bytes):
        return RewardFailure("not_a_number", f"returned {value[:60]!r}")
    try:
        number = float(value)
    except BaseException as error:  # its __float__ is the user's
        reason = "" if isinstance(error, TypeError | ValueError | OverflowError) else f", {_describe(error)}"
        return RewardFailure("not_a_number", f"returned a {type(value).__name__}{reason}")
    # NaN would unscore the row without a reason in the log
    if not math.isfinite(number):
        return RewardFailure("nan", f"returned {number}")
    return number


FAILURE_KINDS: dict[str, str] = {
    "raised": "The function raised an exception.",
    "timeout": "The function took longer than timeout_s and was stopped.",
    "crashed": "The worker process ended while the function ran.",
    "memory": "The worker process used more memory than memory_mb and was stopped.",
    "limit": "The strict worker process had more threads or files than allowed and was stopped.",
    "nan": "The function returned NaN or infinity.",
    "not_a_number": "The function returned something that is not a number.",
    "wrong_length": "The function did not return a list with one value per row.",
}
