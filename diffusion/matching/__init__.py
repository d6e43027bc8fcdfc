"""diffusion/matching."""
