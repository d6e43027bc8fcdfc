"""Verifiable rewards: built-in ones, users' own, and their weighted sum; never imports torch."""
