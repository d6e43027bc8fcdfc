"""Shapes, digits, tiny pipelines and the demo."""
