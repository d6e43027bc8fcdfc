"""Preference optimisation on sampled pairs of answers, and the opponents that write them."""
