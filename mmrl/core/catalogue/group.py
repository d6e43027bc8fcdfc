"""Objectives that compare the samples of a group."""

from mmrl.core.blocks.advantage import GroupMean, GroupMeanBatchStd, GroupMeanStd, LeaveOneOut
from mmrl.core.blocks.clip import (
    Cispo,
    GroupRegression,
    GspoClip,
    PpoClip,
    SequenceProductRatio,
    SequenceRatio,
    Unclipped,
)
from mmrl.core.blocks.divergence import K1, K2, K3
from mmrl.core.blocks.filter import ResampleGroups
from mmrl.core.blocks.mismatch import Masked
from mmrl.core.loss import FixedLength, SequenceMean, TokenMean
from mmrl.core.objectives.objective import Objective

ROWS = (
    Objective(
        "grpo",
        GroupMeanStd(),
        PpoClip(),
        SequenceMean(),
        kl=K3(0.04, clamp=False),
        citation="Shao et al., DeepSeekMath, arXiv 2402.03300, eq. 3-4",
        verified="verl 0.9.1, trl 1.16.0",
    ),
    Objective(
        "dr_grpo",
        GroupMean(),
        PpoClip(),
        # generate_max_length of sail-sg/understand-r1-zero; to be set to the sampler's own limit.
        FixedLength(3000),
        citation="Liu et al., Understanding R1-Zero-Like Training, arXiv 2503.20783, section 3.2",
        verified="verl 0.9.1, trl 1.16.0",
    ),
    Objective(
        "dapo",
        GroupMeanStd(),
        PpoClip(high=0.28),
        TokenMean(),
        filter=ResampleGroups(),
        citation="Yu et al., DAPO, arXiv 2503.14476, eq. 8-12 (clip 0.2/0.28, dynamic sampling, token mean)",
        verified="verl 0.9.1, trl 1.16.0",
    ),
    Objective(
        "rloo",
        LeaveOneOut(),
        PpoClip(),
        SequenceMean(),
        ratio=SequenceProductRatio(),
        kl=K1(0.05, in_reward=True),
        citation="Ahmadian et al., Back to Basics, arXiv 2402.14740, section 3.2; clip and KL 0.05 as in TRL",
        verified="verl 0.9.1, trl 1.16.0",
    ),
    Objective(
        "reinforce_pp_baseline",
        GroupMeanBatchStd(),
        PpoClip(),
        TokenMean(),
        kl=K2(0.001),
        citation="Hu et al., REINFORCE++ (baseline variant), arXiv 2501.03262; k2 loss 0.001 as in OpenRLHF",
        verified="verl 0.9.1",
    ),
    Objective(
        "gspo",
        GroupMeanStd(),
        GspoClip(low=3e-4, high=4e-4),
        SequenceMean(),
        ratio=SequenceRatio(),
        citation="Zheng et al., GSPO, arXiv 2507.18071, eq. 5 and 13 (clip 3e-4/4e-4)",
        verified="verl 0.9.1, trl 1.16.0",
    ),
    Objective(
        "cispo",
        GroupMeanStd(),
        # The paper tunes its upper epsilon without printing it; ScaleRL and TRL cap the ratio at 5.
        Cispo(low=1.0, high=4.0),
        TokenMean(),
        citation="MiniMax-M1, arXiv 2506.13585, eq. 4-5 (no lower bound); upper bound 5 of arXiv 2510.13786",
        verified="verl 0.9.1, trl 1.16.0",
    ),
    Objective(
        "icepop",
        GroupMeanStd(),
        PpoClip(),
        SequenceMean(),
        correction=Masked(),
        citation="Ling Team, Ring-1T, arXiv 2510.18855 (GRPO with mismatch bounds 0.5 to 5); its KL is left out",
        verified="verl 0.9.1, trl 1.16.0",
    ),
    Objective(
        "papo",
        GroupMeanStd(),
        PpoClip(high=0.3, dual=3.0),
        TokenMean(),
        kl=K3(0.01),
        citation="base objective of PAPO_G's public scripts, arXiv 2507.06448 (clip 0.2/0.3, dual clip 3, k3 0.01)",
        verified="MikeWangWZHL/PAPO at fb63bf4533b7",
    ),
    Objective(
        "apo",
        GroupMeanStd(eps=1e-9),
        PpoClip(),
        TokenMean(),
        kl=K3(1e-3, clamp=False, aggregation=SequenceMean()),
        citation="base objective of View-R1's examples/scripts/train_grpo.sh, arXiv 2506.21655",
        verified="Indolent-Kawhi/View-R1 at 093f2d82eee3",
    ),
    Objective(
        "srpo",
        GroupMeanStd(),
        PpoClip(high=0.28, dual=3.0),
        SequenceMean(),
        citation="SRPO, arXiv 2511.15605 (clip 0.2/0.28, dual clip 3, mean of episode means)",
        verified="sii-research/siiRL at af00a7718173",
    ),
    Objective(
        "aepo",
        LeaveOneOut(),
        PpoClip(high=0.4, dual=3.0),
        # token-mean by name, but of micro-batches of one response whose losses are averaged
        SequenceMean(),
        citation="InfiGUI-G1, arXiv 2508.05731; its public scripts (RLOO, clip 0.2/0.4, dual clip 3, no KL)",
        verified="InfiXAI/InfiGUI-G1 at 22208e4d4826",
    ),
    Objective(
        "arpo",
        GroupMeanStd(),
        PpoClip(high=0.3, dual=3.0),
        SequenceMean(),
        citation="Lu et al., ARPO, arXiv 2505.16282; its public scripts (clip 0.2/0.3, dual clip 3, no KL)",
        verified="dvlab-research/ARPO at 7489ae309e90",
    ),
    Objective(
        "reg_grpo",
        GroupMeanStd(eps=1e-4),
        GroupRegression(),
        SequenceMean(),
        ratio=SequenceProductRatio(limit=None),
        kl=K3(0.1, clamp=False),
        citation="DeepVideo-R1, arXiv 2506.07464 (Reg-GRPO, KL 0.1; deviations as in TRL, which it builds on)",
        verified="hand computation",
    ),
    Objective(
        "tspo",
        GroupMeanStd(eps=1e-4),
        Unclipped(),
        SequenceMean(),
        citation="TSPO, arXiv 2508.04369; its public trainer (mean of the picks' ratios, no clip, no KL)",
        verified="Hui-design/TSPO at 19f4ecb2331b",
    ),
)
