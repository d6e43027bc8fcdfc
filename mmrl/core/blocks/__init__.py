"""The blocks that objectives are made of, a file for each kind, and the table of all of them.

A block needs no entry here: every class of these files that has a `kind` is found by it.
"""

from mmrl.core.block import Block, kinds

# these are imported so that `kinds` finds their classes
from mmrl.core.blocks import (  # noqa: F401
    adaptive_clip,
    baselines,
    discriminative,
    downsampling,
    entropy,
    foreign,
    pair_losses,
    shaping,
    smooth_clip,
    tracked,
    turns,
    weight,
)
from mmrl.core.blocks.advantage import Advantage, AdvantageScaling
from mmrl.core.blocks.clip import Clip, Ratio
from mmrl.core.blocks.credit import CriticLoss
from mmrl.core.blocks.divergence import Divergence, Entropy
from mmrl.core.blocks.filter import GroupFilter
from mmrl.core.blocks.mismatch import Correction, Gate, OffPolicyGate
from mmrl.core.blocks.order import TaskOrder
from mmrl.core.blocks.preference import ChosenLikelihood, PairLoss, PairScore
from mmrl.core.blocks.weight import Weight
from mmrl.core.loss import Aggregation

__all__ = ["BLOCKS", "PREFERENCE_BLOCKS"]

BLOCKS: dict[str, dict[str, type[Block]]] = {
    "advantage": kinds(Advantage),
    "scaling": kinds(AdvantageScaling),
    "ratio": kinds(Ratio),
    "clip": kinds(Clip),
    "kl": kinds(Divergence),
    "entropy": kinds(Entropy),
    "aggregation": kinds(Aggregation),
    "filter": kinds(GroupFilter),
    "value": kinds(CriticLoss),
    "weight": kinds(Weight),
    "correction": kinds(Correction),
    "gate": kinds(Gate) | kinds(OffPolicyGate),
    "order": kinds(TaskOrder),
}
"""Field of an objective to the kinds of block that it takes."""

PREFERENCE_BLOCKS: dict[str, dict[str, type[Block]]] = {
    "loss": kinds(PairLoss),
    "score": kinds(PairScore),
    "likelihood": kinds(ChosenLikelihood),
}
"""Field of a preference objective to the kinds of block that it takes."""
