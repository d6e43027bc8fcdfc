"""Benchmarks of the simulators."""
