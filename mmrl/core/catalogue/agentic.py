"""Objectives that give credit to the turns of an agent."""

from mmrl.core.objectives.objective import Objective

ROWS: tuple[Objective, ...] = ()
