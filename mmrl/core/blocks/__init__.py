"""The blocks that objectives consist of, one file per kind, and a table of all blocks.

A block needs no entry here: every class of these files that has a `kind` is found by it. Kinds that the library has
not are looked for in contrib.
"""

import functools
import importlib
from typing import Any

from mmrl.core.block import Block, kinds

# these are imported so that `kinds` finds their classes
from mmrl.core.blocks import baselines, divergence, foreign, pair_losses, smooth_clip, turns  # noqa: F401
from mmrl.core.blocks.advantage import Advantage, AdvantageScaling
from mmrl.core.blocks.clip import Clip, Ratio
from mmrl.core.blocks.credit import CriticLoss
from mmrl.core.blocks.divergence import Divergence, Entropy
from mmrl.core.blocks.filter import GroupFilter, TaskOrder
from mmrl.core.blocks.mismatch import Correction, Gate, OffPolicyGate
from mmrl.core.blocks.preference import ChosenLikelihood, PairLoss, PairScore
from mmrl.core.blocks.turns import Weight
from mmrl.core.loss import Aggregation

__all__ = ["BLOCKS", "PREFERENCE_BLOCKS", "all_kinds", "contrib", "kind_names"]

PARTS: dict[str, tuple[type[Block], ...]] = {
    "advantage": (Advantage,),
    "scaling": (AdvantageScaling,),
    "ratio": (Ratio,),
    "clip": (Clip,),
    "kl": (Divergence,),
    "entropy": (Entropy,),
    "aggregation": (Aggregation,),
    "filter": (GroupFilter,),
    "value": (CriticLoss,),
    "weight": (Weight,),
    "correction": (Correction,),
    "gate": (Gate, OffPolicyGate),
    "order": (TaskOrder,),
}
"""Field of an objective to the base classes of the blocks that it accepts."""
PREFERENCE_PARTS: dict[str, tuple[type[Block], ...]] = {
    "loss": (PairLoss,),
    "score": (PairScore,),
    "likelihood": (ChosenLikelihood,),
}
"""Field of a preference objective to the base classes of the blocks that it accepts."""
BLOCKS = {part: kinds(*bases) for part, bases in PARTS.items()}
"""Field of an objective to the library's kinds of block for it."""
PREFERENCE_BLOCKS = {part: kinds(*bases) for part, bases in PREFERENCE_PARTS.items()}
"""Field of a preference objective to the library's kinds of block for it."""

CONTRIB = "mmrl.contrib.rows"
"""Package with the objectives and kinds of block that have fewer guarantees than those of the library."""


@functools.cache
def contrib() -> Any:
    """The package `CONTRIB`, imported if the library does not know a name."""
    return importlib.import_module(CONTRIB)


def all_kinds(part: str) -> dict[str, type[Block]]:
    """The kinds of block that a field accepts: those of the library, then those of contrib."""
    inside = f"{contrib().__name__}."
    found = kinds(*(PARTS | PREFERENCE_PARTS)[part])
    added = {kind: block for kind, block in found.items() if block.__module__.startswith(inside)}
    return (BLOCKS | PREFERENCE_BLOCKS)[part] | added


def kind_names(part: str) -> list[str]:
    """Names of all kinds of a field, in the order used in messages: those of the library, then those of contrib."""
    own = (BLOCKS | PREFERENCE_BLOCKS)[part].keys()
    return [*sorted(own), *sorted(all_kinds(part).keys() - own)]
