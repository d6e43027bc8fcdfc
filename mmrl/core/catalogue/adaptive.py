"""Objectives whose clip bounds, weights or coefficients adapt to the batch or the step."""

from mmrl.core.blocks.adaptive_clip import Bapo, HapoClip, TokenGroupMeanStd
from mmrl.core.blocks.advantage import GroupMean, GroupMeanStd
from mmrl.core.blocks.clip import PolicyGradient, PpoClip, Unclipped
from mmrl.core.blocks.divergence import K3
from mmrl.core.blocks.filter import ResampleGroups
from mmrl.core.blocks.weight import ConflictTokens, EntropyFiltered, TopEntropy
from mmrl.core.loss import SequenceMean, TokenMean
from mmrl.core.objectives.objective import Objective

ROWS = (
    Objective(
        "bapo",
        GroupMeanStd(),
        Bapo(),
        TokenMean(),
        claim="clip bounds adapted to balance positive and negative updates keep off-policy training stable",
        citation="BAPO, arXiv 2510.18927; ranges of its README (low 0.6 to 0.9, high 1.2 to 3, share 0.5)",
        verified="WooooDyy/BAPO at 7287044444d5, recipe/bapo/policy_loss.py",
        differs="bounds of the whole optimiser step on all processes, the upper one first; the code: of a micro-batch",
    ),
    Objective(
        "hapo",
        TokenGroupMeanStd(),
        HapoClip(),
        TokenMean(),
        filter=ResampleGroups(),
        claim="advantages and clip bounds that depend on a token's entropy let uncertain tokens move more",
        citation="HAPO, arXiv 2509.16591; its public scripts (clip 0.2, dual clip 10, pivot 0.8, dynamic sampling)",
        verified="starriver030515/HAPO at 7671dde3e268, verl/trainer/ppo/core_algos.py",
        differs="entropies before the update and of the whole step, signed; the temperature does not adapt",
    ),
    Objective(
        "mirror_descent",
        GroupMean(),
        Unclipped(),
        TokenMean(),
        kl=K3(1.0, to="old", anneal=True, importance=True, clamp=False),
        claim="mirror descent, a proximal KL in place of the clip, matches or beats TRPO and PPO",
        citation="Tomar et al., Mirror Descent Policy Optimization, arXiv 2005.09814, eq. 9 (t_k = 1 - k/K)",
        verified="manantomar/Mirror-Descent-Policy-Optimization at c9bd3ba080e3, mdpo_on/mdpo.py",
        differs="KL estimated on the decisions taken, r k3, without every logit; t_k at least 0.05; no critic",
    ),
    Objective(
        "gtpo",
        EntropyFiltered(),
        PolicyGradient(),
        SequenceMean(),
        weight=ConflictTokens(),
        claim="protecting tokens that right and wrong answers share, and an entropy filter, replace the KL",
        citation="GTPO, arXiv 2508.03772 (conflict tokens, entropy limit 0.7 and coefficient 0.1 of its code, no KL)",
        verified="winstonsmith1897/GTPO at 5d33811e8ea1, gtpo/gtpo_training.py",
        differs="rows are averaged, not summed; conflicts of both ends are counted; entropies before the update",
    ),
    Objective(
        "high_entropy_tokens",
        GroupMeanStd(),
        PpoClip(high=0.28),
        TokenMean(),
        filter=ResampleGroups(),
        weight=TopEntropy(0.2),
        claim="training on the 20 % of tokens with the highest entropy matches or beats training on all of them",
        citation="Wang et al., Beyond the 80/20 Rule, arXiv 2506.01939 (DAPO on the 20 % of highest entropy)",
        verified="trl 1.16.0",
        differs="entropies before the update, and a threshold of the whole step",
    ),
)
