"""Recipes of single papers for agents; loads none of the modules that it names."""

from __future__ import annotations

from mmrl.entries import RecipeEntry

RECIPES: tuple[RecipeEntry, ...] = ()
EXTENDS = "mmrl.agents"
