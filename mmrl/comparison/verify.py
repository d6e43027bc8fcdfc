"""`mmrl evaluate --verify`: repeat rows of an evaluation's ledger with the same policy under the same protocol.

A row is first repeated alone. Where that differs, the batch is repeated that it was computed in: sums in another order
change the last bits of a float32, and a greedy answer at a near tie with them. A row that is the same in its batch is
repeated; every other difference is one.
"""

from __future__ import annotations

import math
import os
import random
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from mmrl.config import as_override, drop_gone, escaped, foreign_run
from mmrl.entries import renamed
from mmrl.errors import UserError
from mmrl.files import write_atomically
from mmrl.runs.ledger import PROTOCOL, RESULT, Entry, Ledger, check_entries, digest, read_ledger
from mmrl.runs.records import finite_or_none
from mmrl.training.evaluation import Row, batch_of, ledger_rows
from mmrl.training.recipe import Step
from mmrl.training.run import evaluation_of, open_evaluation

TOLERANCE = 1e-3
"""Relative difference of numbers that is tolerated between machines or versions."""
NAMED = ("task", "state", "seed")
"""Columns that describe what was run, if a domain has them."""
DRAWN = 10
"""Number of rows repeated by default."""
FALSE_SHARE = 0.02
"""Fraction of false rows for which the detection probability is shown."""
SURE = 0.95
UNEQUAL = (
    "two repetitions on this machine differ too; some random numbers do not depend on the seed, for instance in "
    "an environment whose reset(seed) does not seed all its generators"
)
Say = Callable[[str], None]


def verify(
    path: Path,
    say: Say,
    rows: int | None,
    chosen: Sequence[int],
    overrides: Sequence[str],
    allow: Sequence[str] = (),
) -> int:
    """Check a ledger and repeat some of its rows.

    Args:
        path: the ledger, or its folder.
        say: gets the lines of the result.
        rows: number of rows to repeat, drawn at random; None for 10, or all of a ledger that has fewer.
        chosen: numbers of rows to repeat instead, from 1.
        overrides: options of the configuration for this machine, such as `model.path=...`.
        allow: code outside the suite that the protocol may name, see `mmrl.trust`.

    Returns:
        0 if all rows are the same, 1 if one differs.

    Raises:
        UserError: the ledger cannot be right, has another policy or protocol, or names code that is not allowed.
    """
    ledger = read_ledger(path)
    if problems := ledger.problems():
        raise UserError("\n  ".join([f"{path} is inconsistent:", *problems]))
    say(f"{len(ledger.rows)} rows, protocol {_short(ledger.about)}, policy {_short(ledger.about['policy'])}")
    for rate in ledger.success_rates():
        say(f"  {rate}")
    count = len(ledger.rows)
    rows = min(DRAWN, count) if rows is None else rows
    if not 0 <= rows <= count:
        raise UserError(f"--rows is {rows}; {path} has {count} rows, so use 0 to {count}")
    numbers = list(dict.fromkeys(chosen)) or sorted(random.sample(range(1, count + 1), rows))
    if wrong := [number for number in numbers if not 1 <= number <= count]:
        raise UserError(f"row {wrong[0]} does not exist; {path} has rows 1 to {count}")
    if not chosen and 0 < rows < count:
        say(f"  {power(count, rows)}")
    return _repeat(ledger, numbers, overrides, allow, say) if numbers else 0


def power(count: int, rows: int) -> str:
    """State how likely it is that randomly drawn rows reveal false rows in a ledger of `count` rows."""
    false = max(1, round(FALSE_SHARE * count))
    needed = next(number for number in range(count + 1) if chance(count, false, number) >= SURE)
    whom = f"a ledger with {false} false of its {count} rows ({false / count:.0%})"
    return (
        f"{rows} randomly drawn rows detect {whom} with a probability of {chance(count, false, rows):.0%}; --rows "
        f"{needed} would detect it with {SURE:.0%}"
    )


def chance(count: int, false: int, drawn: int) -> float:
    """Probability that a sample without replacement contains at least one of the `false` rows among `count`.

    Source: the hypergeometric distribution, 1 - P(X = 0).
    """
    # the distribution is the same with both exchanged; the shorter product is taken
    few, many = sorted((false, drawn))
    return 1 - math.prod((count - many - number) / (count - number) for number in range(few))


def _short(about: Any) -> str:
    return str(about["sha256"])[:12]


def _repeat(ledger: Ledger, numbers: Sequence[int], overrides: Sequence[str], allow: Sequence[str], say: Say) -> int:
    check_entries(ledger.folder / PROTOCOL, _needed(ledger.about))
    policy = ledger.about["policy"]
    folder = None if policy.get("checkpoint") is None else ledger.folder / policy["checkpoint"]
    # os.path: a name that no file can have is no folder either
    if folder is not None and not (re.fullmatch(r"step-\d{1,15}", folder.name) and os.path.isdir(folder)):
        raise UserError(
            f"{ledger.folder / PROTOCOL} refers to the checkpoint {str(folder)!r:.200}, which does not exist"
        )
    with (
        _configuration(ledger, overrides, allow) as (entry, config),
        open_evaluation(entry, config, folder) as (recipe, accelerator, step),
    ):
        here = evaluation_of(recipe, config, folder, accelerator, step)
        _check_same(ledger, here)
        processes = {"processes": ledger.about["machine"]["processes"]}
        other = _differences(ledger.about["machine"], {**here["machine"], **processes})
        if other:
            say(f"  digests of outputs are not compared because the machine differs: {'; '.join(other)}")
        with recipe.evaluating(recipe.policy), torch.no_grad(), accelerator.autocast():
            return _compare(ledger, numbers, Repeater(recipe, ledger, step), bool(other), say)


def _needed(about: Any) -> Iterator[Entry]:
    """Entries of protocol.json that a repetition needs."""
    yield "config", about.get("config"), (dict,), 0
    yield "machine", about.get("machine"), (dict,), 0
    yield "machine.processes", about["machine"].get("processes"), (int,), 1
    yield "policy.checkpoint", about["policy"].get("checkpoint"), (str, type(None)), 0


@contextmanager
def _configuration(ledger: Ledger, overrides: Sequence[str], allow: Sequence[str]) -> Iterator[tuple[Any, Any]]:
    """The configuration of the evaluation, with results into a folder that is deleted."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    with tempfile.TemporaryDirectory(prefix="verify-") as scratch:
        given, run_dir = Path(scratch, "config.yaml"), Path(scratch, "run")
        overrides = [*overrides, as_override("output_dir", escaped(str(run_dir)))]
        try:
            stored = OmegaConf.create(ledger.about["config"])
            drop_gone(stored)
            write_atomically(given, renamed(OmegaConf.to_yaml(stored)))
        except OmegaConfBaseException as error:
            reason = " ".join(str(error).split())
            raise UserError(f"the config in {ledger.folder / PROTOCOL} cannot be read: {reason}") from error
        with foreign_run(given, overrides, allow, ledger.folder / PROTOCOL) as found:
            yield found


def _check_same(ledger: Ledger, here: Row) -> None:
    """Refuse another protocol or policy than the ledger's."""
    if (own := digest(here["protocol"])) != ledger.about["sha256"]:
        listed = "; ".join(_differences(ledger.protocol, here["protocol"]))
        raise UserError(f"the protocol here has SHA-256 {own}, but the ledger's has {ledger.about['sha256']}: {listed}")
    if (own := here["policy"]["sha256"]) != ledger.about["policy"]["sha256"]:
        raise UserError(f"the policy here has SHA-256 {own}, but the ledger's has {ledger.about['policy']['sha256']}")


def _differences(old: Any, new: Any, place: str = "") -> list[str]:
    """Entries of nested content that differ, with both values."""
    if isinstance(old, dict) and isinstance(new, dict):
        names = dict.fromkeys([*old, *new])
        return [text for name in names for text in _differences(old.get(name), new.get(name), f"{place}.{name}")]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [
            text for n, pair in enumerate(zip(old, new, strict=True)) for text in _differences(*pair, f"{place}.{n}")
        ]
    return [] if old == new else [f"{place.removeprefix('.')} {old} -> {new}"]


class Repeater:
    """Runs trials of an evaluation again."""

    def __init__(self, recipe: Any, ledger: Ledger, step: Step) -> None:
        self._tasks = recipe.eval_tasks
        self._processes = ledger.about["machine"]["processes"]
        self._measures = {split: recipe.measures(recipe.policy, split, step) for split in self._tasks}

    def run(self, row: Row, *, alone: bool) -> Row:
        """The results of a row's trial, computed alone or in its original batch."""
        measure, key = self._measures[row["split"]][row["measure"]], (row["index"], row["repeat"])
        start, batch = batch_of(measure, self._tasks[row["split"]], key, self._processes)
        rows = measure.run([trial for trial in batch if not alone or trial.key == key], start)
        same = ("index", "repeat", "decoding", "answer")
        found = [each for each in ledger_rows(row["measure"], measure, rows) if all(each[n] == row[n] for n in same)]
        return finite_or_none(found[0]) if found else {"ending": "left out"}


def _compare(ledger: Ledger, numbers: Sequence[int], repeater: Repeater, other: bool, say: Say) -> int:
    differing, batched = 0, 0
    for number in numbers:
        row = ledger.rows[number - 1]
        again = repeater.run(row, alone=True)
        texts = _changes(row, again, other)
        if texts:
            texts = _changes(row, repeater.run(row, alone=False), other)
            batched += not texts
        if texts:
            differing += 1
            name = ", ".join(str(row[key]) for key in ("split", "decoding", "state") if row.get(key))
            say(f"  row {number} ({name}) differs: {'; '.join(texts)}")
            if own := _changes(again, repeater.run(row, alone=True), other):
                say(f"    {UNEQUAL}: {'; '.join(own)}")
    note = f" ({batched} of them only in their original batch, because of rounding)" if batched else ""
    shown = ", ".join(map(str, numbers))
    say(f"{len(numbers) - differing} of {len(numbers)} rows are the same{note}: --row {shown.replace(' ', '')}")
    return int(differing > 0)


def _changes(row: Row, again: Row, other: bool) -> list[str]:
    """Results of a row that differ when repeated, and differences in what identifies it."""
    named = [name for name in NAMED if name in again]
    compared = [*named, *(name for name in RESULT if not (other and name == "output"))]
    pairs = [(name, row.get(name), again.get(name)) for name in compared]
    return [text for name, old, new in pairs if not _close(old, new, other) for text in _differences(old, new, name)]


def _close(old: Any, new: Any, other: bool) -> bool:
    if isinstance(old, dict) and isinstance(new, dict):
        return old.keys() == new.keys() and all(_close(old[name], new[name], other) for name in old)
    if other and isinstance(old, float) and isinstance(new, float):
        return math.isclose(old, new, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return bool(old == new)
