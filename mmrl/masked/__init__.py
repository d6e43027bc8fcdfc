"""Masked-diffusion language models: they fill in masked responses in any order."""
