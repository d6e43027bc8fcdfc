"""Objectives that remember earlier steps: statistics of each task, quantiles, histories."""

from mmrl.core.objectives.objective import Objective

ROWS: tuple[Objective, ...] = ()
