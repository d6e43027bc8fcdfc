"""Recipes and metrics of masked-diffusion language models; imports none of the modules that it names."""

from __future__ import annotations

from mmrl.entries import RecipeEntry

RECIPES = (
    RecipeEntry(
        "masked",
        "mmrl.masked.masked_recipe:MaskedRecipe:MaskedConfig",
        "any objective of the catalogue on a masked-diffusion language model (BGPO), with inpainted hints (IGPO)",
        "Nie et al., LLaDA, arXiv 2502.09992; BGPO, arXiv 2510.11683; IGPO (inpainting), arXiv 2509.10396",
    ),
    RecipeEntry(
        "masked_sft",
        "mmrl.masked.masked_recipe:MaskedSftRecipe:MaskedSftConfig",
        "masked-diffusion training of a language model on given completions",
        "Nie et al., LLaDA, arXiv 2502.09992",
        supervised=True,
    ),
)

SCORES = ("entropy", "entropy_old", "logp_ref", "probabilities", "budgets", "sources", "hints", "draws")
"""Outputs of a masked-diffusion policy besides log-probabilities, and data about its responses."""
PLAN = "mmrl.masked.masked_plan:footprint"
PREVIEW = "mmrl.vlm.data.preview:preview"
READER = "mmrl.vlm.data.dataset:load_tasks"
"""Functions for `mmrl train --dry-run`."""
BUILDS_ON = "mmrl.vlm"
"""Package whose metrics the recipes have too."""

METRICS = {
    "inpainting/rescued": "Fraction of the step's groups without a correct sample for which inpainting produced one.",
    "inpainting/right": "Fraction of the step's inpainted samples that are correct.",
    "inpainting/given": "Mean fraction of an inpainted response's tokens that were given.",
}
