"""Recipes of single papers for language and vision-language models; loads none of the modules that it names."""

from __future__ import annotations

from mmrl.entries import RecipeEntry

RECIPES: tuple[RecipeEntry, ...] = ()
EXTENDS = "mmrl.vlm"
