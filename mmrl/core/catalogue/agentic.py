"""Objectives that give credit to the turns of an agent."""

from mmrl.core.blocks.clip import PpoClip
from mmrl.core.blocks.divergence import K3
from mmrl.core.blocks.turns import GroupInGroup
from mmrl.core.loss import TokenMean
from mmrl.core.objectives.objective import Objective

ROWS: tuple[Objective, ...] = (
    Objective(
        "gigpo",
        GroupInGroup(),
        PpoClip(dual=3.0),
        TokenMean(),
        kl=K3(0.01),
        citation="Feng et al., GiGPO, arXiv 2505.10978, eq. 3-8; its public scripts (w 1, gamma 0.95, k3 0.01)",
        verified="langfengQ/DrMAS at 1bc15d2e5756",
        differs="a group of one episode gets 0, not its reward; the penalty of unreadable answers is reward.format",
    ),
)
