"""Objectives whose clip bounds or weights adapt to the batch."""

from mmrl.core.objectives.objective import Objective

ROWS: tuple[Objective, ...] = ()
