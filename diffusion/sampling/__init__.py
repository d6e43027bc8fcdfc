"""diffusion/sampling."""
