"""Countdown: make a number from given numbers, each used once, with + - * / and brackets. Text only.

Most sets of numbers have many expressions and few of them reach the target, so an answer is a guess that the reward
checks: its numbers, its value. Training and held-out problems are disjoint, regardless of the order of their numbers.
"""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from mmrl.files import write_atomically
from mmrl.rewards.answers import Chat, read_answer

LARGEST_VALUE = 99
"""Maximum number in a worked answer."""
MAX_CHARS = 200
"""Maximum characters of an expression that is read."""
TEST_FOLD = 5
"""One problem in this many is held out."""
NAMES = {"+": "add", "-": "subtract", "*": "multiply", "/": "divide"}
MOST_DRAWS = 1000
"""Maximum number of draws when looking for another problem."""
QUESTION = "Make {target} from {numbers}."
MakeRow = Callable[[], dict[str, Any]]


def build_problems(
    path: str | Path,
    *,
    count: int = 1000,
    split: str = "train",
    operands: Sequence[int] = (2, 3),
    largest: int = 20,
    bare: float = 0.0,
    seed: int = 0,
) -> Path:
    """Write problems, each with a worked answer.

    Args:
        path: JSONL file to write; columns problem, answer (one expression that is right), completion (the same with
            its steps), numbers, target, operands and operator (that of the expression: add, subtract, multiply, divide
            or mixed).
        count: number of problems.
        split: "train" or "test", which are disjoint.
        operands: how many numbers a problem has, drawn evenly.
        largest: largest given number.
        bare: fraction of the worked answers without their steps.
        seed: random seed.

    Returns:
        The file.

    Raises:
        ValueError: unknown split, fewer than two numbers, numbers whose sum may be above 99, or no further held-out
            problem, which are all different.
    """
    next_problem, rng = _problems(split, operands, largest, seed), np.random.default_rng([seed, 2])

    def make_row() -> dict[str, Any]:
        row = next_problem()
        return row | {"completion": _worked([], row["answer"])} if rng.random() < bare else row

    return _write(Path(path), count, make_row)


def build_contrasts(path: str | Path, **options: Any) -> Path:
    """Write problems of `build_problems`, given its options, as documents to embed.

    Returns:
        The file; further columns query (the worked answer) and negative (another problem, that of the next row).
    """
    file = build_problems(path, **options)
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    for row, other in zip(rows, [*rows[1:], rows[0]], strict=True):
        row |= {"query": row["completion"], "negative": other["problem"]}
    write_atomically(file, "".join(f"{json.dumps(row)}\n" for row in rows))
    return file


def build_pairs(
    path: str | Path,
    *,
    count: int = 1000,
    split: str = "train",
    operands: Sequence[int] = (2, 3),
    largest: int = 20,
    seed: int = 0,
) -> Path:
    """Write problems with two worked answers, one of which misses the target; arguments as for `build_problems`.

    Returns:
        The file; columns prompt, chosen, rejected, and numbers, target, operands, operator.
    """
    next_problem = _problems(split, operands, largest, seed)
    rng = np.random.default_rng([seed, 1])

    def make_row() -> dict[str, Any]:
        row = next_problem()
        numbers = [int(number) for number in row["numbers"].split()]
        missed = None
        while missed is None or missed[2] == row["target"]:
            missed = _combine([int(number) for number in rng.permutation(numbers)], _draw_operators(rng, len(numbers)))
        kept = {key: row[key] for key in ("numbers", "target", "operands", "operator")}
        return {"prompt": row["problem"], "chosen": row["completion"], "rejected": _worked(*missed[:2])} | kept

    return _write(Path(path), count, make_row)


def solves(
    prompts: Sequence[Chat], completions: Sequence[Chat], *, numbers: Sequence[str], target: Sequence[int], **_: Any
) -> list[float]:
    """Give 1 to an expression in the answer block that uses each given number once and has the target's value.

    Args:
        prompts: questions.
        completions: responses.
        numbers: given numbers of each problem, with spaces between.
        target: value of each problem that is to be reached.
    """
    rows = zip(prompts, completions, numbers, target, strict=True)
    return [float(_is_solution(read_answer(said, asked), given, goal)) for asked, said, given, goal in rows]


def length(
    prompts: Sequence[Chat], completions: Sequence[Chat], *, completion_lengths: Sequence[int], longest: int, **_: Any
) -> list[float]:
    """Tokens of the responses as a fraction of `longest`."""
    return [number / longest for number in completion_lengths]


def evaluate(expression: str) -> tuple[Fraction, list[int]]:
    """Evaluate an expression of integers with + - * / and brackets.

    Returns:
        Its exact value, and its numbers from left to right.

    Raises:
        ValueError: it is no such expression, longer than 200 characters, or divides by zero.
    """
    if len(expression) > MAX_CHARS or not re.fullmatch(r"[0-9+\-*/() ]+", expression):
        raise ValueError(f"not an expression of integers with + - * / and brackets: {expression[:80]!r}")
    numbers: list[int] = []

    def value(node: ast.expr) -> Fraction:
        if isinstance(node, ast.Constant):
            numbers.append(int(node.value))  # type: ignore[arg-type]
            return Fraction(numbers[-1])
        if not isinstance(node, ast.BinOp) or type(node.op) not in SIGNS:
            raise ValueError(f"{ast.unparse(node)!r} contains a sign, a power or a call; allowed: + - * / and brackets")
        return COMPUTE[SIGNS[type(node.op)]](value(node.left), value(node.right))

    try:
        return value(ast.parse(expression.strip(), mode="eval").body), numbers
    except (SyntaxError, ZeroDivisionError) as error:
        raise ValueError(f"{expression!r} cannot be evaluated: {error}") from None


def build_model(path: str | Path, *, tokens: Sequence[str] = (), **options: Any) -> Path:
    """Build a tiny random Qwen3, a language model, for these problems.

    Each number from 10 to 99 is one token, like each digit and operator, and so are further `tokens`;
    `options` are those of `build_tiny_generic`.
    """
    from mmrl.vlm.toy.tiny_generic import build_tiny_generic

    numbers = [str(number) for number in range(10, LARGEST_VALUE + 1)]
    return build_tiny_generic(path, corpus=[QUESTION] * 100, tokens=[*numbers, *tokens], **options)


def _write(path: Path, count: int, make_row: MakeRow) -> Path:
    rows = [{"id": f"{path.stem}-{index:05d}", **make_row()} for index in range(count)]
    write_atomically(path, "".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def _problems(split: str, operands: Sequence[int], largest: int, seed: int) -> MakeRow:
    """A function that draws the next problem."""
    if split not in ("train", "test"):
        raise ValueError(f"split is '{split}'; allowed: train, test")
    if not operands or min(operands) < 2 or max(operands) * largest > LARGEST_VALUE:
        raise ValueError(
            f"operands is {list(operands)} and largest is {largest}; a problem needs at least two numbers with a sum "
            f"of at most {LARGEST_VALUE}"
        )
    rng, seen, held_out = np.random.default_rng([seed, 0]), set[str](), split == "test"

    def draw() -> tuple[list[int], list[str], tuple[list[str], str, int]]:
        operators = _draw_operators(rng, int(rng.choice(list(operands))))
        while True:
            numbers = [int(number) for number in rng.integers(1, largest + 1, len(operators) + 1)]
            found = _combine(numbers, operators)
            if found is not None:
                return numbers, operators, found

    def make_row() -> dict[str, Any]:
        for _ in range(MOST_DRAWS):
            numbers, operators, found = draw()
            problem = f"{sorted(numbers)} {found[2]}"
            if _is_held_out(problem) == held_out and not (held_out and problem in seen):
                break
        else:
            raise ValueError(f"only about {len(seen)} held-out problems exist; lower count or raise largest")
        seen.add(problem)
        steps, expression, target = found
        given = " ".join(str(number) for number in rng.permutation(numbers))
        return {
            "problem": QUESTION.format(target=target, numbers=given),
            "answer": expression,
            "completion": _worked(steps, expression),
            "numbers": given,
            "target": target,
            "operands": str(len(numbers)),
            "operator": NAMES[operators[0]] if len(set(operators)) == 1 else "mixed",
        }

    return make_row


def _draw_operators(rng: np.random.Generator, operands: int) -> list[str]:
    return [str(sign) for sign in rng.choice(list(NAMES), operands - 1)]


def _combine(numbers: Sequence[int], operators: Sequence[str]) -> tuple[list[str], str, int] | None:
    """Steps, expression and value of numbers combined from left to right; None unless all values are 1 to 99."""
    value, expression, steps = numbers[0], str(numbers[0]), list[str]()
    for place, (sign, number) in enumerate(zip(operators, numbers[1:], strict=True)):
        exact = COMPUTE[sign](Fraction(value), Fraction(number))
        if exact.denominator != 1 or not 1 <= exact <= LARGEST_VALUE:
            return None
        steps.append(f"{value}{sign}{number}={exact}")
        value = int(exact)
        loose = place and operators[place - 1] in "+-" and sign in "*/"
        expression = f"({expression}){sign}{number}" if loose else f"{expression}{sign}{number}"
    return steps, expression, value


def _worked(steps: Sequence[str], expression: str) -> str:
    thought = f"<think>{' '.join(steps)}</think>" if steps else ""
    return f"{thought}<answer>{expression}</answer>"


def _is_held_out(problem: str) -> bool:
    digest = blake2b(problem.encode(), digest_size=8).digest()
    return int.from_bytes(digest) % TEST_FOLD == 0


def _is_solution(expression: str | None, given: str, target: int) -> bool:
    if expression is None:
        return False
    try:
        value, used = evaluate(expression)
    except ValueError:
        return False
    return value == target and sorted(used) == sorted(int(number) for number in given.split())


COMPUTE: dict[str, Callable[[Fraction, Fraction], Fraction]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}
SIGNS: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
