"""Benchmarks of vision-language models."""
