"""Screens: coordinates, grounding and agents that act in a browser."""
