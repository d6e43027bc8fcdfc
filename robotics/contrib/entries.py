"""Recipes of single papers for robots; does not import the modules it refers to."""

from __future__ import annotations

from mmrl.entries import RecipeEntry

RECIPES = (
    RecipeEntry(
        "tgpo",
        "robotics.contrib.tgpo:TgpoRecipe:TgpoConfig",
        "a signal temporal logic formula, split into timed subgoals that a policy observes and is rewarded for (TGPO)",
        "Meng et al., TGPO, arXiv 2510.00225",
    ),
)
EXTENDS = "robotics"
