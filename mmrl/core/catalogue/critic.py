"""Objectives that assign credit along a row: with a critic, or by returns whitened over the batch."""

from mmrl.core.blocks.advantage import AdvantageScaling
from mmrl.core.blocks.clip import PpoClip
from mmrl.core.blocks.credit import Gae, TurnGae, ValueLoss, WhitenedReturns
from mmrl.core.blocks.divergence import K1, K3
from mmrl.core.loss import TokenMean, TurnMean
from mmrl.core.objectives.objective import Objective

ROWS = (
    Objective(
        "ppo",
        Gae(gamma=1.0, lam=0.95),
        PpoClip(dual=3.0),
        TokenMean(),
        scaling=AdvantageScaling(whiten="decisions"),
        kl=K1(0.05, in_reward=True),
        value=ValueLoss(coef=0.1, clip=0.2),
        claim="a clipped surrogate allows several epochs of updates on the same samples",
        citation="Schulman et al., PPO, arXiv 1707.06347, eq. 7 and 9; GAE, arXiv 1506.02438",
        verified="verl 0.9.1",
        differs="dual clip and KL in the reward are verl's; the paper has neither",
    ),
    Objective(
        "vl_dac",
        TurnGae(gamma=0.99, lam=0.95, truncation="mask"),
        PpoClip(low=0.1, high=0.1, ratio_limit=10.0),
        TurnMean(),
        scaling=AdvantageScaling(whiten="turns", eps_to="deviation"),
        kl=K3(0.05, clamp=False),
        value=ValueLoss(coef=0.15, clip=0.1, halved=False),
        claim="token updates with values of environment steps, in simple simulators, carry over to real images",
        citation="Bredis et al., VL-DAC, arXiv 2508.04280, eq. 3-6 and appendix B; clip 0.1 and limits as in its code",
        verified="corl-team/VL-DAC at 5da27838c573",
    ),
    Objective(
        "reinforce_pp",
        WhitenedReturns(),
        PpoClip(),
        TokenMean(),
        kl=K1(0.001, in_reward=True),
        claim="returns whitened over the whole batch need neither a critic nor groups of answers",
        citation="Hu et al., REINFORCE++, arXiv 2501.03262; KL 0.001 for verifiable rewards as in OpenRLHF",
        verified="verl 0.9.1",
    ),
)
