"""Faults on purpose: kills, damaged inputs and hostile surroundings; `python -m tests.faults` runs them all."""
