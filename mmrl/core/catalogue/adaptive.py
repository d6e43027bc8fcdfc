"""Objectives whose clip bounds, weights or coefficients adapt to the batch or the step."""

from mmrl.core.blocks.advantage import GroupMean
from mmrl.core.blocks.clip import Unclipped
from mmrl.core.blocks.divergence import K3
from mmrl.core.loss import TokenMean
from mmrl.core.objectives.objective import Objective

ROWS = (
    Objective(
        "mirror_descent",
        GroupMean(),
        Unclipped(),
        TokenMean(),
        kl=K3(1.0, to="old", anneal=True, importance=True, clamp=False),
        citation="Tomar et al., Mirror Descent Policy Optimization, arXiv 2005.09814, eq. 9 (t_k = 1 - k/K)",
        verified="manantomar/Mirror-Descent-Policy-Optimization at c9bd3ba080e3, mdpo_on/mdpo.py",
        differs="KL estimated on the decisions taken, r k3, without every logit; t_k at least 0.05; no critic",
    ),
)
