"""Recipes of single papers for robots; loads none of the modules that it names."""

from __future__ import annotations

from mmrl.entries import RecipeEntry

RECIPES = (
    RecipeEntry(
        "tgpo",
        "robotics.contrib.tgpo:TgpoRecipe:TgpoConfig",
        "a formula of signal temporal logic, taken apart into timed subgoals that a policy sees and is paid for (TGPO)",
        "Meng et al., TGPO, arXiv 2510.00225",
    ),
)
EXTENDS = "robotics"
