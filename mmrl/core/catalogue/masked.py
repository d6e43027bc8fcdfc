"""Objectives of masked-diffusion language models."""

from mmrl.core.blocks.advantage import GroupMean, GroupMeanStd
from mmrl.core.blocks.clip import Bgpo, PpoClip, SequenceFullRatio
from mmrl.core.blocks.divergence import K3
from mmrl.core.blocks.foreign import HintedEntropy
from mmrl.core.loss import TokenMean
from mmrl.core.objectives.objective import Objective

ROWS = (
    Objective(
        "bgpo",
        GroupMeanStd(),
        Bgpo(),
        TokenMean(),
        claim="a bound linear in its Monte Carlo samples allows many of them in constant memory",
        citation="BGPO (boundary-guided), arXiv 2510.11683, eq. of the lower bound",
        verified="yjyddq/DARE at 83ae8a305a53 (port of THU-KEG/BGPO), verl/trainer/ppo/dllm_core_algos.py",
        differs="decisions are the Monte Carlo draws of an answer; log-ratios of a draw are limited to +-20; the "
        "paper's bound, where the code divides by the answer's length (likelihood.per_token) and clips at 0.2",
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
