"""Benchmarks of screens and environments in a browser."""
