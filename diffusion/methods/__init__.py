"""Recipes of papers on diffusion and flow models, one file per method."""
