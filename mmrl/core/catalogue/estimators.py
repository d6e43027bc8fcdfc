"""Objectives of papers whose core is an estimator, or a reward."""

from mmrl.core.blocks.advantage import GroupMean, GroupMeanStd
from mmrl.core.blocks.clip import PpoClip, SequenceProductRatio
from mmrl.core.blocks.discriminative import Discriminative, GroupPreference, JointPairs
from mmrl.core.blocks.divergence import K3
from mmrl.core.blocks.downsampling import DownSampled
from mmrl.core.blocks.filter import DropGroups, ResampleGroups
from mmrl.core.blocks.shaping import (
    BetaNormalised,
    BudgetTarget,
    ConsistencyBlend,
    EarlyCode,
    EntropyDamped,
    RegroupedByEntropy,
    RegroupedByLength,
    VirtualBest,
)
from mmrl.core.loss import FixedLength, SequenceMean, SequenceSum, TokenMean
from mmrl.core.objectives.objective import Objective

ROWS = (
    Objective(
        "bnpo",
        BetaNormalised(),
        PpoClip(high=0.28, dual=10.0),
        SequenceSum(),
        citation="Xiao et al., BNPO, arXiv 2506.02864; clip 0.2/0.28 and dual clip 10 of its recipe/bnpo/run.sh",
        verified="changyi7231/BNPO at a9c51b984828",
        differs="several rewards are summed first, without the paper's advantage decomposition; where all group means "
        "are equal, the code divides 0 by 0 and the row weighs them by 1",
    ),
    Objective(
        "ngrpo",
        VirtualBest(),
        PpoClip(low=0.16, high=0.24),
        TokenMean(),
        filter=DropGroups(high=1.0),
        citation="NGRPO, arXiv 2509.18851; clip 0.16/0.24 and groups that all succeed left out as in its script",
        verified="nangongrui-ngr/NGRPO at e7a380415a64",
    ),
    Objective(
        "canon_entropy",
        RegroupedByEntropy(),
        PpoClip(high=0.28, dual=3.0),
        FixedLength(8192),
        citation="CANON, arXiv 2509.23962, eq. 5 and 8; constants of its scripts/setups.sh",
        verified="biuboomc/CANON at 7d6f814fb71f",
        differs="mu is constant, without the paper's schedules; 8192 becomes the longest answer of the sampler",
    ),
    Objective(
        "canon_length",
        RegroupedByLength(),
        PpoClip(high=0.28, dual=3.0),
        FixedLength(8192),
        citation="CANON, arXiv 2509.23962, eq. 5 and 8, by length; constants of its scripts/setups.sh",
        verified="biuboomc/CANON at 7d6f814fb71f",
        differs="mu is constant, without the paper's schedules; 8192 becomes the longest answer of the sampler",
    ),
    Objective(
        "hbpo",
        BudgetTarget(),
        PpoClip(high=0.28, dual=3.0),
        TokenMean(),
        citation="HBPO, arXiv 2507.15844; clip 0.2/0.28 and dual clip 3 as in its code",
        verified="ZJU-REAL/HBPO at 5c8991d66483",
        differs="the code adds the budget's term twice and fails on groups of one; a question has one budget, while "
        "the paper samples all four in one group",
    ),
    Objective(
        "copo",
        ConsistencyBlend(),
        PpoClip(high=0.28),
        TokenMean(),
        citation="Han et al., COPO, arXiv 2508.04138 (gamma 20, rho 1.5)",
        verified="hand computation",
        differs="blends the two advantages, with entropies in nats, on DAPO's loss; the authors' code blends the two "
        "clipped losses, with entropies in bits, and its scripts clip at 0.2 and average over rows",
    ),
    Objective(
        "seed_grpo",
        EntropyDamped(),
        PpoClip(),
        TokenMean(),
        citation="Chen et al., SEED-GRPO, arXiv 2505.12346, with its linear function",
        verified="hand computation",
        differs="clusters are equal answers, counted without their probabilities; alpha is 0.5, as no code states one",
    ),
    Objective(
        "aspo_tir",
        EarlyCode(),
        PpoClip(high=0.28),
        TokenMean(),
        citation="ASPO in Understanding Tool-Integrated Reasoning, arXiv 2508.19201 (delta -2, k 0.7)",
        verified="hand computation",
    ),
    Objective(
        "d3s",
        GroupMeanStd(),
        PpoClip(high=0.28),
        TokenMean(),
        weight=DownSampled(),
        citation="D3S, arXiv 2509.22115, on DAPO's loss",
        verified="hand computation",
        differs="the rows of largest variance are those of each group, and all rows pass the policy; the shares are "
        "examples, as no code states them, and grow with weight.relax_steps",
    ),
    Objective(
        "selfplay_winrate",
        GroupMean(),
        PpoClip(),
        TokenMean(),
        citation="Swamy et al., SPO, arXiv 2401.04056, with the reward winrate",
        verified="hand computation",
        differs="the paper leaves the policy gradient open; this is PPO's clip on rewards minus their group's mean",
    ),
    Objective(
        "fapo",
        GroupMeanStd(),
        PpoClip(high=0.28, dual=10.0),
        TokenMean(),
        filter=ResampleGroups(),
        citation="FAPO, arXiv 2510.22543, with the reward flawless (DAPO with dual clip 10)",
        verified="hand computation",
        differs="DAPO's penalty of long responses is a reward of its own, overlong",
    ),
    Objective(
        "demo_regularised",
        GroupMean(),
        PpoClip(),
        TokenMean(),
        kl=K3(0.05),
        citation="Tiapkin et al., Demonstration-Regularized RL, arXiv 2310.17303, starting from a cloned policy",
        verified="hand computation",
        differs="the paper leaves the policy gradient open and its 1 / eta, here 0.05, to the task",
    ),
    Objective(
        "p3o_separate",
        GroupMean(),
        PpoClip(),
        SequenceMean(),
        ratio=SequenceProductRatio(),
        citation="Wu et al., P3O, arXiv 2310.00212, separate clipping (clip 0.2)",
        verified="hand computation",
        differs="groups may have more than the paper's two rows, whose advantages are (R_1 - R_2) / 2 and its negative",
    ),
    Objective(
        "p3o_joint",
        GroupMean(),
        JointPairs(),
        SequenceMean(),
        ratio=SequenceProductRatio(),
        citation="Wu et al., P3O, arXiv 2310.00212, joint clipping (clip 0.2)",
        verified="hand computation",
        differs="the mean over all pairs of a group, each in both orders, where the paper has one pair",
    ),
    Objective(
        "gepo",
        GroupMeanStd(),
        GroupPreference(),
        SequenceMean(),
        citation="Wu et al., OORL with GEPO, arXiv 2505.12723 (weights 0.01 and 1)",
        verified="hand computation",
        differs="beside GRPO, where the paper has REINFORCE++; beta and the divisor of the variance are not stated",
    ),
    Objective(
        "disco",
        GroupMean(),
        Discriminative(),
        SequenceMean(),
        citation="Li et al., DisCO, arXiv 2505.12366; constants of its scripts/train/run_disco_logL_1.5b_8k.sh",
        verified="Optimization-AI/DisCO at bd2b07812934",
        differs="rows above their group's mean are good and those below bad, which is 1 and 0 for binary rewards; the "
        "code reports another value with the same gradient, and takes the divergence of a micro-batch",
    ),
    Objective(
        "decoupled_reward",
        GroupMean(),
        # 0.1 of the paper's longest answer
        Discriminative(length_scale=819.2),
        SequenceMean(),
        citation="DRPO, arXiv 2510.04474; constants of its run_drpo_1.5b_8k.sh (lambda 0.1 of 8,192 tokens)",
        verified="Optimization-AI/DRPO at 405f70268c79",
        differs="as disco",
    ),
)
