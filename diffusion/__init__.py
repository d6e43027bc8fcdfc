"""Reinforcement learning of diffusion and flow models.

Schedules, steps with a Gaussian log-probability, samplers and the methods on them (DDPO, Flow-GRPO, AWM, AC-Flow)
will live here. Importing this package loads none of them.
"""

__all__: list[str] = []
