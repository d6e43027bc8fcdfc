"""Recipes of papers on diffusion and flow models, one file a method."""
