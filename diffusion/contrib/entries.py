"""Recipes of single papers for diffusion and flow models; loads none of the modules that it names."""

from __future__ import annotations

from mmrl.entries import RecipeEntry

RECIPES = (
    RecipeEntry(
        "flow_ppo",
        "diffusion.contrib.flow_ppo:FlowPpoRecipe:FlowPpoConfig",
        "PPO over stochastic denoising steps with AC-Flow's critic of the latents",
        "steps: Flow-GRPO, arXiv 2505.05470; credit: GAE, arXiv 1506.02438; the combination is the suite's own",
    ),
)
EXTENDS = "diffusion"
