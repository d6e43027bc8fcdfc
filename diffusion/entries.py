"""Recipes and metrics of diffusion and flow models; does not import the modules it refers to."""

from __future__ import annotations

from mmrl.entries import RecipeEntry

RECIPES = (
    RecipeEntry(
        "ddpo",
        "diffusion.methods.ddpo:DdpoRecipe:DdpoConfig",
        "policy gradient over denoising steps, with reward statistics per prompt",
        "Black et al., DDPO, arXiv 2305.13301",
    ),
    RecipeEntry(
        "flow_grpo",
        "diffusion.methods.flow_grpo:FlowGrpoRecipe:FlowGrpoConfig",
        "GRPO over stochastic denoising steps with guidance",
        "Liu et al., Flow-GRPO, arXiv 2505.05470",
    ),
    RecipeEntry(
        "flow_grpo_fast",
        "diffusion.methods.flow_grpo:FlowGrpoRecipe:FlowGrpoConfig",
        "Flow-GRPO on a window of three steps, without guidance",
        "yifan123/flow_grpo, fast presets",
        preset="diffusion.methods.flow_grpo:flow_grpo_fast",
    ),
    RecipeEntry(
        "grpo_guard",
        "diffusion.methods.flow_grpo:GrpoGuardRecipe:GrpoGuardConfig",
        "Flow-GRPO with ratios on the same scale at all steps",
        "GRPO-Guard, arXiv 2510.22319",
    ),
    RecipeEntry(
        "dance_grpo",
        "diffusion.methods.flow_grpo:FlowGrpoRecipe:FlowGrpoConfig",
        "GRPO over steps with constant noise, from shared initial noise",
        "Xue et al., DanceGRPO, arXiv 2505.07818",
        preset="diffusion.methods.flow_grpo:dance_grpo",
    ),
    RecipeEntry(
        "mix_grpo",
        "diffusion.methods.flow_grpo:FlowGrpoRecipe:FlowGrpoConfig",
        "Flow-GRPO on a window of steps that moves over training",
        "MixGRPO, arXiv 2507.21802",
        preset="diffusion.methods.flow_grpo:mix_grpo",
    ),
    RecipeEntry(
        "flow_dppo",
        "diffusion.methods.flow_grpo:FlowGrpoRecipe:FlowGrpoConfig",
        "Flow-GRPO with a limit on the exact divergence of a step instead of clipping",
        "Flow-DPPO, arXiv 2606.11025",
        preset="diffusion.methods.flow_grpo:flow_dppo",
    ),
    RecipeEntry(
        "awm",
        "diffusion.methods.awm:AwmRecipe:AwmConfig",
        "advantage-weighted matching of the policy's own images, with any solver",
        "Xue et al., AWM, arXiv 2509.25050",
    ),
    RecipeEntry(
        "diffusion_nft",
        "diffusion.methods.nft:DiffusionNftRecipe:DiffusionNftConfig",
        "two-sided matching around an old policy",
        "DiffusionNFT, arXiv 2509.16117",
    ),
    RecipeEntry(
        "orw_cfm_w2",
        "diffusion.methods.orw_cfm:OrwRecipe:OrwConfig",
        "reward-weighted matching with a Wasserstein bound",
        "Fan et al., ORW-CFM-W2, ICLR 2025",
    ),
    RecipeEntry(
        "ac_flow",
        "diffusion.methods.ac_flow:AcFlowRecipe:AcFlowConfig",
        "critic-weighted matching (reconstructed from the abstract)",
        "AC-Flow, arXiv 2510.18072",
    ),
    RecipeEntry(
        "diffusion_dpo",
        "diffusion.methods.dpo:DiffusionDpoRecipe:DiffusionDpoConfig",
        "Diffusion-DPO on pairs of images, with FiFA's filter",
        "Wallace et al., Diffusion-DPO, arXiv 2311.12908; Yang et al., FiFA, arXiv 2410.10166",
    ),
    RecipeEntry(
        "flow_pretrain",
        "diffusion.methods.pretrain:PretrainRecipe:PretrainConfig",
        "flow matching on captioned images",
        "Lipman et al., Flow Matching, arXiv 2210.02747",
        supervised=True,
    ),
)
SCORES = ("kl_ref", "kl_old")
"""Scores of denoising steps in addition to log-probabilities: divergences between two Gaussians."""
PLAN = "diffusion.diffusion_plan:footprint"
PREVIEW = "diffusion.diffusion_plan:preview"
READER = "diffusion.data.prompts:load_prompts"
"""Functions for `mmrl train --dry-run`."""
METRICS = {
    "response/length_mean": "Mean number of decisions in a sample: denoising steps, or times of matched velocities.",
    "response/length_max": "Maximum number of decisions in a sample of the step.",
    "loss/preference": "Mean preference loss over pairs of images.",
    "loss/nll_chosen": "Negative log-likelihood of the preferred images, coefficient included.",
    "rewards/chosen": "Mean implicit reward of the preferred images: beta times the log-ratio to the reference.",
    "rewards/rejected": "Mean implicit reward of the rejected images.",
    "rewards/margins": "Mean implicit reward of the preferred images minus that of the rejected ones.",
    "rewards/accuracies": "Fraction of pairs whose preferred image has the higher implicit reward.",
    "logps/chosen": "Mean surrogate log-probability of the preferred images.",
    "logps/rejected": "Mean surrogate log-probability of the rejected images.",
    "logps/accuracies": "Fraction of pairs whose preferred image has the higher surrogate log-probability.",
    "score/<reward>": "Mean of an optimised reward over held-out images.",
    "heldout/<reward>": "Mean over held-out images of a reward that is never optimised.",
    "policy/entropy": "Mean negative log-density of the sampled denoising steps, in nats per latent dimension.",
    "diversity/latent": "Mean root-mean-square distance between the latents of the images of a prompt.",
    "video/flicker": "Mean absolute difference between neighbouring kept frames of held-out videos, 0 to 1.",
    "distance/base": (
        "Mean squared distance between the velocities of the policy and the start model on held-out images."
    ),
    "cost/forward_rows": "Rows that the denoiser has evaluated without gradient for training so far.",
    "cost/train_rows": (
        "Rows that the denoiser has evaluated with gradient so far; each costs about as much as three without, "
        "because of the backward pass."
    ),
    "time/decode": "Seconds spent on sampling after the prompts are read, or on decoding latents.",
    "loss/kl_ema": "AWM's distance to the moving average of past policies, coefficient included.",
    "policy/kl_ema": "Mean squared distance between the velocities of the policy and the moving average.",
    "awm/error": "Mean matching error of the policy's velocity on its own images.",
    "awm/velocity_norm": "Mean ratio of the norms of the policy's and the reference's velocity over noisy versions.",
    "matching/error": "Mean matching error of the policy's velocity.",
    "matching/weight": "Mean weight of the matching errors.",
    "critic/explained/noisy": (
        "Fraction of the variance of returns that the critic explains at times above 0.5; NaN without such states."
    ),
    "critic/explained/clean": (
        "Fraction of the variance of returns that the critic explains at times of 0.5 or below; NaN without such "
        "states."
    ),
}
