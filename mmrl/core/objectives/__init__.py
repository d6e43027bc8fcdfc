"""Objectives composed of blocks: policy gradients and preferences."""
