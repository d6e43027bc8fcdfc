"""Weighted sum of reward functions, in which failed terms are counted and never become zero."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from mmrl.errors import UserError, did_you_mean
from mmrl.fields import field_problems
from mmrl.rewards.answers import chat_text, completion_text
from mmrl.rewards.builtin import REWARDS
from mmrl.rewards.calling import ROWS, Batch, RewardFailure, RewardOutcome, Signature, call, signature_of
from mmrl.rewards.isolated import RewardWorkers
from mmrl.rewards.reward_config import RewardConfig, RewardResult, TrainerState
from mmrl.rewards.reward_loading import load_function

LOGGER = logging.getLogger("mmrl")
ROW_COLUMNS = ("action", "answer", "completion_lengths", "grounding")
STATE = "trainer_state"
IMAGES, REFERENCE = "images", "reference"
"""Columns of each row's images and of the image that it edits, which are large: only functions with arguments of these
names get them, not functions that only take **columns. The same applies to other columns of images or bytes in a
table."""
TOTALS = ("mean", "std", "std_within_groups", "errors", "zero_variance_groups")
"""Names of metrics of the whole sum, alongside those of the terms: reward/mean is no term's."""
SPARE_LIMITS = 10.0
"""Extra time for all rows together, in multiples of timeout_s, in addition to one timeout_s per row of a worker."""
NAN = float("nan")


def reward_columns(names: Iterable[str], given: Collection[str] = ()) -> dict[str, str]:
    """Name under which reward functions receive each data column: its own, or `data_<name>` if that is taken.

    Args:
        names: columns of the data.
        given: names of what the run itself passes besides `prompts`, `completions` and `trainer_state`.

    Raises:
        UserError: the data has a column of the other name too.
    """
    # the run's own names win, since every function expects them
    names, taken = list(names), {*ROWS, STATE, *given}
    passed = {name: f"data_{name}" if name in taken else name for name in names}
    twice = next((name for name, other in passed.items() if other != name and other in passed), None)
    if twice is not None:
        raise UserError(
            f"the data has the columns {twice!r} and {passed[twice]!r}: rewards get the run's {twice!r}, and the "
            f"data's column as {passed[twice]!r}; rename one of them"
        )
    return passed


def tell_renamed(key: str, names: Iterable[str], given: Collection[str] = ()) -> None:
    """Log which columns of a dataset (given by its key) reward functions receive under another name."""
    for name, other in reward_columns(names, given).items():
        if other != name:
            LOGGER.warning(
                "%s: rewards get the column %r as %r because %r is a value of the run", key, name, other, name
            )


class Term(ABC):
    """A reward function with its options."""

    def __init__(self, config: RewardConfig, signature: Signature) -> None:
        self.config = config
        self.signature = signature
        self.options = dict(config.options)
        self.rows = config.rows
        self._warned = False
        _check_options(config, signature)

    @property
    def needs(self) -> list[str]:
        """Columns required by the function."""
        return [name for name in self.signature.required if name not in (*self.options, STATE)]

    def score(self, batch: Batch) -> list[RewardOutcome]:
        """Return one outcome per row, even if the function fails."""
        # a function need not cope with no rows at all
        if len(batch) == 0:
            return []
        # the time of the batch begins here, before the joint call that may use it up
        batch, started = self._arguments(batch), time.monotonic()
        if self.rows == "independent":
            return self.call_each(batch, started)
        outcomes = self.call_together(batch)
        if not isinstance(outcomes, RewardFailure):
            return outcomes
        # a wrong number of values is a fault of the function, which it would repeat row by row
        if self.rows == "together" or len(batch) == 1 or outcomes.kind == "wrong_length":
            return [outcomes] * len(batch)
        return self._without_culprits(batch, outcomes, self.call_each(batch, started))

    def _without_culprits(self, batch: Batch, first: RewardFailure, alone: list[RewardOutcome]) -> list[RewardOutcome]:
        """Outcomes of the rows after the joint call failed and each row was called alone.

        The rows that did not fail alone are called together once more, since the function may compare them, unless
        they take too long together. If every row raises, the failure of the first call gives the reason.
        """
        # rows that do not fail alone are not to blame for the joint call
        good = [row for row, outcome in enumerate(alone) if not isinstance(outcome, RewardFailure)]
        if not good:
            return [first] * len(batch) if first.kind == "raised" else alone
        if len(good) == len(batch) and not self._warned:
            self._warned = True
            LOGGER.warning(
                "reward %s: the call with all %d rows failed, but separate calls succeeded: %s; %s if it compares "
                "rows, otherwise set rows: independent",
                self.config.name,
                len(batch),
                first.message,
                "raise timeout_s" if first.kind == "timeout" else "set rows: together",
            )
        # a joint call that hung would hang again, and cost its whole limit
        again = self.call_together(batch.select(good)) if first.kind != "timeout" and len(good) > 1 else first
        if isinstance(again, RewardFailure):
            return alone
        values = dict(zip(good, again, strict=True))
        # rows that failed alone keep their failure
        return [values.get(row, outcome) for row, outcome in enumerate(alone)]

    def _arguments(self, batch: Batch) -> Batch:
        """Select the function's arguments that its options do not replace, as text or chat."""
        named = {*self.signature.required, *self.signature.optional}
        columns: dict[str, list[Any]] = {}
        # TRL passes every column, but images and bytes are only read for functions that name them
        for name, values in batch.columns.items():
            stored = any(map(_is_stored, values))
            large = stored or name in (IMAGES, REFERENCE)
            if name not in self.options and (name in named or (self.signature.takes_all and not large)):
                columns[name] = [_opened(value) for value in values] if stored else values
        takes_state = (self.signature.takes_all or STATE in named) and STATE not in self.options
        prompts, completions = batch.prompts, batch.completions
        # unset: prompts and completions stay as the recipe gives them
        if self.config.chat is not None:
            form = _as_chat if self.config.chat else _as_text
            prompts = [form("user", prompt) for prompt in prompts]
            completions = [form("assistant", completion) for completion in completions]
        return Batch(prompts, completions, columns, batch.state if takes_state else None)

    @abstractmethod
    def call_together(self, batch: Batch) -> list[RewardOutcome] | RewardFailure:
        """Call the function once with all rows."""

    @abstractmethod
    def call_each(self, batch: Batch, started: float) -> list[RewardOutcome]:
        """Call the function row by row; the batch's time has begun at `time.monotonic() == started`."""


LIMITS = ("batch_timeout_s", "memory_mb", "timeout_s", "workers")
"""Options that only apply in worker processes."""


class _LocalTerm(Term):
    """A function that runs in this process."""

    def __init__(self, config: RewardConfig, function: Callable[..., Any]) -> None:
        super().__init__(config, signature_of(function))
        self.function = function
        for name in LIMITS:
            # a limit that does not hold in this process would be a promise that nobody keeps
            if getattr(config, name) != getattr(RewardConfig, name):
                raise UserError(
                    f"reward {config.name!r}: {name} is {getattr(config, name)}, but the reward runs in this "
                    "process, where that limit cannot be enforced; set isolate: true, or remove the limit"
                )

    def call_together(self, batch: Batch) -> list[RewardOutcome] | RewardFailure:
        return call(self.function, batch, self.options)

    def call_each(self, batch: Batch, started: float) -> list[RewardOutcome]:
        outcomes: list[RewardOutcome] = []
        for row in range(len(batch)):
            outcome = call(self.function, batch.select([row]), self.options)
            # a value alone is a list of one
            outcomes += [outcome] if isinstance(outcome, RewardFailure) else outcome
        return outcomes


class _IsolatedTerm(Term):
    """A function that runs in worker processes."""

    def __init__(self, config: RewardConfig, function: str, workers: RewardWorkers) -> None:
        # a strict worker runs in another folder, so a relative file would not be found
        self.function = _absolute(function) if workers.strict else function
        super().__init__(config, workers.load(self.function, f"reward {config.name!r}"))
        self.workers = workers

    def score(self, batch: Batch) -> list[RewardOutcome]:
        try:
            return super().score(batch)
        finally:
            if self.workers.strict:  # nothing that a row started outlives its scoring
                self.workers.close()

    def call_together(self, batch: Batch) -> list[RewardOutcome] | RewardFailure:
        limit_s = min(self.config.timeout_s, self._batch_seconds(len(batch)))
        return self.workers.call_together(self.function, self.options, batch, limit_s)

    def call_each(self, batch: Batch, started: float) -> list[RewardOutcome]:
        # what the joint call has used is gone for the single ones
        left_s = max(0.0, self._batch_seconds(len(batch)) - (time.monotonic() - started))
        return self.workers.call_rows(self.function, self.options, batch, self.config.timeout_s, left_s)

    def _batch_seconds(self, rows: int) -> float:
        if self.config.batch_timeout_s is not None:
            return self.config.batch_timeout_s
        # every worker can lose a whole limit on each of its rows, with some to spare
        return self.config.timeout_s * (SPARE_LIMITS + rows / self.workers.size)


def _is_stored(cell: Any) -> bool:
    """Whether a cell is bytes or images that stay in their table until they are read."""
    return any(map(_is_stored, cell)) if isinstance(cell, list) else hasattr(cell, "read")


def _opened(cell: Any) -> Any:
    """Content of such a cell: bytes, or {"bytes", "path"} of an image."""
    if isinstance(cell, list):
        return [_opened(item) for item in cell]
    return cell.read() if hasattr(cell, "read") else cell


def make_term(config: RewardConfig, workers: RewardWorkers, functions: Mapping[str, Callable[..., Any]]) -> Term:
    """Find the function of a term and decide where it runs."""
    wanted = config.function or config.name
    # a function object cannot be sent to another process
    if wanted in functions:
        if config.isolate or config.sandbox == "strict":
            raise UserError(f"reward {config.name!r}: only module:function can run in a worker process")
        return _LocalTerm(config, functions[wanted])
    if wanted in REWARDS:
        return _builtin_term(config, wanted, workers)
    # a name without a colon can only be a built-in or a given function
    if ":" not in wanted:
        raise UserError(_unknown(config, wanted, functions))
    if config.isolate is False:
        _refuse_strict(config)
        return _LocalTerm(config, load_function(wanted, what=f"reward {config.name!r}"))
    return _IsolatedTerm(config, wanted, workers)


def _builtin_term(config: RewardConfig, name: str, workers: RewardWorkers) -> Term:
    entry = REWARDS[name]
    if entry.isolate and config.isolate is False:
        raise UserError(f"reward {config.name!r}: {name} only runs in worker processes; remove isolate=false")
    if config.isolate is False:
        _refuse_strict(config)
    # math-verify must run in a worker, the others if the user asks for it
    if entry.isolate or config.isolate or config.sandbox == "strict":
        term: Term = _IsolatedTerm(config, entry.function, workers)
        # a row each: built-in rewards compare no rows
        if config.rows == "auto":
            term.rows = "independent"
    else:
        term = _LocalTerm(config, load_function(entry.function, what=f"reward {name!r}"))
    _try_options(term)
    return term


def _refuse_strict(config: RewardConfig) -> None:
    if config.sandbox == "strict":
        raise UserError(f"reward {config.name!r}: sandbox=strict requires a worker process; remove isolate=false")


def _absolute(function: str) -> str:
    """A file's function by its whole path: a strict worker has another working directory."""
    place, _, name = function.rpartition(":")
    return f"{Path(place).expanduser().resolve()}:{name}" if place.endswith(".py") else function


def _try_options(term: Term) -> None:
    """Call a built-in reward without rows, so that wrong options show before the run."""
    missing = [name for name in term.needs if name not in ROW_COLUMNS]
    if missing:
        raise UserError(f"reward {term.config.name!r} needs the options {' and '.join(missing)}")
    # with no rows it reads its options and computes nothing
    found = term.call_together(Batch([], [], {name: [] for name in term.needs}))
    if isinstance(found, RewardFailure):
        raise UserError(f"reward {term.config.name!r}: {found.message}")


def _check_options(config: RewardConfig, signature: Signature) -> None:
    if signature.refused:
        raise UserError(
            f"reward {config.name!r} does not take {' or '.join(signature.refused)}. Rewards are called with "
            "prompts, completions and the data columns by name: define f(prompts, completions, **columns). "
            "EasyR1 functions are called by position; they have reward_inputs (all rows) or reward_input (one "
            "row) as first argument, or REWARD_TYPE in their module"
        )
    # options of the user fill what has no default
    unfilled = [name for name in signature.unfilled if name not in (*config.options, STATE)]
    if unfilled:
        raise UserError(f"reward {config.name!r} has no default for {' and '.join(unfilled)}; set it in options")
    known = [*signature.required, *signature.optional]
    # functions with **columns take any option, except built-in ones, which would ignore a misspelt one
    strict = not signature.takes_all or (config.function or config.name) in REWARDS
    for key in config.options:
        if key in ("prompts", "completions") or (strict and key not in known):
            hint = f"{did_you_mean(key, known)}it takes: {', '.join(known) or 'none'}"
            raise UserError(f"reward {config.name!r} has no option {key!r}; {hint}")


def _unknown(config: RewardConfig, wanted: str, functions: Mapping[str, Any]) -> str:
    known = [*REWARDS, *functions]
    return (
        f"unknown reward {wanted!r}; {did_you_mean(wanted, known)}built-in rewards: {', '.join(known)}; for your "
        "own, use module:function or path/to/file.py:function"
    )


def _as_chat(role: str, text: Any) -> Any:
    return [{"role": role, "content": text}] if isinstance(text, str) else text


def _as_text(role: str, turns: Any) -> Any:
    if not isinstance(turns, list):
        return turns
    return completion_text(turns) if role == "assistant" else chat_text(turns)


class RewardSum:
    """A weighted sum of verifiable rewards.

    Args:
        configs: The terms.
        functions: Functions of the calling program by name; they run in this process and `configs` refer to
            them by that name.
        workers: Most worker processes of terms that leave it open; default: half of the cores, 1 to 8.

    Raises:
        UserError: A term is unknown, cannot be loaded or has options that do not fit.
    """

    def __init__(
        self,
        configs: Sequence[RewardConfig],
        functions: Mapping[str, Callable[..., Any]] | None = None,
        workers: int | None = None,
    ) -> None:
        # shared: terms with the same limits use the same processes
        self._workers: dict[tuple[int | None, float | None, str], RewardWorkers] = {}
        self._size = workers
        names = [config.name for config in configs]
        for config in configs:
            _check_config(config, names)
        # a term that cannot be made must not leave the workers of the others behind
        try:
            self._terms: list[Term] = [
                make_term(config, self._workers_for(config), functions or {}) for config in configs
            ]
        except BaseException:
            self.close()
            raise
        self._checked: frozenset[str] | None = None

    @property
    def reads_images(self) -> bool:
        """Whether any term takes the images of its rows."""
        return self.reads(IMAGES)

    def reads(self, column: str) -> bool:
        """Whether any term takes a column."""
        return any(column in (*term.signature.required, *term.signature.optional) for term in self._terms)

    def check_columns(self, columns: Sequence[str]) -> None:
        """Raise UserError if columns lack an input of a term."""
        for term in self._terms:
            missing = [name for name in term.needs if name not in columns]
            if missing:
                raise UserError(
                    f"reward {term.config.name!r} needs {' and '.join(missing)}, which is neither a data column "
                    f"nor set in its options; a reward gets lists named {', '.join([*ROWS, *sorted(columns)])}"
                )

    def check_answers(self, places: Sequence[str], columns: Mapping[str, Sequence[Any]]) -> None:
        """Try the built-in rewards on the reference answers of some rows, given with names for messages.

        Raises:
            UserError: a reward can read the answer of none of them.
        """
        # an empty response: only whether the answer can be read is of interest
        batch = _make_batch([""] * len(places), [""] * len(places), columns, TrainerState())
        for term in self._terms:
            # a user's function may have side effects, and is not tried
            if (term.config.function or term.config.name) not in REWARDS or "answer" not in term.needs:
                continue
            outcomes = dict(zip(places, term.score(batch), strict=True))
            bad = {place: outcome.message for place, outcome in outcomes.items() if isinstance(outcome, RewardFailure)}
            if not bad:
                continue
            place, why = next(iter(bad.items()))
            found = f"reward {term.config.name!r} cannot score {len(bad)} of {len(places)} rows, e.g. {place}: {why}"
            if len(bad) == len(places):
                # every row unreadable means the wrong reward or column, a few mean bad rows
                raise UserError(f"{found}; choose another reward, or data.answer_key")
            LOGGER.warning("%s", found)

    def score(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        columns: Mapping[str, Sequence[Any]],
        state: TrainerState | None = None,
    ) -> RewardResult:
        """Score B responses.

        Args:
            prompts: B questions.
            completions: B responses, text or TRL's chat turns.
            columns: Data columns by name, B entries each; `completion_lengths` holds token counts, `completion_ids`
                the tokens.
            state: How far the run is, for functions that take `trainer_state`.

        Returns:
            Sums, terms and failures; a failure costs its own row only.

        Raises:
            UserError: A term needs a column that is not there.
            ValueError: The lists differ in length, or there is no term.
        """
        batch = _make_batch(prompts, completions, columns, state or TrainerState())
        if not self._terms:
            raise ValueError("there are no rewards to compute")
        # once a set of columns, and not at every step
        if self._checked != frozenset(columns):
            self.check_columns(list(columns))
            self._checked = frozenset(columns)
        outcomes = {term.config.name: term.score(batch) for term in self._terms}
        shuffled = {term.config.name for term in self._terms if term.config.shuffle}
        paid = {name: _shuffled(row, batch) if name in shuffled else row for name, row in outcomes.items()}
        return _combine(outcomes, paid, {term.config.name: term.config.weight for term in self._terms})

    def close(self) -> None:
        """Stop the worker processes."""
        for workers in self._workers.values():
            workers.close()

    def _workers_for(self, config: RewardConfig) -> RewardWorkers:
        """The workers that terms with these limits share."""
        # a strict function has its own workers: what it runs may have taken them over
        key = (config.workers or self._size, config.memory_mb, _strict_function(config))
        if key not in self._workers:
            self._workers[key] = RewardWorkers(*key)
        return self._workers[key]


def _check_config(config: RewardConfig, names: Sequence[str]) -> None:
    if not config.name:
        raise UserError(f"a reward has no name; use module:function or a built-in reward: {', '.join(REWARDS)}")
    if config.name in TOTALS:
        raise UserError(
            f"a reward is named {config.name!r}, but the metric reward/{config.name} is that of the whole sum; give it "
            "another name, and set its function"
        )
    if names.count(config.name) > 1:
        raise UserError(f"two rewards are named {config.name!r}; rename one of them and set its function")
    for problem in field_problems(config):
        raise UserError(f"reward {config.name!r}: {problem}")


def _strict_function(config: RewardConfig) -> str:
    """The function of a strict term, whose processes run nothing else; empty for any other term."""
    return (config.function or config.name) if config.sandbox == "strict" else ""


def _make_batch(
    prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, Sequence[Any]], state: TrainerState
) -> Batch:
    rows = len(completions)
    lengths = {"prompts": len(prompts)} | {name: len(values) for name, values in columns.items()}
    # zip would cut to the shortest list without a word
    wrong = {name: length for name, length in lengths.items() if length != rows}
    if wrong:
        raise ValueError(f"there are {rows} completions, but lists have different lengths: {wrong}")
    return Batch(list(prompts), list(completions), {name: list(values) for name, values in columns.items()}, state)


def _shuffled(outcomes: Sequence[RewardOutcome], batch: Batch) -> list[RewardOutcome]:
    """The values in another order, drawn from a digest of the responses; rows without a value stay as they are."""
    import numpy as np  # workers, which import this module, need no numpy

    if all(hasattr(response, "tobytes") for response in batch.completions):  # images
        content = b"".join(response.tobytes() for response in batch.completions)
    else:
        content = repr(batch.completions).encode()
    draws = np.random.default_rng(int.from_bytes(blake2b(content, digest_size=8).digest()))
    rows = [row for row, outcome in enumerate(outcomes) if isinstance(outcome, int | float)]
    found = list(outcomes)
    for row, other in zip(rows, draws.permutation(len(rows)), strict=True):
        found[row] = outcomes[rows[other]]
    return found


def _combine(
    outcomes: Mapping[str, list[RewardOutcome]], paid: Mapping[str, list[RewardOutcome]], weights: Mapping[str, float]
) -> RewardResult:
    """Report the outcomes as they are, and sum what is paid, which differs for shuffled terms."""
    errors: Counter[str] = Counter()
    examples: dict[str, str] = {}
    traces: dict[str, str] = {}
    for name, values in outcomes.items():
        for value in values:
            if isinstance(value, RewardFailure):
                key = f"{name}/{value.kind}"
                errors[key] += 1
                # one example a kind: the log shows the first, and the count of the rest
                examples.setdefault(key, value.message)
                if value.trace:
                    traces.setdefault(key, value.trace)
    terms = {name: [_number(value) for value in values] for name, values in outcomes.items()}
    rows = list(zip(*paid.values(), strict=True))
    total = [_row_total(row, list(weights.values())) for row in rows]
    # a row to which no reward applies is unscored, not 0
    unscored = sum(all(value is None for value in row) for row in rows)
    if unscored:
        errors["sum/not_applicable"] = unscored
        examples["sum/not_applicable"] = "every reward returned None for the row"
    return RewardResult(total, terms, dict(errors), examples, traces)


def _number(value: RewardOutcome) -> float:
    return NAN if value is None or isinstance(value, RewardFailure) else value


def _row_total(row: Sequence[RewardOutcome], weights: Sequence[float]) -> float:
    """Sum the terms that apply; a failed term fails the row unless its weight is 0."""
    total, applied = 0.0, False
    # a failure is no zero: it would teach that the response is bad
    for value, weight in zip(row, weights, strict=True):
        if isinstance(value, RewardFailure):
            # a term of weight 0 is only logged, so its failure costs nothing
            if weight != 0.0:
                return NAN
        elif value is not None:
            total, applied = total + weight * value, True
    return total if applied else NAN
