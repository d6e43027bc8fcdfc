"""Sampling through an inference engine in a separate Python environment, such as vLLM."""
