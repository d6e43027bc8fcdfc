"""diffusion/models."""
