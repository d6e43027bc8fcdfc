"""Base class of the blocks of an objective."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

from mmrl.core.rollouts import Rollouts
from mmrl.core.state import Stateful
from mmrl.errors import did_you_mean
from mmrl.fields import field_problems

BlockT = TypeVar("BlockT", bound="Block")


@dataclass(frozen=True)
class Block:
    """One part of an objective: a frozen dataclass that contains only its own numbers."""

    kind: ClassVar[str]
    """Name in configurations and tables."""
    needs: ClassVar[frozenset[str]] = frozenset()
    """Inputs required in addition to log-probabilities and rewards: "samples" (several rows per group), "values",
    "turns", "entropy", "entropy_old" (`rollouts.entropy`, before the update), "logp_ref" (reference log-probabilities),
    "kl_ref" (exact divergence from the reference), "kl_old" (from the policy that the update starts from),
    "separate_critic" (a critic that the recipe trains), "probabilities" (exp(logp) is one, not a density), "collision"
    (sum of squared probabilities, before the update), and entries of `rollouts.extras` that
    `mmrl.training.objectives.SCORES` explains."""

    reads_sum: ClassVar[bool] = False
    """Whether it needs the total reward of rows even if advantage estimators are given one reward term at a time."""

    @property
    def inputs(self) -> frozenset[str]:
        """`needs` of a block with these numbers."""
        return self.needs

    def formula(self) -> str:
        """Formula of the block, with its constants."""
        raise NotImplementedError(f"{type(self).__name__} has no formula")

    def state(self) -> Stateful | None:
        """New state for remembering earlier steps, passed back in on every call; None for stateless blocks."""
        return None

    def observe(self, rollouts: Rollouts, state: Any) -> Rollouts:
        """Update the state with the rows of a step from all processes, with advantages; may add to their `extras`.

        Advantage estimators receive the state together with the rows in their call instead.
        """
        return rollouts

    def problems(self, where: str) -> Iterator[str]:
        """Yield problems with the block's own numbers; `where` is its key, such as "clip"."""
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
        """A copy with some numbers replaced."""
        return dataclasses.replace(self, **changes)


def _short(value: Any) -> str:
    if isinstance(value, Block):
        return value.summary()
    return f"{value:g}" if isinstance(value, float) else str(value)


def kinds(*bases: type[BlockT]) -> dict[str, type[BlockT]]:
    """The kinds of a block by name: those of the base classes and of their subclasses that have a `kind`."""
    found: dict[str, type[BlockT]] = {}
    for base in bases:
        found |= ({base.kind: base} if "kind" in vars(base) else {}) | kinds(*base.__subclasses__())
    return found


def unknown_name(name: object, known: Collection[str], what: str) -> str:
    """Return the message for an unknown name, with the closest existing name."""
    return f"unknown {what} '{name}'; {did_you_mean(name, known)}available: {', '.join(known)}."
