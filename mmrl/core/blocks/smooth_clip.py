"""Clip rules without a hard bound, and rules that select decisions by covariance or divergence."""
