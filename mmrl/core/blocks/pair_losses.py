"""Additional losses on pairs: other bounds on the sides' implicit rewards, and losses that need no reference.

With r = logp - logp_ref, the log-ratio of a side, and h = r_w - r_l, the margin of the pair.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from mmrl.core.blocks.preference import MARGIN, BetaPair, Pairs
from mmrl.fields import bounded, rare

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ExoPair(BetaPair):
    """Reverse KL of the policy's choice between the two sides to the labels (EXO, arXiv 2402.00856, eq. 16).

    DPO is the forward KL.
    """

    kind = "exo"
    label_smoothing: float = rare(bounded(1e-3, above=0, below=0.5))
    """Probability that the labels assign to the rejected side; must be positive for the reverse KL."""

    def __call__(self, pairs: Pairs) -> Tensor:
        x, wrong = self.beta * pairs.margin, self.label_smoothing
        chosen = torch.sigmoid(x) * (torch.nn.functional.logsigmoid(x) - math.log1p(-wrong))
        return chosen + torch.sigmoid(-x) * (torch.nn.functional.logsigmoid(-x) - math.log(wrong))

    def formula(self) -> str:
        wrong = self.label_smoothing
        terms = f"p log(p / {1 - wrong:g}) + (1 - p) log((1 - p) / {wrong:g})"
        return f"{terms}, p = sigmoid({self.beta:g} {MARGIN})"


@dataclass(frozen=True)
class NcaPair(BetaPair):
    """Contrasts each side with the reference, which keeps w likely (NCA, arXiv 2402.05369, for pairs)."""

    kind = "nca"

    def __call__(self, pairs: Pairs) -> Tensor:
        good, bad = self.beta * pairs.log_ratio_w, self.beta * pairs.log_ratio_l
        log_sigmoid = torch.nn.functional.logsigmoid
        return -log_sigmoid(good) - 0.5 * (log_sigmoid(-good) + log_sigmoid(-bad))

    def formula(self) -> str:
        x, both = f"{self.beta:g} r_w", f"log sigmoid(-{self.beta:g} r_w) + log sigmoid(-{self.beta:g} r_l)"
        return f"-log sigmoid({x}) - 0.5 [{both}], r = logp - logp_ref"


@dataclass(frozen=True)
class BcoPair(BetaPair):
    """Binary classification of each side by its implicit reward (BCO, arXiv 2404.04656, without its shift)."""

    kind = "bco"

    def __call__(self, pairs: Pairs) -> Tensor:
        good, bad = self.beta * pairs.log_ratio_w, self.beta * pairs.log_ratio_l
        return -torch.nn.functional.logsigmoid(good) - torch.nn.functional.logsigmoid(-bad)

    def formula(self) -> str:
        return f"-log sigmoid({self.beta:g} r_w) - log sigmoid(-{self.beta:g} r_l), r = logp - logp_ref"


@dataclass(frozen=True)
class KtoPair(BetaPair):
    """Value of each side's implicit reward, which saturates on both sides of a baseline (KTO, arXiv 2402.01306, eq. 8).

    The sides do not have to answer the same question.
    """

    kind = "kto"
    needs: ClassVar[frozenset[str]] = frozenset({"logp_ref", "kl_baseline"})
    paired: ClassVar[bool] = False
    desirable: float = rare(bounded(1.0, at_least=0))
    """Weight of preferred answers (the paper's lambda_D)."""
    undesirable: float = rare(bounded(1.0, at_least=0))
    """Weight of rejected answers (lambda_U)."""

    def __call__(self, pairs: Pairs) -> Tensor:
        zero = 0.0 if pairs.baseline is None else pairs.baseline.detach().clamp(min=0)
        good = self.desirable * torch.sigmoid(self.beta * (zero - pairs.log_ratio_w))
        return torch.cat([good, self.undesirable * torch.sigmoid(self.beta * (pairs.log_ratio_l - zero))])

    def formula(self) -> str:
        good = f"{self.desirable:g} sigmoid({self.beta:g} (z - r)) of preferred answers"
        bad = f"{self.undesirable:g} sigmoid({self.beta:g} (r - z)) of rejected ones"
        return f"{good}, {bad}, r = logp - logp_ref, z = max(mean r of answers to other questions, 0)"


@dataclass(frozen=True)
class AnchoredZeroPair(BetaPair):
    """Raises w and lowers l, each until it is far from the reference (APO-zero, arXiv 2408.06266, eq. 7).

    For preferred answers that are better than the policy's own.
    """

    kind = "anchored_zero"

    def __call__(self, pairs: Pairs) -> Tensor:
        return torch.sigmoid(-self.beta * pairs.log_ratio_w) + torch.sigmoid(self.beta * pairs.log_ratio_l)

    def formula(self) -> str:
        return f"sigmoid(-{self.beta:g} r_w) + sigmoid({self.beta:g} r_l), r = logp - logp_ref"


@dataclass(frozen=True)
class AnchoredDownPair(BetaPair):
    """Lowers w, and l even more (APO-down, arXiv 2408.06266, eq. 8).

    For preferred answers that are worse than the policy's own.
    """

    kind = "anchored_down"

    def __call__(self, pairs: Pairs) -> Tensor:
        return torch.sigmoid(self.beta * pairs.log_ratio_w) + torch.sigmoid(-self.beta * pairs.margin)

    def formula(self) -> str:
        return f"sigmoid({self.beta:g} r_w) + sigmoid(-{self.beta:g} (r_w - r_l)), r = logp - logp_ref"


@dataclass(frozen=True)
class DiscopopPair(BetaPair):
    """Logistic loss for negative margins, exponential loss for positive ones (DiscoPOP, arXiv 2406.08414)."""

    kind = "discopop"
    tau: float = rare(bounded(0.05, above=0))
    """Width of the transition between the two losses, in implicit reward."""

    def __call__(self, pairs: Pairs) -> Tensor:
        x = self.beta * pairs.margin
        share = torch.sigmoid(x / self.tau)
        # share * exp(-x) in one exponential, since the two factors are 0 and inf far below 0
        exponential = torch.exp(-x - torch.nn.functional.softplus(-x / self.tau))
        return -torch.nn.functional.logsigmoid(x) * (1 - share) + exponential

    def formula(self) -> str:
        x = f"{self.beta:g} {MARGIN}"
        return f"-(1 - s) log sigmoid({x}) + s exp(-{x}), s = sigmoid({x} / {self.tau:g})"


@dataclass(frozen=True)
class ReferenceFreePair(BetaPair):
    """Logistic loss of the log-probabilities themselves with a target margin (SimPO, arXiv 2405.14734, eq. 6)."""

    kind = "reference_free"
    needs: ClassVar[frozenset[str]] = frozenset()
    gamma: float = rare(bounded(0.0, at_least=0))
    """Target margin of the implicit rewards of w and l; 0 is CPO (arXiv 2401.08417, eq. 3)."""

    def __call__(self, pairs: Pairs) -> Tensor:
        return -torch.nn.functional.logsigmoid(self.beta * (pairs.logp_w - pairs.logp_l) - self.gamma)

    def formula(self) -> str:
        return f"-log sigmoid({self.beta:g} {MARGIN}{f' - {self.gamma:g}' if self.gamma else ''})"


@dataclass(frozen=True)
class OddsRatioPair(BetaPair):
    """Logistic loss of the log odds ratio of the sides (ORPO, arXiv 2403.07691, eq. 7).

    Log-probabilities are means because the odds of a whole answer are practically its probability.
    """

    kind = "odds_ratio"
    needs: ClassVar[frozenset[str]] = frozenset()
    beta: float = rare(bounded(0.1, above=0))
    """Weight of the loss relative to the likelihood of the preferred answers (the paper's lambda)."""

    def __call__(self, pairs: Pairs) -> Tensor:
        return -self.beta * torch.nn.functional.logsigmoid(_log_odds(pairs.logp_w) - _log_odds(pairs.logp_l))

    def formula(self) -> str:
        return f"-{self.beta:g} log sigmoid(o_w - o_l), o = logp - log(1 - exp(logp))"


def _log_odds(logp: Tensor) -> Tensor:
    """Log odds of events with log-probabilities `logp`; one that rounding made certain gets those of the next float."""
    logp = logp.clamp(max=-torch.finfo(logp.dtype).eps)
    return logp - torch.log(-torch.expm1(logp))
