"""Objectives of recipes whose rows begin elsewhere than with the question: hints, teachers, references, prefixes."""

from mmrl.core.blocks.advantage import AdvantageScaling, GroupMean, GroupMeanStd
from mmrl.core.blocks.clip import PpoClip
from mmrl.core.blocks.credit import Gae, SegmentDifference, ValueLoss
from mmrl.core.blocks.divergence import K1, K3
from mmrl.core.blocks.foreign import OffPolicyShaping
from mmrl.core.loss import FixedLength, SequenceSum, TokenMean
from mmrl.core.objectives.objective import Objective

ROWS = (
    Objective(
        "scaffolded",
        GroupMeanStd(),
        PpoClip(dual=3.0),
        TokenMean(),
        claim="adding the least hint that helps makes questions that every sample misses learnable",
        citation="Scaf-GRPO, arXiv 2510.19807; GRPO of its bs256_6k_mix.sh (clip 0.2, dual clip 3, no KL)",
        verified="dvlab-research/Scaf-GRPO at 1085db539b92",
        differs="the loss alone: hints belong to recipe scaffolded",
    ),
    Objective(
        "multi_teacher",
        GroupMean(),
        OffPolicyShaping(dual=10.0),
        FixedLength(8192),
        claim="answers of several teachers, used only where all own ones fail, beat GRPO and match one larger teacher",
        citation="AMPO, arXiv 2510.02227; constants of its train_ampo.sh (clip 0.2, dual clip 10, no KL)",
        verified="SII-Enigma/AMPO at b88d365654e0",
        differs="the code divides by the width of a micro-batch, not by its rows, and has an entropy bonus of 0.001; "
        "8192 becomes the longest answer of the sampler",
    ),
    Objective(
        "dataset_reset",
        Gae(gamma=1.0, lam=0.95),
        PpoClip(),
        TokenMean(),
        scaling=AdvantageScaling(whiten="decisions"),
        kl=K1(0.05, in_reward=True),
        value=ValueLoss(coef=0.1, clip=0.2),
        claim="rollouts that restart from inside good answers learn more than those from the prompt alone",
        citation="Chang et al., DR-PO, arXiv 2404.08495; PPO of its src/tldr/drpo.py",
        verified="Cornell-RL/drpo at bd825df853ce",
        differs="starts belong to recipe dataset_reset; the code also divides rewards by their deviation, and whitens "
        "with n in the variance where n - 1 is used here",
    ),
    Objective(
        "arbitrary_entropy",
        GroupMeanStd(),
        PpoClip(dual=3.0),
        TokenMean(),
        claim="positive samples drawn at another temperature hold the entropy at any chosen value",
        citation="AEPO (arbitrary entropy), arXiv 2510.08141; GRPO of its qwen-math-7b-AEPO.sh (clip 0.2, no KL)",
        verified="597358816/AEPO at b353a05441e9",
        differs="the loss alone: samples of another temperature belong to recipe arbitrary_entropy",
    ),
    Objective(
        "segment_chain",
        SegmentDifference(),
        PpoClip(),
        TokenMean(),
        scaling=AdvantageScaling(whiten="decisions"),
        kl=K3(1e-4, aggregation=SequenceSum()),
        claim="Monte Carlo values at cut points give credit to segments, finer than answers and coarser than tokens",
        citation="Guo et al., SPO (segments), arXiv 2505.23564; SPO-chain of its configs (clip 0.2, k3 1e-4)",
        verified="AIFrameResearch/SPO at b9fc6a263dec",
        differs="the loss alone: cuts, their values and the mask of certain tokens belong to recipe segment",
    ),
    Objective(
        "segment_tree",
        SegmentDifference(),
        PpoClip(),
        TokenMean(),
        scaling=AdvantageScaling(whiten="decisions"),
        kl=K3(1e-4, aggregation=SequenceSum()),
        claim="trees of segments give the same segment credit for long answers at less cost",
        citation="Guo et al., SPO (segments), arXiv 2505.23564; SPO-tree of its configs (clip 0.2, k3 1e-4)",
        verified="AIFrameResearch/SPO at b9fc6a263dec",
        differs="the loss alone: trees and the mask of certain tokens belong to recipe segment; no replay of branches",
    ),
    Objective(
        "grace",
        GroupMean(),
        PpoClip(dual=3.0),
        TokenMean(),
        claim="rewarding rationales by a contrastive score gives better embeddings with readable reasons",
        citation="GRACE (contrastive reward), arXiv 2510.04506; GRPO without std of its train.sh (clip 0.2, no KL)",
        verified="GasolSun36/GRACE at f636fdc72a3d",
        differs="the loss alone: the reward from hidden states belongs to recipe contrastive",
    ),
)
