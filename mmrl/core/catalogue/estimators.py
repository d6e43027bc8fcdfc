"""Objectives of papers whose core is an estimator, or a reward."""

from mmrl.core.blocks.clip import PpoClip
from mmrl.core.blocks.filter import DropGroups
from mmrl.core.blocks.shaping import BetaNormalised, RegroupedByLength, VirtualBest
from mmrl.core.loss import FixedLength, SequenceSum, TokenMean
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
        "canon_length",
        RegroupedByLength(),
        PpoClip(high=0.28, dual=3.0),
        FixedLength(8192),
        citation="CANON, arXiv 2509.23962, eq. 5 and 8, by length; constants of its scripts/setups.sh",
        verified="biuboomc/CANON at 7d6f814fb71f",
        differs="mu is constant, without the paper's schedules; 8192 becomes the longest answer of the sampler",
    ),
)
