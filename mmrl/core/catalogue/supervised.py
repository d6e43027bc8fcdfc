"""Objectives that learn from given answers."""

from mmrl.core.blocks import GroupMeanStd, PolicyGradient, TokenMean
from mmrl.core.objectives.objective import Objective

ROWS = (Objective("sft", GroupMeanStd(), PolicyGradient(), TokenMean(), citation="maximum likelihood"),)
