"""diffusion/methods."""
