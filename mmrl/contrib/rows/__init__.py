"""Objectives and blocks of single papers; `objective.preset` and `kind` find them when the library has no such name."""

from mmrl.contrib.rows import (
    adaptive,
    agentic,
    bgpo,
    comparisons,
    estimators,
    further_pairs,
    prefixes,
    tracked,
)

FAMILIES = (adaptive, tracked, estimators, comparisons, agentic, prefixes, bgpo, further_pairs)
"""Files with rows, in the order in which they are listed."""
