"""Objectives that remember earlier steps: statistics of each task, quantiles, histories."""

from mmrl.core.blocks.adaptive_clip import DcpoClip
from mmrl.core.blocks.advantage import AdvantageScaling
from mmrl.core.blocks.clip import PpoClip
from mmrl.core.blocks.divergence import K3
from mmrl.core.blocks.entropy import SmoothedEntropy
from mmrl.core.blocks.order import CategoryBandit, Uncertain
from mmrl.core.blocks.tracked import BundledRisk, SmoothStandardised, TrackedValue
from mmrl.core.catalogue.group import ROWS as GROUP
from mmrl.core.loss import SequenceMean, TokenMean
from mmrl.core.objectives.objective import Objective

ROWS: tuple[Objective, ...] = (
    Objective(
        "dcpo",
        SmoothStandardised(),
        DcpoClip(),
        SequenceMean(),
        claim="clip bounds by token probability and cumulative statistics use answers that GRPO wastes",
        citation="DCPO, arXiv 2509.02333; bounds 0.16/0.2 of its README",
        verified="lime-RL/DCPO at 01787b0f6158",
        differs="averages rows, where the paper adds them up: the direction is the same; the code's mean runs over all "
        "tokens (aggregation: token_mean)",
    ),
    Objective(
        "single_stream",
        TrackedValue(),
        PpoClip(high=0.28, dual=10.0),
        TokenMean(),
        scaling=AdvantageScaling(whiten="rows", eps_to="deviation"),
        order=Uncertain(),
        claim="one answer per question against its tracked success rate beats GRPO without groups that wait",
        citation="SPO, arXiv 2509.13232 (a sample a task; clip 0.2/0.28 and dual clip 10 of its recipe's train.sh)",
        verified="verl-project/verl-recipe at 48ea0a797fa2; loss: RTkenny/RiskPO at 65ec40c935f5",
        differs="a visit keeps 0.875 of the tracked counts, the lower bound of the paper's rule, which would score the "
        "last answer of each task anew (rho.type constant in the code); no values from samples before the run",
    ),
    Objective(
        "riskpo",
        BundledRisk(),
        PpoClip(dual=3.0),
        TokenMean(),
        claim="an objective on the lower tail of rewards improves hard questions and pass@k",
        citation="RiskPO, arXiv 2510.00911, the mixture MVaR; constants of scripts/run_qwen2.5_1.5b_MVaR_dapomath.sh",
        verified="RTkenny/RiskPO at 65ec40c935f5",
        differs="tracked quantiles are used from the second step on; the code's trainer hands none on to the next step "
        "and so takes those of each bundle; scores of bundles of unequal size are scaled to one size",
    ),
    Objective(
        "entropy_smoothing",
        clip=PpoClip(dual=3.0),
        aggregation=TokenMean(),
        kl=K3(0.01),
        entropy=SmoothedEntropy(0.001),
        claim="holding the entropy near its past average keeps agents exploring over many turns",
        citation="EPO, arXiv 2509.22576; entropy 0.001 and a band of 0 to 2 on GRPO",
        verified="WujiangXu/EPO at 5b6fa98e0346",
        differs="the penalty is a hinge, because the indicator of the paper and the code has no gradient "
        "(entropy.penalty), in all steps and not only where an episode reaches half of its longest length; the history "
        "is by turn, where the code aligns shorter steps at their end",
    ),
    Objective(
        "sec",
        order=CategoryBandit(),
        advantage=GROUP[0].advantage,
        clip=GROUP[0].clip,
        aggregation=GROUP[0].aggregation,
        kl=GROUP[0].kl,
        claim="a bandit that picks question categories by mean absolute advantage improves on random curricula",
        citation="SEC, arXiv 2505.14970, on GRPO (rate 0.5, temperature 0.4)",
        verified="Vincent-La/cofa at 8b685cbb5ad6",
        differs="a category without rows in a step keeps its value (order.forgets moves it towards 0 as in the code); "
        "tasks of a category are drawn at random, in the code one after the other",
    ),
)
