"""Policies around pipelines: families, conditioning, loading and averages of weights."""
