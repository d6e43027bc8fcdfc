"""Objectives of masked-diffusion language models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mmrl.core.blocks.advantage import GroupMeanStd
from mmrl.core.blocks.clip import Clip, Loss
from mmrl.core.loss import TokenMean
from mmrl.core.objectives.objective import Objective

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Bgpo(Clip):
    """Bound of the importance-weighted loss that is linear in Monte Carlo samples of a log-likelihood bound.

    -A (1 + d) where A >= 0, -A exp(d) where A < 0, d the log-ratio of a sample: never below -A exp(mean d) on average
    (exp(x) >= 1 + x, Jensen), the same to first order at d = 0. Samples may be backpropagated one at a time.

    Source: BGPO, arXiv 2510.11683.
    """

    kind = "bgpo"
    needs = frozenset({"draws"})

    def __call__(self, log_ratio: Tensor, logp: Tensor, advantage: Tensor, turn: Tensor | None = None) -> Loss:
        advantage = advantage.detach()
        return -advantage * torch.where(advantage < 0, log_ratio.exp(), 1.0 + log_ratio), {}

    def formula(self) -> str:
        return "[-A_it (1 + log r_it) where A_it >= 0, -A_it r_it elsewhere]"


ROWS: tuple[Objective, ...] = (
    Objective(
        "bgpo",
        GroupMeanStd(),
        Bgpo(),
        TokenMean(),
        claim="a bound linear in its Monte Carlo samples allows many of them in constant memory",
        citation="BGPO (boundary-guided), arXiv 2510.11683, eq. of the lower bound",
        verified="yjyddq/DARE at 83ae8a305a53 (port of THU-KEG/BGPO), verl/trainer/ppo/dllm_core_algos.py",
        differs="decisions are the Monte Carlo draws of an answer; log-ratios of a draw are limited to +-20; the "
        "paper's bound, where the code divides by the answer's length (likelihood.per_token) and clips at 0.2",
    ),
)
