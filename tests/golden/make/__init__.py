"""Golden numbers, made by `python -m tests.golden.make NAME [CLONE ...]`.

`packages` is the table of those that installed packages compute, `by_hand` has formulas of papers without public code,
and each other file calls the public code of somebody else; see tests/golden/README.md.
"""
