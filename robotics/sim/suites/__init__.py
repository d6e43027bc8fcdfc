"""Benchmarks that need a Python of their own: what a worker loads there, by path.

They import the standard library, numpy, gymnasium and their suite, nothing of this package.
"""

__all__: list[str] = []
