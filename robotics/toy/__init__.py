"""Demos and the data that they make."""
