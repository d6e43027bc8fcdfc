"""Recipes of papers on a vision-language model, one file a method."""
