"""Scripts that compute the golden numbers, one a paper: `python -m tests.golden.make.PAPER [CLONE ...]`.

Each calls the public code of somebody else and writes tests/golden/PAPER.json; see tests/golden/README.md.
"""
