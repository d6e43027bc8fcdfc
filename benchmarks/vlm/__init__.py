"""Benchmarks of the vision-language room."""
