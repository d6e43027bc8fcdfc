"""Blocks that remember earlier steps."""
