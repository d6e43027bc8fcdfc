"""diffusion/data."""
