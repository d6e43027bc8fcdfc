"""Benchmarks of the diffusion room."""
