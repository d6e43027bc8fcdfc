"""Recipes of papers on agents, one file a method."""
