"""diffusion/toy."""
