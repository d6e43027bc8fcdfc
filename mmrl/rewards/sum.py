"""The weighted sum of reward functions, in which a failed term is counted and never becomes a zero."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mmrl.errors import UserError
from mmrl.fields import field_problems
from mmrl.rewards.builtin import REWARDS
from mmrl.rewards.calling import Batch, Failure, Outcome
from mmrl.rewards.config import RewardConfig, RewardResult, TrainerState
from mmrl.rewards.isolated import RewardWorkers
from mmrl.rewards.terms import Term, make_term

log = logging.getLogger(__name__)
NAN = float("nan")


class RewardSum:
    """A weighted sum of verifiable rewards.

    Args:
        configs: The terms.
        functions: Functions of the calling program by name; they run in this process and `configs` refer to
            them by that name.
        workers: Most worker processes; default: half of the cores, 1 to 8.

    Raises:
        UserError: A term is unknown, cannot be loaded or has options that do not fit.
    """

    def __init__(
        self,
        configs: Sequence[RewardConfig],
        functions: Mapping[str, Callable[..., Any]] | None = None,
        workers: int | None = None,
    ) -> None:
        self._workers: dict[tuple[float | None, str], RewardWorkers] = {}
        self._size = workers
        names = [config.name for config in configs]
        for config in configs:
            _check_config(config, names)
        try:
            self._terms: list[Term] = [
                make_term(config, self._workers_for(config), functions or {}) for config in configs
            ]
        except BaseException:
            self.close()
            raise
        self._checked: frozenset[str] | None = None

    def check_columns(self, columns: Sequence[str]) -> None:
        """Refuse columns that lack an input of a term."""
        for term in self._terms:
            missing = [name for name in term.needs if name not in columns]
            if missing:
                raise UserError(
                    f"reward {term.config.name!r} needs {' and '.join(missing)}, given neither as a data column "
                    f"nor in its options; the columns are: {', '.join(sorted(columns)) or 'none'}"
                )

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
            raise ValueError("there are no rewards to score with")
        if self._checked != frozenset(columns):
            self.check_columns(list(columns))
            self._checked = frozenset(columns)
        outcomes = {term.config.name: term.score(batch) for term in self._terms}
        return _combine(outcomes, {term.config.name: term.config.weight for term in self._terms})

    def close(self) -> None:
        """Stop the worker processes."""
        for workers in self._workers.values():
            workers.close()

    def _workers_for(self, config: RewardConfig) -> RewardWorkers:
        """The workers that terms with these limits share."""
        key = (config.memory_mb, _strict_function(config))
        if key not in self._workers:
            self._workers[key] = RewardWorkers(self._size, *key)
        return self._workers[key]


def _check_config(config: RewardConfig, names: Sequence[str]) -> None:
    if not config.name:
        raise UserError(f"a reward has no name; built-in are {', '.join(REWARDS)}, or module:function")
    if names.count(config.name) > 1:
        raise UserError(f"two rewards are called {config.name!r}; give one another name and set its function")
    for problem in field_problems(config):
        raise UserError(f"reward {config.name!r}: {problem}")


def _strict_function(config: RewardConfig) -> str:
    """The function of a strict term, which shares its processes with no other; empty for any other term."""
    return (config.function or config.name) if config.sandbox == "strict" else ""


def _make_batch(
    prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, Sequence[Any]], state: TrainerState
) -> Batch:
    rows = len(completions)
    lengths = {"prompts": len(prompts)} | {name: len(values) for name, values in columns.items()}
    wrong = {name: length for name, length in lengths.items() if length != rows}
    if wrong:
        raise ValueError(f"there are {rows} completions, but the lists have other lengths: {wrong}")
    return Batch(list(prompts), list(completions), {name: list(values) for name, values in columns.items()}, state)


def _combine(outcomes: Mapping[str, list[Outcome]], weights: Mapping[str, float]) -> RewardResult:
    errors: Counter[str] = Counter()
    examples: dict[str, str] = {}
    traces: dict[str, str] = {}
    for name, values in outcomes.items():
        for value in values:
            if isinstance(value, Failure):
                key = f"{name}/{value.kind}"
                errors[key] += 1
                examples.setdefault(key, value.message)
                if value.trace:
                    traces.setdefault(key, value.trace)
    terms = {name: [_number(value) for value in values] for name, values in outcomes.items()}
    rows = list(zip(*outcomes.values(), strict=True))
    total = [_row_total(row, list(weights.values())) for row in rows]
    unscored = sum(all(value is None for value in row) for row in rows)
    if unscored:
        errors["sum/not_applicable"] = unscored
        examples["sum/not_applicable"] = "every reward returned None for the row"
    return RewardResult(total, terms, dict(errors), examples, traces)


def _number(value: Outcome) -> float:
    return NAN if value is None or isinstance(value, Failure) else value


def _row_total(row: Sequence[Outcome], weights: Sequence[float]) -> float:
    """Sum the terms that apply; a failed term fails the row unless its weight is 0."""
    total, applied = 0.0, False
    for value, weight in zip(row, weights, strict=True):
        if isinstance(value, Failure):
            if weight != 0.0:
                return NAN
        elif value is not None:
            total, applied = total + weight * value, True
    return total if applied else NAN
