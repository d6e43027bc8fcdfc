"""Clip rules whose bounds depend on the batch, the entropy or the probability of a decision."""
