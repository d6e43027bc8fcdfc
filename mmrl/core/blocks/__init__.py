"""The blocks that objectives are made of, a file for each kind; the tables at the foot hold all kinds by name."""

from mmrl.core.block import Block
from mmrl.core.blocks.advantage import (
    SCALINGS,
    Advantage,
    AdvantageScaling,
    GroupMean,
    GroupMeanBatchStd,
    GroupMeanGlobalStd,
    GroupMeanStd,
    GroupOutcomeStd,
    LeaveOneOut,
)
from mmrl.core.blocks.clip import (
    RATIOS,
    Bgpo,
    Cispo,
    Clip,
    GroupRegression,
    GspoClip,
    PolicyGradient,
    PpoClip,
    Ratio,
    SequenceFullRatio,
    SequenceProductRatio,
    SequenceRatio,
    TokenRatio,
    Unclipped,
)
from mmrl.core.blocks.credit import VALUES, CriticAdvantage, Gae, SeparateCritic, TurnGae, ValueLoss, WhitenedReturns
from mmrl.core.blocks.divergence import (
    DIVERGENCES,
    ENTROPIES,
    K1,
    K2,
    K3,
    Divergence,
    Entropy,
    ExactKl,
    FullEntropy,
    K1StraightThrough,
    K3StraightThrough,
    SampledEntropy,
)
from mmrl.core.blocks.filter import FILTERS, DropGroups, GroupFilter, KeepAll, ResampleGroups
from mmrl.core.loss import (
    AGGREGATIONS,
    Aggregation,
    FixedLength,
    SequenceMean,
    SequenceSum,
    TokenMean,
    TurnMean,
)

__all__ = [
    "ADVANTAGES",
    "AGGREGATIONS",
    "BLOCKS",
    "CLIPS",
    "DIVERGENCES",
    "ENTROPIES",
    "FILTERS",
    "K1",
    "K2",
    "K3",
    "RATIOS",
    "Advantage",
    "AdvantageScaling",
    "Aggregation",
    "Bgpo",
    "Block",
    "Cispo",
    "Clip",
    "CriticAdvantage",
    "Divergence",
    "DropGroups",
    "Entropy",
    "ExactKl",
    "FixedLength",
    "FullEntropy",
    "Gae",
    "GroupFilter",
    "GroupMean",
    "GroupMeanBatchStd",
    "GroupMeanGlobalStd",
    "GroupMeanStd",
    "GroupOutcomeStd",
    "GroupRegression",
    "GspoClip",
    "K1StraightThrough",
    "K3StraightThrough",
    "KeepAll",
    "LeaveOneOut",
    "PolicyGradient",
    "PpoClip",
    "Ratio",
    "ResampleGroups",
    "SampledEntropy",
    "SeparateCritic",
    "SequenceFullRatio",
    "SequenceMean",
    "SequenceProductRatio",
    "SequenceRatio",
    "SequenceSum",
    "TokenMean",
    "TokenRatio",
    "TurnGae",
    "TurnMean",
    "Unclipped",
    "ValueLoss",
    "WhitenedReturns",
]

ADVANTAGES: dict[str, type[Advantage]] = {
    block.kind: block
    for block in (
        GroupMeanStd,
        GroupOutcomeStd,
        GroupMean,
        LeaveOneOut,
        WhitenedReturns,
        GroupMeanBatchStd,
        GroupMeanGlobalStd,
        Gae,
        TurnGae,
    )
}
CLIPS: dict[str, type[Clip]] = {
    block.kind: block for block in (PpoClip, GspoClip, Cispo, PolicyGradient, Unclipped, Bgpo, GroupRegression)
}
BLOCKS: dict[str, dict[str, type[Block]]] = {
    "advantage": dict(ADVANTAGES),
    "scaling": dict(SCALINGS),
    "ratio": dict(RATIOS),
    "clip": dict(CLIPS),
    "kl": dict(DIVERGENCES),
    "entropy": dict(ENTROPIES),
    "aggregation": dict(AGGREGATIONS),
    "filter": dict(FILTERS),
    "value": dict(VALUES),
}
"""Field of an objective to the kinds of block that it takes."""
