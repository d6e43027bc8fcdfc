"""Recipes of single papers for diffusion and flow models; loads none of the modules that it names."""

from __future__ import annotations

from mmrl.entries import RecipeEntry

RECIPES: tuple[RecipeEntry, ...] = ()
EXTENDS = "diffusion"
