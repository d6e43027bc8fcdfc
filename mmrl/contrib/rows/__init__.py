"""Objectives and blocks from single papers; `objective.preset` and `kind` look names up here after the library."""

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
"""Files with rows, in listing order."""
