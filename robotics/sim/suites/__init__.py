"""Benchmarks that need a Python of their own: what a worker loads there, by path.

`metaworld.py` and `libero.py` import the standard library, numpy and their suite, nothing of this package.
"""

__all__: list[str] = []
