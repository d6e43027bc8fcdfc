"""Published methods that are the code of another recipe with other constants, each a function of no arguments.

`mmrl.recipes.RECIPES` names them; a YAML file with `recipe: flow_grpo_fast` starts from these values in place of the
dataclass's own.
"""

from __future__ import annotations

import dataclasses

from diffusion.flow_grpo import FlowGrpoConfig
from diffusion.model import full_model
from diffusion.sampler import SamplerConfig
from diffusion.settings import image_trainer
from mmrl.training.loop.objectives import ObjectiveConfig


def flow_grpo_fast() -> FlowGrpoConfig:
    """Flow-GRPO on a short window of the steps, placed at random in the first half; the others follow the ODE.

    No guidance in rollouts, training or evaluation: the model learns what guidance gave. Coefficient-preserving steps
    (`cps`, noise 0.8), clip 1e-5, no KL. The public preset has 48 prompts of 24 images in an epoch.

    Source: yifan123/flow_grpo config/grpo.py (`*_fast_nocfg`), scripts/train_sd3_fast.py.
    """
    return FlowGrpoConfig(
        sampler=SamplerConfig(guidance=1.0, kernel="cps", noise_level=0.8, window=3),
        objective=ObjectiveConfig(preset="flow_grpo_fast", filter={"kind": "drop"}),
    )


def dance_grpo() -> FlowGrpoConfig:
    """DanceGRPO: constant noise eta (`dance_sde`), one initial noise a prompt, a random 60 % of each image's steps.

    Group advantages over the group's own standard deviation, clip 1e-4, no KL, no filter; 16 steps, eta 0.3, learning
    rate 1e-5 for full fine-tuning and groups of 12, as in the FLUX script. The public code scores the image predicted
    at the last step in place of the last state; here the last step is an ODE step to 0, which is that prediction.

    Source: Xue et al., DanceGRPO, arXiv 2505.07818; XueZeyue/DanceGRPO fastvideo/train_grpo_flux.py.
    """
    return FlowGrpoConfig(
        model=full_model(),
        sampler=SamplerConfig(
            steps=16, guidance=1.0, kernel="dance_sde", noise_level=0.3, same_noise=True, random_share=0.6
        ),
        objective=ObjectiveConfig(preset="dance_grpo"),
        trainer=dataclasses.replace(image_trainer(), samples_per_task=12, learning_rate=1e-5),
    )
