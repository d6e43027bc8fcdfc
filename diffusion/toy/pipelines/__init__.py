"""diffusion/toy/pipelines."""
