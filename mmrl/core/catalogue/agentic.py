"""Objectives that give credit to the turns of an agent."""

from mmrl.core.blocks.clip import PpoClip
from mmrl.core.blocks.divergence import K3
from mmrl.core.blocks.turns import GroupInGroup, TurnNormalised
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
    Objective(
        "information_gain",
        TurnNormalised(),
        PpoClip(dual=3.0),
        TokenMean(),
        kl=K3(0.001),
        citation="Wang et al., IGPO, arXiv 2510.14967; its public code (gamma 1, k3 0.001)",
        verified="debajoycs98/IGPO at 866019637ff3, GuoqingWang1/IGPO at bff163b72718",
        differs="a gain of exactly 0 counts as a turn; the last turn's reward is the environment's, not F1",
    ),
)
