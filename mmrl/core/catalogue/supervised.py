"""Objectives that learn from reference answers."""

from mmrl.core.blocks.advantage import GroupMeanStd
from mmrl.core.blocks.clip import PolicyGradient
from mmrl.core.loss import TokenMean
from mmrl.core.objectives.objective import Objective

ROWS = (
    Objective(
        "sft",
        GroupMeanStd(),
        PolicyGradient(),
        TokenMean(),
        claim="maximum likelihood of given answers, the usual start of reinforcement learning",
        citation="maximum likelihood",
        verified="transformers 5.23.0",
    ),
)
