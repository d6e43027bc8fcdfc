"""Published methods as rows of data: one `Objective` each, with the constants of its paper."""

from __future__ import annotations

import dataclasses

from mmrl.core.advantages import AdvantageOptions
from mmrl.core.checks import look_up
from mmrl.core.objective import Objective

__all__ = ["CATALOGUE", "get"]


def get(name: str) -> Objective:
    """Return a method of the catalogue.

    Args:
        name: Its name, such as "grpo"; `dataclasses.replace` changes options of what comes back.

    Returns:
        The objective.

    Raises:
        ValueError: No such method; the message lists what exists.
    """
    return look_up(CATALOGUE, name, "objective")


IMAGE_ADVANTAGES = AdvantageOptions(ddof=0, eps=1e-4, clip=5.0)
"""Of Flow-GRPO and AWM: the deviation of all rewards of the epoch, clipped at 5."""

_ROWS = (
    Objective(
        name="grpo",
        citation="Shao et al., DeepSeekMath, arXiv 2402.03300, eq. 3-4",
        advantage="group_mean_std",
        kl="k3",
        kl_coef=0.04,
        kl_clamp=False,
        aggregation="sequence_mean",
    ),
    Objective(
        name="dr_grpo",
        citation="Liu et al., Understanding R1-Zero-Like Training, arXiv 2503.20783, section 3.2",
        advantage="group_mean",
        aggregation="fixed_length",
        # generate_max_length of sail-sg/understand-r1-zero; to be set to the sampler's own limit.
        fixed_length=3000,
    ),
    Objective(
        name="dapo",
        citation="Yu et al., DAPO, arXiv 2503.14476, eq. 8-12 (clip 0.2/0.28, dynamic sampling, token mean)",
        advantage="group_mean_std",
        clip_high=0.28,
        aggregation="token_mean",
        filter="resample",
    ),
    Objective(
        name="rloo",
        citation="Ahmadian et al., Back to Basics, arXiv 2402.14740, section 3.2; clip and KL 0.05 as in TRL",
        advantage="leave_one_out",
        ratio="sequence_product",
        kl="k1",
        kl_coef=0.05,
        kl_in_reward=True,
        aggregation="sequence_mean",
    ),
    Objective(
        name="reinforce_pp",
        citation="Hu et al., REINFORCE++, arXiv 2501.03262; KL 0.001 for verifiable rewards as in OpenRLHF",
        advantage="whitened_returns",
        kl="k1",
        kl_coef=0.001,
        kl_in_reward=True,
        aggregation="token_mean",
    ),
    Objective(
        name="reinforce_pp_baseline",
        citation="Hu et al., REINFORCE++ (baseline variant), arXiv 2501.03262; k2 loss 0.001 as in OpenRLHF",
        advantage="group_mean_batch_std",
        kl="k2",
        kl_coef=0.001,
        aggregation="token_mean",
    ),
    Objective(
        name="gspo",
        citation="Zheng et al., GSPO, arXiv 2507.18071, eq. 5 and 13 (clip 3e-4/4e-4)",
        advantage="group_mean_std",
        ratio="sequence",
        surrogate="gspo",
        clip_low=3e-4,
        clip_high=4e-4,
        aggregation="sequence_mean",
    ),
    Objective(
        name="cispo",
        citation="MiniMax-M1, arXiv 2506.13585, eq. 4-5 (no lower bound); upper bound 5 of arXiv 2510.13786",
        advantage="group_mean_std",
        surrogate="cispo",
        clip_low=1.0,
        # The paper tunes its upper epsilon without printing it; ScaleRL and TRL cap the ratio at 5.
        clip_high=4.0,
        aggregation="token_mean",
    ),
    Objective(
        name="ppo",
        citation="Schulman et al., PPO, arXiv 1707.06347, eq. 7 and 9; GAE 1/0.95, dual clip 3, KL 0.05 in the reward",
        advantage="gae",
        advantage_options=AdvantageOptions(gamma=1.0, lam=0.95, whiten=True),
        dual_clip=3.0,
        kl="k1",
        kl_coef=0.05,
        kl_in_reward=True,
        aggregation="token_mean",
        value_coef=0.1,
        value_clip=0.2,
    ),
    Objective(
        name="flow_grpo",
        citation="Liu et al., Flow-GRPO, arXiv 2505.05470 (clip 1e-4, KL 0.04 of GenEval, deviation of the epoch)",
        advantage="group_mean_global_std",
        advantage_options=IMAGE_ADVANTAGES,
        clip_low=1e-4,
        clip_high=1e-4,
        kl="full",
        kl_coef=0.04,
        aggregation="token_mean",
    ),
    Objective(
        name="flow_grpo_fast",
        citation="Flow-GRPO, arXiv 2505.05470; its code's config/grpo.py, *_fast_nocfg (clip 1e-5, no KL)",
        advantage="group_mean_global_std",
        advantage_options=IMAGE_ADVANTAGES,
        clip_low=1e-5,
        clip_high=1e-5,
        aggregation="token_mean",
    ),
    Objective(
        name="ddpo",
        citation="Black et al., DDPO, arXiv 2305.13301 (clip 1e-4; the diffusion recipe keeps a history a prompt)",
        advantage="group_mean_std",
        advantage_options=AdvantageOptions(ddof=0, eps=1e-6, clip=5.0),
        clip_low=1e-4,
        clip_high=1e-4,
        aggregation="token_mean",
    ),
    Objective(
        name="dance_grpo",
        citation="Xue et al., DanceGRPO, arXiv 2505.07818 (clip 1e-4, standard deviation of the group)",
        advantage="group_mean_std",
        advantage_options=AdvantageOptions(ddof=1, eps=1e-8, clip=5.0),
        clip_low=1e-4,
        clip_high=1e-4,
        aggregation="token_mean",
    ),
    Objective(
        name="awm",
        citation="Xue et al., AWM, arXiv 2509.25050 (advantages within +-1, velocity distance 0.001)",
        advantage="group_mean_global_std",
        advantage_options=dataclasses.replace(IMAGE_ADVANTAGES, scale=0.2),
        clip_low=1.0,
        clip_high=1.0,
        kl="full",
        kl_coef=0.001,
        aggregation="token_mean",
    ),
    Objective(
        name="srpo",
        citation="SRPO, arXiv 2511.15605 (clip 0.2/0.28, dual clip 3, mean of episode means)",
        advantage="group_mean_std",
        clip_high=0.28,
        dual_clip=3.0,
        aggregation="sequence_mean",
    ),
)

CATALOGUE: dict[str, Objective] = {row.name: row for row in _ROWS}
