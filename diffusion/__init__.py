"""Reinforcement learning of diffusion and flow models.

Recipes, transition kernels, rewards and models by name; importing the package loads none of them, only what is taken
from it: `from diffusion import AwmRecipe, FlowSdeStep, load_image_rewards`.
"""

from __future__ import annotations

from mmrl.lazy import lazy_names

_NAMES = {
    "diffusion.ac_flow": ("AcFlowConfig", "AcFlowRecipe"),
    "diffusion.awm": ("AwmConfig", "AwmRecipe"),
    "diffusion.conditioning": ("PromptEmbeddings", "TextRows"),
    "diffusion.data": ("DiffusionTask", "PromptConfig", "load_prompts"),
    "diffusion.ddpo": ("DdpoConfig", "DdpoRecipe"),
    "diffusion.flow_grpo": ("FlowGrpoConfig", "FlowGrpoRecipe"),
    "diffusion.flow_ppo": ("FlowPpoConfig", "FlowPpoRecipe"),
    "diffusion.forward_process": ("NoisyRows", "stack_timesteps"),
    "diffusion.grpo_guard": ("GrpoGuardConfig", "GrpoGuardRecipe"),
    "diffusion.flux": ("FluxTransformer", "Sd3Transformer"),
    "diffusion.guidance": ("GuidedVelocity", "euler_ode"),
    "diffusion.matching": ("nft_loss", "pseudo_log_likelihood", "sample_times"),
    "diffusion.nft": ("DiffusionNftConfig", "DiffusionNftRecipe"),
    "diffusion.orw_cfm": ("OrwConfig", "OrwRecipe"),
    "diffusion.pipelines": ("decode_latents", "encode_images", "load_pipeline"),
    "diffusion.model": ("LoraSettings", "ModelConfig"),
    "diffusion.policy": ("DiffusionPolicy", "load_policy"),
    "diffusion.pretrain": ("PretrainConfig", "PretrainRecipe"),
    "diffusion.rewards": ("IMAGE_REWARDS", "ImageReward", "load_image_rewards"),
    "diffusion.sampler": ("SamplerConfig", "sample_latents", "sample_trajectories"),
    "diffusion.schedule": ("make_solver", "sigma_grid"),
    "diffusion.ema": ("EMAWeights",),
    "diffusion.state_matching": ("StateMatching",),
    "diffusion.steps": (
        "STEPS",
        "CpsStep",
        "DanceSdeStep",
        "DdimStep",
        "FlowSdeStep",
        "OdeStep",
        "gaussian_kl",
        "sample_step",
        "velocity_kl",
    ),
}

__getattr__, __dir__, __all__ = lazy_names(__name__, _NAMES)
