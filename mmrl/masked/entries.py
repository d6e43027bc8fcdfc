"""Recipes and metrics of masked-diffusion language models; loads none of the modules that it names."""

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
"""Outputs of a masked-diffusion policy besides log-probabilities, and data of its answers."""
PLAN = "mmrl.masked.masked_plan:footprint"
PREVIEW = "mmrl.vlm.data.preview:preview"
READER = "mmrl.vlm.data.dataset:load_tasks"
"""Functions for `mmrl train --dry-run`."""
BUILDS_ON = "mmrl.vlm"
"""Package whose metrics the recipes have too."""

METRICS = {
    "inpainting/rescued": "Share of the step's groups that all samples missed and inpainting has a right sample for.",
    "inpainting/right": "Share of the inpainted samples of the step that are right.",
    "inpainting/given": "Mean share of an inpainted answer's tokens that were given.",
}
