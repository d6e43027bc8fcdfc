"""Objectives of recipes whose rows do not begin with the question: answers of teachers, hints."""

from mmrl.core.blocks.advantage import GroupMean
from mmrl.core.blocks.clip import PpoClip, SequenceFullRatio
from mmrl.core.blocks.divergence import K3
from mmrl.core.blocks.foreign import HintedEntropy, OffPolicyShaping
from mmrl.core.loss import FixedLength, TokenMean
from mmrl.core.objectives.objective import Objective

ROWS = (
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
        "inpainting_guided",
        GroupMean(),
        PpoClip(),
        TokenMean(),
        ratio=SequenceFullRatio(),
        kl=K3(0.01, clamp=False),
        weight=HintedEntropy(),
        claim="inpainting parts of worked answers gives groups that all fail a signal",
        citation="IGPO (inpainting-guided), arXiv 2509.10396; constants of run_igpo.sh",
        verified="facebookresearch/igpo at e85eaea1508c, trainer_igpo.py, utils/generate.py",
        differs="tokens are counted over the step, in the code over each device's batch; the KL covers the hints that "
        "are left out, too; inpainting itself is an option of recipe masked",
    ),
)
