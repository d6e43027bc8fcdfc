"""Sampling through an inference engine of another Python, such as vLLM."""
