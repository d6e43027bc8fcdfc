"""Objectives that give credit along a row: with a critic, or by returns whitened over the batch."""

from mmrl.core.blocks import K1, AdvantageScaling, Gae, PpoClip, TokenMean, ValueLoss, WhitenedReturns
from mmrl.core.objective import Objective

__all__ = ["ROWS"]

ROWS = (
    Objective(
        "ppo",
        Gae(gamma=1.0, lam=0.95),
        PpoClip(dual=3.0),
        TokenMean(),
        scaling=AdvantageScaling(whiten="decisions"),
        kl=K1(0.05, in_reward=True),
        value=ValueLoss(coef=0.1, clip=0.2),
        citation="Schulman et al., PPO, arXiv 1707.06347, eq. 7 and 9; GAE 1/0.95, dual clip 3, KL 0.05 in the reward",
    ),
    Objective(
        "reinforce_pp",
        WhitenedReturns(),
        PpoClip(),
        TokenMean(),
        kl=K1(0.001, in_reward=True),
        citation="Hu et al., REINFORCE++, arXiv 2501.03262; KL 0.001 for verifiable rewards as in OpenRLHF",
    ),
)
