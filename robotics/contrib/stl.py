"""Signal temporal logic over an episode's signals: formulas as text, robustness, and plans that satisfy them.

    formula = parse("eventually[0:20](to_green < 0.05) and always(z > 0.02)", ["to_green", "z"])
    formula.robustness({"to_green": [...], "z": [...]})[0]      # above 0: satisfied, by that margin

Formulas are Python expressions: comparisons of signals and numbers with `and`, `or`, `not`, `implies(p, q)`, and
`always[a:b](p)`, `eventually[a:b](p)`, `until[a:b](p, q)` over the control steps t + a to t + b, both included; without
bounds, to the end of the episode. Signals are added, multiplied and put into abs, norm, min and max.

Robustness (Donze and Maler, 2010): of f > c it is f - c, of f < c it is c - f; `and` and `always` take the minimum,
`or` and `eventually` the maximum, `not` changes the sign, and p until[a:b] q at t is the maximum over t' in t + a ..
t + b of min(q at t', minimum of p over t .. t' - 1). An episode that ends early keeps its last values.

`ground` makes a plan of a formula: times for its subgoals and intervals for its invariants. A trace that satisfies a
plan satisfies the formula, and the best plan of a trace has its robustness.

There is rtamt (BSD-3) for the robustness alone, whose numbers the tests compare; it pins antlr4-python3-runtime 4.7,
while math-verify, which the extra `vlm` installs, needs 4.13.

Shapes: T control steps and the state before them, T + 1 values of each signal.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mmrl.errors import UserError

Signals = Mapping[str, NDArray[np.float64]]
FUNCTIONS: dict[str, Callable[..., NDArray[np.float64]]] = {
    "abs": np.abs,
    "norm": lambda *parts: np.sqrt(sum(np.square(part) for part in parts)),
    "min": lambda *parts: np.minimum.reduce(np.broadcast_arrays(*parts)),
    "max": lambda *parts: np.maximum.reduce(np.broadcast_arrays(*parts)),
}
WINDOW = "is not a valid window; its bounds must be whole control steps a <= b, as in always[0:10](p)"
TIMED = {"always": 1, "eventually": 1, "until": 2}
"""Operators over time, with the number of their formulas."""


@dataclass(frozen=True)
class Plan:
    """Times of subgoals and intervals of invariants, by the numbers of `Formula.subgoals`."""

    reaches: tuple[tuple[int, int], ...]
    """Control step and subgoal, ascending."""
    invariants: tuple[tuple[int, int, int], ...] = ()
    """First and last control step, and subgoal."""

    def robustness(self, margins: NDArray[np.float64]) -> float:
        """Smallest margin of the plan, given the margins (T + 1, P) of P subgoals; later times use the last values."""
        last = len(margins) - 1
        found = [margins[min(time, last), goal] for time, goal in self.reaches]
        found += [margins[min(a, last) : min(b, last) + 1, goal].min() for a, b, goal in self.invariants]
        return float(min(found, default=np.inf))


class Formula:
    """A formula, or a part of one."""

    def values(self, signals: Signals, last: int) -> NDArray[np.float64]:
        """Robustness at the first steps, as far as these signals tell; `last` is the end of unbounded operators."""
        raise NotImplementedError

    def reach(self, last: int) -> int:
        """Control steps that the formula looks ahead."""
        return 0

    def negated(self) -> Formula:
        """The negation, with `not` only at comparisons; raises UserError for `until`."""
        raise NotImplementedError

    @property
    def timed(self) -> bool:
        """Whether it has an operator over time."""
        return False

    def grounded(self, time: int, last: int, rng: np.random.Generator) -> list[tuple[int, int, Formula]]:
        """Parts without time and the interval in which each must hold, for random times of subgoals from `time` on."""
        return [(time, time, self)]

    def parts_without_time(self) -> list[Formula]:
        """Largest parts without an operator over time."""
        return [self]

    def robustness(self, signals: Mapping[str, ArrayLike]) -> NDArray[np.float64]:
        """Robustness (T + 1,) from each control step on, by signals (T + 1,)."""
        arrays = {name: np.asarray(values, np.float64) for name, values in signals.items()}
        size = len(next(iter(arrays.values())))
        ahead = self.reach(size - 1)
        held = {name: np.concatenate([values, np.repeat(values[-1:], ahead)]) for name, values in arrays.items()}
        return self.values(held, size - 1)[:size]


@dataclass(frozen=True)
class Comparison(Formula):
    """A margin that must be above 0."""

    text: str
    margin: Callable[[Signals], NDArray[np.float64]] = field(compare=False)

    def values(self, signals: Signals, last: int) -> NDArray[np.float64]:
        size = len(next(iter(signals.values())))
        return np.broadcast_to(self.margin(signals), (size,))

    def negated(self) -> Formula:
        margin = self.margin
        return Comparison(f"not ({self.text})", lambda signals: -margin(signals))


@dataclass(frozen=True)
class Several(Formula):
    """All (`and`) or one (`or`) of several formulas."""

    parts: tuple[Formula, ...]
    all_of_them: bool

    def values(self, signals: Signals, last: int) -> NDArray[np.float64]:
        found = [part.values(signals, last) for part in self.parts]
        size = min(map(len, found))
        return (np.minimum if self.all_of_them else np.maximum).reduce([each[:size] for each in found])

    def reach(self, last: int) -> int:
        return max(part.reach(last) for part in self.parts)

    def negated(self) -> Formula:
        return Several(tuple(part.negated() for part in self.parts), not self.all_of_them)

    @property
    def timed(self) -> bool:
        return any(part.timed for part in self.parts)

    def grounded(self, time: int, last: int, rng: np.random.Generator) -> list[tuple[int, int, Formula]]:
        if not self.timed:
            return [(time, time, self)]
        chosen = self.parts if self.all_of_them else [self.parts[int(rng.integers(len(self.parts)))]]
        return [each for part in chosen for each in part.grounded(time, last, rng)]

    def parts_without_time(self) -> list[Formula]:
        return [each for part in self.parts for each in part.parts_without_time()] if self.timed else [self]


@dataclass(frozen=True)
class Window(Formula):
    """A formula at all (`always`) or one (`eventually`) of the control steps of a window."""

    first: int
    final: int | None
    part: Formula
    at_all: bool

    def end(self, last: int) -> int:
        """Last step of the window."""
        return max(self.first, last if self.final is None else self.final)

    def values(self, signals: Signals, last: int) -> NDArray[np.float64]:
        found = self.part.values(signals, last)[self.first :]
        windows = np.lib.stride_tricks.sliding_window_view(found, self.end(last) - self.first + 1)
        return windows.min(1) if self.at_all else windows.max(1)

    def reach(self, last: int) -> int:
        return self.end(last) + self.part.reach(last)

    def negated(self) -> Formula:
        return Window(self.first, self.final, self.part.negated(), not self.at_all)

    @property
    def timed(self) -> bool:
        return True

    def grounded(self, time: int, last: int, rng: np.random.Generator) -> list[tuple[int, int, Formula]]:
        a, b = time + self.first, time + self.end(last - time)
        if not self.at_all:
            return self.part.grounded(int(rng.integers(a, b + 1)), last, rng)
        if not self.part.timed:
            return [(a, b, self.part)]
        if isinstance(self.part, Window) and not self.part.at_all:
            return self._recurring(a, b, self.part, last, rng)
        return [each for step in range(a, b + 1) for each in self.part.grounded(step, last, rng)]

    def parts_without_time(self) -> list[Formula]:
        return self.part.parts_without_time()

    def _recurring(
        self, a: int, b: int, part: Window, last: int, rng: np.random.Generator
    ) -> list[tuple[int, int, Formula]]:
        """Times of a formula that recurs: in each window of `part` that begins in a .. b there is one."""
        width = part.end(last - a) - part.first
        at = int(rng.integers(a + part.first, a + part.first + width + 1))
        found = part.part.grounded(at, last, rng)
        while at < b + part.first:
            # at most the width of a window apart
            at = int(rng.integers(at + 1, at + width + 2))
            found += part.part.grounded(at, last, rng)
        return found


@dataclass(frozen=True)
class Until(Formula):
    """One formula until another one holds within a window."""

    first: int
    final: int | None
    before: Formula
    goal: Formula

    def end(self, last: int) -> int:
        """Last step of the window."""
        return max(self.first, last if self.final is None else self.final)

    def values(self, signals: Signals, last: int) -> NDArray[np.float64]:
        goal, before = self.goal.values(signals, last), self.before.values(signals, last)
        size = min(len(goal), len(before) + 1) - self.end(last)
        found, kept = np.full(size, -np.inf), np.full(size, np.inf)
        for step in range(self.end(last) + 1):
            if step >= self.first:
                found = np.maximum(found, np.minimum(goal[step : step + size], kept))
            if step < self.end(last):
                kept = np.minimum(kept, before[step : step + size])
        return found

    def reach(self, last: int) -> int:
        return self.end(last) + max(self.goal.reach(last), self.before.reach(last))

    def negated(self) -> Formula:
        raise UserError("formula: `not` around an `until` cannot be planned; write it with always and eventually")

    @property
    def timed(self) -> bool:
        return True

    def grounded(self, time: int, last: int, rng: np.random.Generator) -> list[tuple[int, int, Formula]]:
        at = time + int(rng.integers(self.first, self.end(last - time) + 1))
        found = self.goal.grounded(at, last, rng)
        if at == time:
            return found
        if not self.before.timed:
            return [*found, (time, at - 1, self.before)]
        return found + [each for step in range(time, at) for each in self.before.grounded(step, last, rng)]

    def parts_without_time(self) -> list[Formula]:
        return self.before.parts_without_time() + self.goal.parts_without_time()


def subgoals(formula: Formula) -> list[Formula]:
    """Largest parts without an operator over time, each once."""
    return list(dict.fromkeys(formula.parts_without_time()))


def ground(formula: Formula, goals: Sequence[Formula], steps: int, rng: np.random.Generator) -> Plan:
    """Draw a plan of a formula.

    Args:
        formula: it must have `not` at comparisons alone.
        goals: `subgoals(formula)`.
        steps: control steps of an episode, where unbounded operators end.
        rng: of the times, uniform in their windows, and of the alternatives of `or`.

    Returns:
        A plan; a trace whose margins are above 0 at its times satisfies the formula.
    """
    found = formula.grounded(0, steps, rng)
    # later times have the values of the last step
    timed = {(min(a, steps), min(b, steps), goals.index(part)) for a, b, part in found}
    reaches = sorted((a, goal) for a, b, goal in timed if a == b)
    spans = sorted(each for each in timed if each[0] < each[1])
    return Plan(tuple(reaches), tuple(spans))


def parse(text: str, signals: Sequence[str], defined: Mapping[str, str] | None = None) -> Formula:
    """Read a formula.

    Args:
        text: the formula, see the module.
        signals: names of the numbers that it may use.
        defined: further signals by name, expressions of `signals` or of each other.

    Returns:
        The formula, with `not` at comparisons alone where it can be moved there.

    Raises:
        UserError: the text is no formula, or names something that there is not.
    """
    reader = _Reader(signals, dict(defined or {}))
    return reader.formula(_tree(text, "formula"))


class _Reader:
    """Turns syntax into formulas and margins."""

    def __init__(self, signals: Sequence[str], defined: dict[str, str]) -> None:
        self._signals, self._defined = set(signals), defined
        self._open: list[str] = []

    def formula(self, node: ast.expr) -> Formula:
        if isinstance(node, ast.BoolOp):
            return Several(tuple(map(self.formula, node.values)), isinstance(node.op, ast.And))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return self.formula(node.operand).negated()
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            pairs = zip(sides, node.ops, sides[1:], strict=False)
            found = tuple(self._comparison(left, op, right) for left, op, right in pairs)
            return found[0] if len(found) == 1 else Several(found, True)
        if isinstance(node, ast.Call):
            return self._called(node)
        raise _wrong(node, "is not a formula; use a comparison, and, or, not, implies, always, eventually or until")

    def _called(self, node: ast.Call) -> Formula:
        named, first, final = _window(node.func)
        count = 2 if named == "implies" else TIMED.get(named, 0)
        if not count or len(node.args) != count or node.keywords:
            known = "implies(p, q), always[a:b](p), eventually[a:b](p), until[a:b](p, q)"
            raise _wrong(node, f"is not one of {known}")
        parts = [self.formula(argument) for argument in node.args]
        if named == "implies":
            return Several((parts[0].negated(), parts[1]), False)
        if named == "until":
            return Until(first, final, *parts)
        return Window(first, final, parts[0], named == "always")

    def _comparison(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> Comparison:
        below = isinstance(op, ast.Lt | ast.LtE)
        if not below and not isinstance(op, ast.Gt | ast.GtE):
            raise _wrong(left, "uses == or a similar comparison; use < or >, whose margin is a distance")
        smaller, larger = (left, right) if below else (right, left)
        less, more = self._number(smaller), self._number(larger)
        text = f"{ast.unparse(smaller)} < {ast.unparse(larger)}"
        return Comparison(text, lambda signals: more(signals) - less(signals))

    def _number(self, node: ast.expr) -> Callable[[Signals], NDArray[np.float64]]:
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            value = np.float64(node.value)
            return lambda signals: value  # type: ignore[return-value]
        if isinstance(node, ast.Name):
            return self._named(node)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            inner = self._number(node.operand)
            return lambda signals: -inner(signals)
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
            operation, one, other = OPERATIONS[type(node.op)], self._number(node.left), self._number(node.right)
            return lambda signals: operation(one(signals), other(signals))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS and node.args:
            function, arguments = FUNCTIONS[node.func.id], list(map(self._number, node.args))
            return lambda signals: function(*(each(signals) for each in arguments))
        raise _wrong(node, f"is not a number; allowed are signals, + - * / and {', '.join(FUNCTIONS)}")

    def _named(self, node: ast.Name) -> Callable[[Signals], NDArray[np.float64]]:
        name = node.id
        if name in self._open:
            raise UserError(f"the signal {name} is defined in terms of itself: {' -> '.join([*self._open, name])}")
        if name in self._defined:
            self._open.append(name)
            found = self._number(_tree(self._defined[name], f"the signal {name}"))
            self._open.pop()
            return found
        if name not in self._signals:
            known = ", ".join([*self._defined, *sorted(self._signals)])
            raise UserError(f"unknown signal {name}; available: {known}")
        return lambda signals: signals[name]


OPERATIONS: dict[type[ast.operator], Callable[..., NDArray[np.float64]]] = {
    ast.Add: np.add,
    ast.Sub: np.subtract,
    ast.Mult: np.multiply,
    ast.Div: np.divide,
}


def _tree(text: str, what: str) -> ast.expr:
    try:
        return ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise UserError(f"{what} {text!r} cannot be read: {error.msg} at character {error.offset}") from None


def _window(node: ast.expr) -> tuple[str, int, int | None]:
    """Name and bounds of an operator."""
    if isinstance(node, ast.Name):
        return node.id, 0, None
    if not (isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and isinstance(node.slice, ast.Slice)):
        raise _wrong(node, "is not an operator; write it with a window, such as always[0:10](p)")
    first, final = _bound(node, node.slice.lower), _bound(node, node.slice.upper)
    if node.slice.step is not None or (final is not None and final < (first or 0)):
        raise _wrong(node, WINDOW)
    return node.value.id, first or 0, final


def _bound(node: ast.expr, end: ast.expr | None) -> int | None:
    """A bound of the window of an operator; None without one."""
    if end is None:
        return None
    if not isinstance(end, ast.Constant) or type(end.value) is not int:
        raise _wrong(node, WINDOW)
    return end.value


def _wrong(node: ast.expr, why: str) -> UserError:
    return UserError(f"formula: {ast.unparse(node)!r} {why}")
