"""Base class of the blocks of an objective."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

from mmrl.core.rollouts import Rollouts
from mmrl.core.state import Stateful
from mmrl.errors import did_you_mean
from mmrl.fields import bounds_of, field_problems, hints_of

BlockT = TypeVar("BlockT", bound="Block")
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Block:
    """One part of an objective: a frozen dataclass that holds only its own numbers."""

    kind: ClassVar[str]
    """Name in configurations and tables."""
    needs: ClassVar[frozenset[str]] = frozenset()
    """Inputs required besides log-probabilities and rewards: "samples" (several rows a group), "values", "turns",
    "entropy", "entropy_old" (`rollouts.entropy`, before the update), "logp_ref" (reference log-probabilities), "kl_ref"
    (exact divergence from the reference), "kl_old" (from the policy that the update starts from), "separate_critic" (a
    critic that the recipe trains), "probabilities" (exp(logp) is one, not a density), "collision" (sum of squared
    probabilities, before the update), and entries of `rollouts.extras` that `mmrl.training.objectives.SCORES`
    explains."""

    reads_sum: ClassVar[bool] = False
    """Whether it reads the total reward of rows where an estimator of advantages may be given one term alone."""

    @property
    def inputs(self) -> frozenset[str]:
        """`needs` of a block with these numbers."""
        return self.needs

    def formula(self) -> str:
        """Formula of the block, with its constants."""
        raise NotImplementedError(f"{type(self).__name__} has no formula")

    def state(self) -> Stateful | None:
        """A fresh memory of earlier steps, for blocks that have one; they get it where they are called."""
        return None

    def observe(self, rollouts: Rollouts, state: Any) -> Rollouts:
        """Move the state by the rows of a step, of all processes and with advantages; may add to their `extras`.

        An estimator of advantages is given the state beside the rows in its call instead.
        """
        return rollouts

    def problems(self, where: str) -> Iterator[str]:
        """Yield what is wrong with the block's own numbers; `where` is its key, such as "clip"."""
        yield from field_problems(self, where)

    def summary(self) -> str:
        """The kind and the numbers that differ from its defaults, for tables."""
        parts = [
            f"{item.name} {_short(getattr(self, item.name))}"
            for item in dataclasses.fields(self)
            if getattr(self, item.name) != item.default
        ]
        return f"{self.kind} ({', '.join(parts)})" if parts else self.kind

    @classmethod
    def options(cls) -> list[str]:
        """Names of the block's own numbers."""
        return [item.name for item in dataclasses.fields(cls)]

    def replace(self, **changes: Any) -> Self:
        """A copy with some numbers exchanged."""
        return dataclasses.replace(self, **changes)


def changed(
    base: BlockT | None, changes: Mapping[str, Any], table: Mapping[str, type[BlockT]], where: str
) -> BlockT | None:
    """Change numbers of a block, or exchange it for one of another kind."""
    if not changes:
        return base
    options = dict(changes)
    kind = options.pop("kind", base.kind if base is not None else None)
    if kind == "none" and "none" not in table:
        return None
    if kind is None:
        raise ValueError(
            f"{where} is not part of this objective, so {where}.{next(iter(options))} would do nothing; to go without, "
            f"set objective.{where}.kind=none; to add one, name its kind: {', '.join(sorted(table))}"
        )
    if not isinstance(kind, str):
        raise ValueError(f"{where}.kind is {kind!r}; expected a name: {', '.join(sorted(table))}")
    if kind not in table:
        raise ValueError(f"{where}.kind: {unknown_name(kind, table, where)}")
    block_class = table[kind]
    known = block_class.options()
    for name in options:
        if name not in known:
            exists = f"it has: {', '.join(known)}" if known else "it has none"
            raise ValueError(f"{where}: '{kind}' has no option '{name}'; {exists}")
    kept = {} if base is None else {name: getattr(base, name) for name in known if name in base.options()}
    given = {name: _typed(block_class, name, value, f"{where}.{name}") for name, value in options.items()}
    return block_class(**(kept | given))


def weighted(block: Any, options: Mapping[str, Any], where: str) -> Any:
    """Leave a block out where its `coef` is set to 0; one whose `coef` nothing sets would do nothing unnoticed."""
    if block is None or block.coef != 0:
        return block
    if "coef" not in options:
        raise ValueError(f"{where} is '{block.kind}', whose coef is 0 unless you set it: it would do nothing")
    return None


def _typed(block_class: type[Block], name: str, value: Any, key: str) -> Any:
    """`value` as the type of the field: whole numbers become floats where a float is expected."""
    allowed = _types(hints_of(block_class)[name])
    if value is None and type(None) in allowed:
        return None
    if float in allowed and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    for kind in allowed:
        if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
            return value
    expected = " or ".join("none" if kind is type(None) else kind.__name__ for kind in allowed)
    item = next(item for item in dataclasses.fields(block_class) if item.name == name)
    raise ValueError(f"{key} is {value!r}; expected {expected}{_allowed(item)}")


def _allowed(item: dataclasses.Field[Any]) -> str:
    bounds = bounds_of(item)
    return f", {bounds}" if bounds is not None else ""


def _types(hint: Any) -> tuple[type, ...]:
    return getattr(hint, "__args__", None) or (hint,)


def _short(value: Any) -> str:
    if isinstance(value, Block):
        return value.summary()
    return f"{value:g}" if isinstance(value, float) else str(value)


def kinds(base: type[BlockT]) -> dict[str, type[BlockT]]:
    """The kinds of a block by name: those of `base` and its subclasses that have a `kind`."""
    found = {base.kind: base} if "kind" in vars(base) else {}
    for block_class in base.__subclasses__():
        found |= kinds(block_class)
    return found


def look_up(table: Mapping[str, _Value], name: str, what: str) -> _Value:
    """Return `table[name]`; the ValueError of a missing name lists what exists."""
    if name not in table:
        raise ValueError(unknown_name(name, table, what))
    return table[name]


def unknown_name(name: object, known: Mapping[str, Any] | Sequence[str], what: str) -> str:
    """Return the message for a name that does not exist, with the closest one that does."""
    return f"There is no {what} '{name}'; {did_you_mean(name, known)}available: {', '.join(sorted(known))}."
