"""Weights of decisions in the policy loss."""
