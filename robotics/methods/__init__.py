"""Recipes of papers on robot policies, one file a method."""
