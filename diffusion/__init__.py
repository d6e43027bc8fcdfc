"""Reinforcement learning of diffusion and flow models.

Recipes, transition kernels, rewards and models by name; importing the package loads none of them; each is loaded when
it is accessed: `from diffusion import AwmRecipe, FlowSdeStep, load_image_rewards`.
"""

from __future__ import annotations

from mmrl.entries import lazy_names

_NAMES = {
    "diffusion.data.prompts": (
        "DiffusionTask",
        "PromptConfig",
        "load_prompts",
    ),
    "diffusion.families.base": (
        "Family",
        "FamilyOptions",
    ),
    "diffusion.families.table": (
        "FAMILIES",
        "family_of",
    ),
    "diffusion.matching.losses": (
        "NoisyRows",
        "nft_loss",
        "pseudo_log_likelihood",
        "stack_timesteps",
    ),
    "diffusion.methods.ac_flow": (
        "AcFlowConfig",
        "AcFlowRecipe",
        "StateMatching",
    ),
    "diffusion.matching.times": (
        "TimestepConfig",
        "sample_times",
    ),
    "diffusion.methods.awm": (
        "AwmConfig",
        "AwmRecipe",
    ),
    "diffusion.methods.ddpo": (
        "DdpoConfig",
        "DdpoRecipe",
    ),
    "diffusion.methods.flow_grpo": (
        "FlowGrpoConfig",
        "FlowGrpoRecipe",
        "GrpoGuardConfig",
        "GrpoGuardRecipe",
    ),
    "diffusion.methods.nft": (
        "DiffusionNftConfig",
        "DiffusionNftRecipe",
    ),
    "diffusion.methods.orw_cfm": (
        "OrwConfig",
        "OrwRecipe",
    ),
    "diffusion.methods.pretrain": (
        "PretrainConfig",
        "PretrainRecipe",
    ),
    "diffusion.models.conditioning": (
        "PromptEmbeddings",
        "TextRows",
    ),
    "diffusion.models.ema": ("EMAWeights",),
    "diffusion.models.pipelines": (
        "decode_latents",
        "encode_images",
        "load_pipeline",
    ),
    "diffusion.models.diffusion_policy": (
        "DiffusionPolicy",
        "DiffusionLora",
        "PipelineConfig",
        "load_policy",
    ),
    "diffusion.rewards": (
        "IMAGE_REWARDS",
        "ImageReward",
        "load_image_rewards",
    ),
    "diffusion.sampling.latent_sampler": (
        "GuidedVelocity",
        "LatentSamplerConfig",
        "euler_ode",
        "sample_latents",
        "sample_trajectories",
    ),
    "diffusion.sampling.schedule": ("make_solver",),
    "diffusion.sampling.steps": (
        "CpsStep",
        "DanceSdeStep",
        "DdimStep",
        "FlowSdeStep",
        "OdeStep",
        "STEPS",
        "gaussian_kl",
        "sample_step",
        "velocity_kl",
    ),
}

__getattr__, __dir__, __all__ = lazy_names(__name__, _NAMES)
