"""Masked-diffusion language models: they fill in masked answers in any order, after all other tokens."""
