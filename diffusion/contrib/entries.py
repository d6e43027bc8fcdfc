"""Recipes of single papers for diffusion and flow models; does not import the modules it refers to."""

from __future__ import annotations

from mmrl.entries import RecipeEntry

RECIPES = (
    RecipeEntry(
        "flow_ppo",
        "diffusion.contrib.flow_ppo:FlowPpoRecipe:FlowPpoConfig",
        "PPO over stochastic denoising steps with AC-Flow's critic of the latents",
        "steps: Flow-GRPO, arXiv 2505.05470; credit: GAE, arXiv 1506.02438; the combination is new in this suite",
    ),
)
EXTENDS = "diffusion"
