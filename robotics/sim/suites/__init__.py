"""Benchmarks that need a separate Python environment: the files that a worker loads there, by path.

They import the standard library, numpy, gymnasium and their suite, nothing of this package.
"""

__all__: list[str] = []
