"""Objectives that learn from pairs of a preferred and a rejected answer."""

from mmrl.core.blocks.preference import (
    ChosenLikelihood,
    DecisionScore,
    HingePair,
    IpoPair,
    MeanScore,
    RefuelPair,
    RobustPair,
    SigmoidPair,
    SppoPair,
    SumScore,
)
from mmrl.core.objectives.pairwise import PreferenceObjective

ROWS = (
    PreferenceObjective(
        "dpo",
        SigmoidPair(beta=0.1),
        SumScore(),
        citation="Rafailov et al., DPO, arXiv 2305.18290, eq. 7; beta 0.1 as in TRL",
        verified="trl 1.16.0, uclaml/SPPO at 5e61c4e90822",
    ),
    PreferenceObjective(
        "robust_dpo",
        RobustPair(beta=0.1, label_smoothing=0.1),
        SumScore(),
        citation="Chowdhury et al., Provably Robust DPO, arXiv 2403.00409; beta 0.1 as in TRL",
        verified="trl 1.16.0",
    ),
    PreferenceObjective(
        "ipo",
        IpoPair(beta=0.1),
        MeanScore(),
        citation="Azar et al., IPO, arXiv 2310.12036, eq. 17; mean over an answer's tokens as in TRL",
        verified="trl 1.16.0",
        differs="the mean over an answer's tokens, as in TRL; the paper sums",
    ),
    PreferenceObjective(
        "slic",
        HingePair(beta=0.1),
        SumScore(),
        citation="Zhao et al., SLiC-HF, arXiv 2305.10425; margins against a reference as in TRL's hinge",
        verified="trl 1.16.0",
        differs="with a reference, as in TRL; the paper has none",
    ),
    PreferenceObjective(
        "rpo",
        SigmoidPair(beta=0.01),
        SumScore(),
        ChosenLikelihood(coef=0.005),
        citation="Liu et al., RPO, arXiv 2405.16436 (beta 0.01, 0.005 NLL of the preferred answers)",
        verified="trl 1.16.0",
    ),
    PreferenceObjective(
        "sppo",
        SppoPair(beta=1e-3),
        SumScore(),
        citation="Wu et al., SPPO, arXiv 2405.00675, eq. 4.7; beta 1e-3 of its public code",
        verified="uclaml/SPPO at 5e61c4e90822, trl 1.16.0",
    ),
    PreferenceObjective(
        "refuel",
        RefuelPair(eta=1.0),
        SumScore(),
        citation="Gao et al., REFUEL, arXiv 2410.04612; eta 1 of its public code",
        verified="ZhaolinGao/REFUEL at b76c5343211c",
    ),
    PreferenceObjective(
        "diffusion_dpo",
        SigmoidPair(beta=5000.0),
        DecisionScore(),
        citation="Wallace et al., Diffusion-DPO, arXiv 2311.12908; beta 5000 of its public code, logp = -error / 2",
        verified="SalesforceAIResearch/DiffusionDPO at 5233e75919f9, yifan123/flow_grpo at ac4c86e8cae0",
    ),
)
