"""Objectives that other libraries have: smooth clips, baselines, covariance masks."""

from mmrl.core.objectives.objective import Objective

ROWS: tuple[Objective, ...] = ()
