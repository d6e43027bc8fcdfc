"""Benchmarks of diffusion models."""
