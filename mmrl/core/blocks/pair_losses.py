"""Further losses on pairs: other bounds on the sides' implicit rewards, and losses that need no reference.

With r = logp - logp_ref, the log-ratio of a side, and h = r_w - r_l, the margin of the pair.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from mmrl.core.blocks.preference import MARGIN, BetaPair, PairLoss, Pairs
from mmrl.fields import bounded, choice, rare


@dataclass(frozen=True)
class ExoPair(BetaPair):
    """Reverse KL of the policy's choice between the two sides to the labels (EXO, arXiv 2402.00856, eq. 16).

    DPO is the forward KL.
    """

    kind = "exo"
    label_smoothing: float = rare(bounded(1e-3, above=0, below=0.5))
    """Probability that the labels give to the rejected side; the reverse KL needs it to be positive."""

    def __call__(self, pairs: Pairs) -> Tensor:
        x, wrong = self.beta * pairs.margin, self.label_smoothing
        chosen = torch.sigmoid(x) * (functional.logsigmoid(x) - math.log1p(-wrong))
        return chosen + torch.sigmoid(-x) * (functional.logsigmoid(-x) - math.log(wrong))

    def formula(self) -> str:
        wrong = self.label_smoothing
        terms = f"p log(p / {1 - wrong:g}) + (1 - p) log((1 - p) / {wrong:g})"
        return f"{terms}, p = sigmoid({self.beta:g} {MARGIN})"


@dataclass(frozen=True)
class NcaPair(BetaPair):
    """Contrast of each side with the reference, which keeps w likely (NCA, arXiv 2402.05369, for pairs)."""

    kind = "nca"

    def __call__(self, pairs: Pairs) -> Tensor:
        good, bad = self.beta * pairs.log_ratio_w, self.beta * pairs.log_ratio_l
        return -functional.logsigmoid(good) - 0.5 * (functional.logsigmoid(-good) + functional.logsigmoid(-bad))

    def formula(self) -> str:
        x, both = f"{self.beta:g} r_w", f"log sigmoid(-{self.beta:g} r_w) + log sigmoid(-{self.beta:g} r_l)"
        return f"-log sigmoid({x}) - 0.5 [{both}], r = logp - logp_ref"


@dataclass(frozen=True)
class BcoPair(BetaPair):
    """Binary classification of each side by its implicit reward (BCO, arXiv 2404.04656, without its shift)."""

    kind = "bco"

    def __call__(self, pairs: Pairs) -> Tensor:
        good, bad = self.beta * pairs.log_ratio_w, self.beta * pairs.log_ratio_l
        return -functional.logsigmoid(good) - functional.logsigmoid(-bad)

    def formula(self) -> str:
        return f"-log sigmoid({self.beta:g} r_w) - log sigmoid(-{self.beta:g} r_l), r = logp - logp_ref"


@dataclass(frozen=True)
class KtoPair(BetaPair):
    """Value of each side's implicit reward, which saturates on both sides of a baseline (KTO, arXiv 2402.01306, eq. 8).

    The sides need not be answers to the same question.
    """

    kind = "kto"
    needs: ClassVar[frozenset[str]] = frozenset({"logp_ref", "kl_baseline"})
    paired: ClassVar[bool] = False
    desirable: float = rare(bounded(1.0, at_least=0, finite=True))
    """Weight of preferred answers (the paper's lambda_D)."""
    undesirable: float = rare(bounded(1.0, at_least=0, finite=True))
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
class InpoPair(BetaPair):
    """IPO against the reference and the policy of an iteration before (INPO, arXiv 2407.00617, eq. 8)."""

    kind = "inpo"
    needs: ClassVar[frozenset[str]] = frozenset({"logp_ref", "logp_previous"})
    beta: float = rare(bounded(7.5e-3, above=0, finite=True))
    """The paper's eta: the margin is drawn to 1 / (2 beta)."""
    previous: float = rare(bounded(2 / 3, at_least=0, at_most=1))
    """Share of the previous policy in the policy that the margin is measured from (1 - tau / eta)."""

    def __call__(self, pairs: Pairs) -> Tensor:
        assert pairs.previous_w is not None
        assert pairs.previous_l is not None
        moved = pairs.logp_w - pairs.previous_w.detach() - pairs.logp_l + pairs.previous_l.detach()
        margin = self.previous * moved + (1 - self.previous) * pairs.margin
        return (margin - 1 / (2 * self.beta)).square()

    def formula(self) -> str:
        return f"({1 - self.previous:g} {MARGIN} + {self.previous:g} h_previous - {1 / (2 * self.beta):g})^2"


@dataclass(frozen=True)
class XpoPair(BetaPair):
    """DPO, and less likelihood for the opponent's answers, so that the policy explores (XPO, arXiv 2405.21046)."""

    kind = "xpo"
    needs: ClassVar[frozenset[str]] = frozenset({"logp_ref", "own_answers"})
    opponent: ClassVar[str] = "reference"
    alpha: float = rare(bounded(1e-5, at_least=0, finite=True))
    """Weight of the log-probability of the opponent's answer."""

    def __call__(self, pairs: Pairs) -> Tensor:
        assert pairs.own_w is not None
        other = torch.where(pairs.own_w, pairs.logp_l, pairs.logp_w)
        return self.alpha * other - functional.logsigmoid(self.beta * pairs.margin)

    def formula(self) -> str:
        return f"-log sigmoid({self.beta:g} {MARGIN}) + {self.alpha:g} logp of the opponent's answer"


@dataclass(frozen=True)
class NashPair(BetaPair):
    """Policy gradient on the probability to win against an opponent, with a KL to the reference (arXiv 2312.00886).

    Only the policy's own answer is learnt from. TRL's loss, `beta` the weight of the KL.
    """

    kind = "nash"
    needs: ClassVar[frozenset[str]] = frozenset({"logp_ref", "pair_scores", "own_answers"})
    opponent: ClassVar[str] = "mixture"
    probability: str = rare(choice("sigmoid", ("sigmoid", "linear")))
    """Probability to win of a difference of scores d: sigmoid(d) (TRL), or (1 + d) / 2, for scores that are shares."""

    def __call__(self, pairs: Pairs) -> Tensor:
        assert pairs.own_w is not None
        assert pairs.drift_w is not None
        assert pairs.drift_l is not None
        assert pairs.score_w is not None
        assert pairs.score_l is not None
        ahead = torch.where(pairs.own_w, pairs.score_w - pairs.score_l, pairs.score_l - pairs.score_w)
        wins = torch.sigmoid(ahead) if self.probability == "sigmoid" else (1 + ahead) / 2
        logp = torch.where(pairs.own_w, pairs.logp_w, pairs.logp_l)
        drift = torch.where(pairs.own_w, pairs.drift_w, pairs.drift_l)
        return self.beta * drift - (wins.detach().to(logp.dtype) - 0.5) * logp

    def formula(self) -> str:
        wins = "sigmoid(d)" if self.probability == "sigmoid" else "(1 + d) / 2"
        gain = f"({wins} - 0.5) logp of the own answer, d = its score - the opponent's"
        return f"{self.beta:g} KL(policy, reference) - {gain}"


@dataclass(frozen=True)
class AdvantagePair(PairLoss):
    """Policy gradient of each side that has a positive advantage, its score in the data (A-LoL, arXiv 2305.14718).

    The weight is the ratio of the whole answer to the reference, within bounds and without a gradient.
    """

    kind = "advantage"
    needs: ClassVar[frozenset[str]] = frozenset({"logp_ref", "pair_scores"})
    paired: ClassVar[bool] = False
    clip: float = rare(bounded(0.9, above=0, below=1))
    """Distance of the ratio from 1 at which it is bounded."""

    def __call__(self, pairs: Pairs) -> Tensor:
        low, high = math.log1p(-self.clip), math.log1p(self.clip)
        ratios = (pairs.log_ratio_w, pairs.log_ratio_l)
        ratio = torch.cat([x.detach().clamp(low, high).exp() for x in ratios])
        return -_scores(pairs).clamp(min=0).to(ratio.dtype) * ratio * torch.cat([pairs.logp_w, pairs.logp_l])

    def formula(self) -> str:
        ratio = f"clip(exp(logp - logp_ref), {1 - self.clip:g}, {1 + self.clip:g})"
        return f"-max(A, 0) {ratio} logp of each side, the ratio a constant"


@dataclass(frozen=True)
class RegressionPair(BetaPair):
    """Squared distance of each side's implicit reward to its advantage, its score in the data (arXiv 2412.18279)."""

    kind = "regression"
    needs: ClassVar[frozenset[str]] = frozenset({"logp_ref", "pair_scores"})
    paired: ClassVar[bool] = False

    def __call__(self, pairs: Pairs) -> Tensor:
        reward = self.beta * torch.cat([pairs.log_ratio_w, pairs.log_ratio_l])
        return 0.5 * (reward - _scores(pairs).to(reward.dtype)).square()

    def formula(self) -> str:
        return f"0.5 ({self.beta:g} r - A)^2 of each side, r = logp - logp_ref"


@dataclass(frozen=True)
class AnchoredZeroPair(BetaPair):
    """Raise w and lower l, each until it is far from the reference (APO-zero, arXiv 2408.06266, eq. 7).

    For preferred answers that are better than the policy's own.
    """

    kind = "anchored_zero"

    def __call__(self, pairs: Pairs) -> Tensor:
        return torch.sigmoid(-self.beta * pairs.log_ratio_w) + torch.sigmoid(self.beta * pairs.log_ratio_l)

    def formula(self) -> str:
        return f"sigmoid(-{self.beta:g} r_w) + sigmoid({self.beta:g} r_l), r = logp - logp_ref"


@dataclass(frozen=True)
class AnchoredDownPair(BetaPair):
    """Lower w, and l by more (APO-down, arXiv 2408.06266, eq. 8).

    For preferred answers that are worse than the policy's own.
    """

    kind = "anchored_down"

    def __call__(self, pairs: Pairs) -> Tensor:
        return torch.sigmoid(self.beta * pairs.log_ratio_w) + torch.sigmoid(-self.beta * pairs.margin)

    def formula(self) -> str:
        return f"sigmoid({self.beta:g} r_w) + sigmoid(-{self.beta:g} (r_w - r_l)), r = logp - logp_ref"


@dataclass(frozen=True)
class DiscopopPair(BetaPair):
    """Logistic loss where the margin is negative, exponential where it is positive (DiscoPOP, arXiv 2406.08414)."""

    kind = "discopop"
    tau: float = rare(bounded(0.05, above=0, finite=True))
    """Width of the change from one to the other, in implicit reward."""

    def __call__(self, pairs: Pairs) -> Tensor:
        x = self.beta * pairs.margin
        share = torch.sigmoid(x / self.tau)
        # share * exp(-x) in one exponential, since the two factors are 0 and inf far below 0
        return -functional.logsigmoid(x) * (1 - share) + torch.exp(-x - functional.softplus(-x / self.tau))

    def formula(self) -> str:
        x = f"{self.beta:g} {MARGIN}"
        return f"-(1 - s) log sigmoid({x}) + s exp(-{x}), s = sigmoid({x} / {self.tau:g})"


@dataclass(frozen=True)
class ReferenceFreePair(BetaPair):
    """Logistic loss of the log-probabilities themselves with a target margin (SimPO, arXiv 2405.14734, eq. 6)."""

    kind = "reference_free"
    needs: ClassVar[frozenset[str]] = frozenset()
    gamma: float = rare(bounded(0.0, at_least=0, finite=True))
    """Target margin of the implicit rewards of w and l; 0 is CPO (arXiv 2401.08417, eq. 3)."""

    def __call__(self, pairs: Pairs) -> Tensor:
        return -functional.logsigmoid(self.beta * (pairs.logp_w - pairs.logp_l) - self.gamma)

    def formula(self) -> str:
        return f"-log sigmoid({self.beta:g} {MARGIN}{f' - {self.gamma:g}' if self.gamma else ''})"


@dataclass(frozen=True)
class OddsRatioPair(BetaPair):
    """Logistic loss of the log odds ratio of the sides (ORPO, arXiv 2403.07691, eq. 7).

    Log-probabilities are means, since the odds of a whole answer are its probability.
    """

    kind = "odds_ratio"
    needs: ClassVar[frozenset[str]] = frozenset()
    beta: float = rare(bounded(0.1, above=0, finite=True))
    """Weight of the loss relative to the likelihood of the preferred answers (the paper's lambda)."""

    def __call__(self, pairs: Pairs) -> Tensor:
        return -self.beta * functional.logsigmoid(_log_odds(pairs.logp_w) - _log_odds(pairs.logp_l))

    def formula(self) -> str:
        return f"-{self.beta:g} log sigmoid(o_w - o_l), o = logp - log(1 - exp(logp))"


@dataclass(frozen=True)
class ClippedRatioPair(PairLoss):
    """PPO's clipped loss with reward 1 for w and -1 for l, on the ratio to the reference (SPC, arXiv 2504.19162).

    The ratio is that of a whole answer; with a mean over its decisions, the geometric mean of theirs.
    """

    kind = "clipped_ratio"
    clip: float = rare(bounded(0.2, above=0, below=1))
    """Distance of the ratio from 1 at which its gradient stops."""

    def __call__(self, pairs: Pairs) -> Tensor:
        # bounds on the logarithms: the gradient of a clamped exp that overflows is 0 * inf
        good = pairs.log_ratio_w.clamp(max=math.log1p(self.clip)).exp()
        return 0.5 * (pairs.log_ratio_l.clamp(min=math.log1p(-self.clip)).exp() - good)

    def formula(self) -> str:
        low, high = f"{1 - self.clip:g}", f"{1 + self.clip:g}"
        return f"0.5 [max(rho_l, {low}) - min(rho_w, {high})], rho = exp(logp - logp_ref)"


def _scores(pairs: Pairs) -> Tensor:
    """Scores of the preferred, then of the rejected sides."""
    assert pairs.score_w is not None
    assert pairs.score_l is not None
    return torch.cat([pairs.score_w, pairs.score_l])


def _log_odds(logp: Tensor) -> Tensor:
    """Log odds of events with log-probabilities `logp`; one that rounding made certain gets those of the next float."""
    logp = logp.clamp(max=-torch.finfo(logp.dtype).eps)
    return logp - torch.log(-torch.expm1(logp))
