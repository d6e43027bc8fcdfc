"""Objectives with an advantage estimator of their own."""

from mmrl.core.objectives.objective import Objective

ROWS: tuple[Objective, ...] = ()
