"""Objectives of diffusion and flow models; a decision is a denoising step or a noisy version of an image."""

from mmrl.core.blocks.advantage import AdvantageScaling, GroupMeanGlobalStd, GroupMeanStd
from mmrl.core.blocks.clip import DivergenceMask, PpoClip
from mmrl.core.blocks.divergence import ExactKl
from mmrl.core.blocks.smooth_clip import StepRanking
from mmrl.core.loss import TokenMean
from mmrl.core.objectives.objective import Objective

ROWS = (
    Objective(
        "flow_grpo",
        GroupMeanGlobalStd(eps=1e-4),
        PpoClip(low=1e-4, high=1e-4),
        TokenMean(),
        scaling=AdvantageScaling(clip=5.0),
        kl=ExactKl(0.04),
        claim="turning the sampler into an SDE makes flow models trainable by policy gradients",
        citation="Liu et al., Flow-GRPO, arXiv 2505.05470 (clip 1e-4, KL 0.04 of GenEval, deviation of the epoch)",
        verified="yifan123/flow_grpo at ac4c86e8cae0, diffusers 0.42.1",
    ),
    Objective(
        "flow_grpo_fast",
        GroupMeanGlobalStd(eps=1e-4),
        PpoClip(low=1e-5, high=1e-5),
        TokenMean(),
        scaling=AdvantageScaling(clip=5.0),
        claim="training on a few stochastic steps of each trajectory is enough, at a fraction of the time",
        citation="Flow-GRPO, arXiv 2505.05470; its code's config/grpo.py, *_fast_nocfg (clip 1e-5, no KL)",
        verified="yifan123/flow_grpo at 3d02fd9d6595, scripts/train_sd3_fast.py",
    ),
    Objective(
        "flow_dppo",
        GroupMeanGlobalStd(ddof=1, eps=1e-8),
        DivergenceMask(limit=1e-5),
        TokenMean(),
        claim="the exact KL of a denoising step is a better trust region than a clip of its ratio",
        citation="Flow-DPPO, arXiv 2606.11025; UniRL's examples/diffusion/sd3_flowdppo.yaml (limit 1e-5, no KL)",
        verified="Tencent-Hunyuan/UniRL at 1a7b501e8fe8",
    ),
    Objective(
        "step_nft",
        GroupMeanStd(),
        StepRanking(),
        TokenMean(),
        claim="contrastive ranking of single solver steps trains flow policies without likelihoods or a critic",
        citation="pi-StepNFT, arXiv 2603.02083; strength 1, beta 1 and advantages within 0.5 of RLinf's configuration",
        verified="RLinf/RLinf at a3816b596478",
        differs="every step of a chain is ranked, not one drawn at random; no floor of 1e-4 under the variance; the "
        "old policy is that before the update, not a moving average",
    ),
    Objective(
        "ddpo",
        GroupMeanStd(ddof=0, eps=1e-6),
        PpoClip(low=1e-4, high=1e-4),
        TokenMean(),
        scaling=AdvantageScaling(clip=5.0),
        claim="policy gradients over denoising steps beat reward-weighted likelihood training",
        citation="Black et al., DDPO, arXiv 2305.13301 (clip 1e-4; the diffusion recipe keeps a history a prompt)",
        verified="kvablack/ddpo-pytorch at 1958463f0201, diffusers 0.42.1",
        differs="the history of a prompt's rewards is that of recipe ddpo",
    ),
    Objective(
        "dance_grpo",
        GroupMeanStd(ddof=1, eps=1e-8),
        PpoClip(low=1e-4, high=1e-4),
        TokenMean(),
        scaling=AdvantageScaling(clip=5.0),
        claim="one GRPO formulation trains diffusion and flow models, for images and videos",
        citation="Xue et al., DanceGRPO, arXiv 2505.07818 (clip 1e-4, standard deviation of the group)",
        verified="XueZeyue/DanceGRPO at 15cc71d53cc2",
    ),
    Objective(
        "awm",
        GroupMeanGlobalStd(eps=1e-4),
        PpoClip(low=1.0, high=1.0),
        TokenMean(),
        scaling=AdvantageScaling(clip=5.0, scale=0.2),
        kl=ExactKl(0.001),
        claim="advantage-weighted matching reaches Flow-GRPO's scores up to 24 times faster",
        citation="Xue et al., AWM, arXiv 2509.25050 (advantages within +-1, velocity distance 0.001)",
        verified="scxue/advantage_weighted_matching at be5137232e33",
    ),
)
