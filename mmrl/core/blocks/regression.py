"""The policy loss of Reg-GRPO: advantages are regressed, within each group, on the log-ratios of whole rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mmrl.core.blocks.clip import Clip, Loss, Ratio
from mmrl.core.groups import group_count, group_sum
from mmrl.core.rollouts import Rollouts
from mmrl.fields import bounded, choice, rare


def group_deviations(x: Tensor, group: Tensor, valid: Tensor, ddof: int = 1) -> tuple[Tensor, Tensor]:
    """Distance (B,) of each valid row of x (B,) to the mean of its group, and the group's standard deviation (B,).

    Gradient: through both. Where all values of a group are equal, the distances keep their gradient and that of the
    standard deviation is 0, unlike in `group_center` and `group_std`, which are for constants.
    """
    x = torch.where(valid, x, 0.0)
    number = group_count(group, valid)
    centred = torch.where(valid, x - (group_sum(x, group)[group] / number.clamp(min=1)), 0.0)
    variance = group_sum(centred.square(), group)[group] / (number - ddof).clamp(min=1)
    # the root has an infinite slope at 0, which would make NaN of the whole gradient
    smallest = torch.finfo(variance.dtype).tiny
    return centred, torch.where(variance > smallest, variance.clamp(min=smallest).sqrt(), 0.0)


@dataclass(frozen=True)
class GroupRegression(Clip):
    """Squared distance between the advantage and the one that the policy's own log-ratio predicts.

    With rho_i the log-ratio of row i, the KL-regularised optimum has R = lambda rho + lambda log Z. Standardised over
    the group, lambda and Z are gone: the loss of row i is (A_i - (rho_i - mean rho) / (std rho + eps))^2. Nothing is
    clipped. At the first update of a step all rho are 0 and the gradient is that of -2 A rho / eps: a policy gradient
    of that size, which `trainer.max_grad_norm` bounds. Later updates of the same rollouts regress.

    Gradient: through rho, its mean and its standard deviation; the advantage is constant.

    Source: DeepVideo-R1, arXiv 2506.07464, section 3.2 and appendix A.4. The paper does not state eps and ddof; eps is
        that of TRL's advantages.
    """

    kind = "group_regression"
    exponentiates = False
    compares_rows = True
    eps: float = rare(bounded(1e-4, above=0))
    """Added to the standard deviation of the log-ratios; larger values soften the first update of a step."""
    ddof: int = rare(choice(1, (0, 1)))
    """1 divides the variance of the log-ratios by n - 1, 0 by n."""
    scale: float | None = rare(bounded(None, above=0))
    """The paper's lambda, in units of the advantage a nat: the prediction is scale (rho - mean rho), so that the
    log-ratios have a size to reach; none standardises."""

    def __call__(self, log_ratio: Tensor, logp: Tensor, advantage: Tensor, turn: Tensor | None = None) -> Loss:
        """See `Clip`; all rows are one group."""
        group = torch.zeros(len(log_ratio), dtype=torch.int64, device=log_ratio.device)
        return self._loss(log_ratio, advantage, group, torch.ones_like(group, dtype=torch.bool))

    def of_rollouts(self, log_ratio: Tensor, logp: Tensor, advantage: Tensor, rollouts: Rollouts) -> Loss:
        """See `Clip`; rows without a trained decision are left out of their group."""
        return self._loss(log_ratio, advantage, rollouts.group, rollouts.loss_mask.any(1))

    def _loss(self, log_ratio: Tensor, advantage: Tensor, group: Tensor, valid: Tensor) -> Loss:
        # each decision of a row carries the row's ratio
        centred, std = group_deviations(log_ratio[:, 0], group, valid, self.ddof)
        predicted = centred / (std + self.eps) if self.scale is None else self.scale * centred
        loss = (advantage.detach() - predicted[:, None]).square()
        return loss, {"policy/log_ratio_std": std.detach()[:, None].expand_as(loss)}

    def formula(self) -> str:
        centred = "(log r_i - mean_group log r)"
        if self.scale is None:
            return f"(A_i - {centred} / (std_group log r + {self.eps:g}))^2"
        return f"(A_i - {self.scale:g} {centred})^2"

    def conflicts(self, ratio: Ratio) -> Iterator[str]:
        if not ratio.row_gradient:
            yield (
                f"clip 'group_regression' compares whole rows, but ratio is '{ratio.kind}'. Use ratio "
                "'sequence_product' or 'sequence_full'."
            )
