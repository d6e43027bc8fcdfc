"""Tiny pipelines and their text encoders."""
