"""Multimodal and embodied reinforcement learning on one policy-optimisation core; import its rooms by name."""
