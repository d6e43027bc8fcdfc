"""Losses on pairs of a preferred and a rejected answer, and reductions of an answer's decisions to one number.

With h = (logp_w - logp_ref_w) - (logp_l - logp_ref_l), the margin of a pair (`Pairs.margin`), w the preferred side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from mmrl.core.block import Block
from mmrl.core.loss import masked_mean, masked_sum, required
from mmrl.core.rollouts import Rollouts
from mmrl.fields import bounded, choice, rare

if TYPE_CHECKING:
    from torch import Tensor

CHOSEN = "chosen"
"""Key of `Rollouts.extras` (B,): 1 on the preferred row of a group, 0 on the rejected one."""

SCORE = "pair_score"
"""Key of `Rollouts.extras` (B,): the score that a judge or reward model gave the row, for losses that use it."""

OWN = "own_answer"
"""Key of `Rollouts.extras` (B,): 1 if the policy wrote the answer, 0 if an opponent did."""

PREVIOUS = "logp_previous"
"""Key of `Rollouts.extras` (B, T): log-probabilities in nats under the policy of the previous iteration."""

BASELINE = "kl_baseline"
"""Key of `Rollouts.extras` (B,): mean log-ratio of answers to mismatched questions, the same in every row."""


@dataclass(frozen=True)
class Pairs:
    """Inputs of a preference loss on M pairs; w is the preferred (winning) side, l the rejected (losing) one."""

    logp_w: Tensor
    """(M,) nats under the policy, summed or averaged over the side's decisions; carries the gradient."""
    logp_l: Tensor
    """(M,)."""
    ref_w: Tensor | None = None
    """(M,) nats under the reference; None for losses without one."""
    ref_l: Tensor | None = None
    """(M,)."""
    score_w: Tensor | None = None
    """(M,) score of the side in the data; None if the data has none."""
    score_l: Tensor | None = None
    """(M,)."""
    previous_w: Tensor | None = None
    """(M,) nats under the policy of the previous iteration; None for losses without one."""
    previous_l: Tensor | None = None
    """(M,)."""
    own_w: Tensor | None = None
    """(M,) bool, whether w is the policy's answer and l an opponent's; None if either may be."""
    drift_w: Tensor | None = None
    """(M,) sum of log-ratio times log-probability of w's decisions, the former a constant: its gradient is that of the
    KL to the reference."""
    drift_l: Tensor | None = None
    """(M,)."""
    baseline: Tensor | None = None
    """(), mean log-ratio of mismatched answers; None for losses without one."""
    matched: bool = True
    """Whether w and l with the same index answer the same question."""

    @property
    def log_ratio_w(self) -> Tensor:
        """(M,) log-ratio of policy to reference of the preferred side; the reference is a constant."""
        # detached: the reference is a constant, even if it shares weights with the policy
        return self.logp_w if self.ref_w is None else self.logp_w - self.ref_w.detach()

    @property
    def log_ratio_l(self) -> Tensor:
        """(M,) log-ratio of policy to reference of the rejected side."""
        return self.logp_l if self.ref_l is None else self.logp_l - self.ref_l.detach()

    @property
    def margin(self) -> Tensor:
        """(M,) how much more the policy prefers w to l than the reference does, in nats."""
        return self.log_ratio_w - self.log_ratio_l


def pair_rows(rollouts: Rollouts) -> tuple[Tensor, Tensor]:
    """Find the two rows of each group.

    Args:
        rollouts: N groups of two rows, marked in `extras[CHOSEN]`.

    Returns:
        Rows of the preferred and of the rejected sides, each (N,) int64, group by group.

    Raises:
        ValueError: The rows are not marked, or a group is not one preferred and one rejected row.
    """
    mark = rollouts.extras.get(CHOSEN)
    if mark is None:
        raise ValueError(f"these rollouts contain no pairs: extras['{CHOSEN}'] (1 preferred, 0 rejected) is missing.")
    # every group number once on each side, or the two sides would not be of the same question
    wanted = torch.arange(rollouts.num_groups, device=rollouts.group.device)
    sides = []
    for name, rows in (("preferred", mark > 0.5), ("rejected", mark <= 0.5)):
        places = torch.nonzero(rows).flatten()
        # in order of groups, so that the sides with one index belong together
        places = places[torch.argsort(rollouts.group[places], stable=True)]
        if len(places) != len(wanted) or not torch.equal(rollouts.group[places], wanted):
            raise ValueError(
                # here rather than when sampled: a micro-batch of one row cuts a pair in two
                f"a pair is one preferred and one rejected row; {len(wanted)} groups have {len(places)} {name} rows. "
                "Micro-batches of at least 2 rows keep pairs whole."
            )
        sides.append(places)
    return sides[0], sides[1]


def side_rows(rollouts: Rollouts) -> tuple[Tensor, Tensor]:
    """Rows of the preferred and of the rejected answers, for losses that do not compare the two: any number of each."""
    # pairs if the numbers allow it, so that comparisons of the two sides can be logged
    if rollouts.num_rows == 2 * rollouts.num_groups:
        return pair_rows(rollouts)
    mark = required(rollouts.extras.get(CHOSEN), f"rollouts.extras['{CHOSEN}']", "1 preferred, 0 rejected")
    return torch.nonzero(mark > 0.5).flatten(), torch.nonzero(mark <= 0.5).flatten()


MARGIN = "h"


@dataclass(frozen=True)
class PairLoss(Block):
    """Loss of a pair."""

    needs: ClassVar[frozenset[str]] = frozenset({"logp_ref"})
    paired: ClassVar[bool] = True
    """Whether the two sides are compared; otherwise each has a separate loss."""
    opponent: ClassVar[str] = "policy"
    """Sampler of the other answer in the method's paper: policy, reference, or mixture of the two."""

    def __call__(self, pairs: Pairs) -> Tensor:
        """Loss (M,) of each pair; if sides are not compared, of each side, the preferred ones first.

        Gradient: through `logp_w` and `logp_l`.
        """
        raise NotImplementedError

    @property
    def reward_scale(self) -> float:
        """Factor that makes a log-ratio the implicit reward of an answer, for the metrics."""
        return 1.0


@dataclass(frozen=True)
class BetaPair(PairLoss):
    """Loss of beta times log-ratios."""

    beta: float = rare(bounded(0.1, above=0))
    """Strength of the pull towards the reference: an answer's implicit reward is beta times its log-ratio."""

    @property
    def reward_scale(self) -> float:
        return self.beta


@dataclass(frozen=True)
class SigmoidPair(BetaPair):
    """Logistic loss of the Bradley-Terry model (DPO, arXiv 2305.18290, eq. 7; smoothed: conservative DPO)."""

    kind = "sigmoid"
    label_smoothing: float = rare(bounded(0.0, at_least=0, below=0.5))
    """Assumed fraction of pairs with swapped sides; values above 0 are conservative DPO."""

    def __call__(self, pairs: Pairs) -> Tensor:
        # minus log-likelihood, with a share of the labels taken as swapped
        x, swapped = self.beta * pairs.margin, self.label_smoothing
        return -(1 - swapped) * torch.nn.functional.logsigmoid(x) - swapped * torch.nn.functional.logsigmoid(-x)

    def formula(self) -> str:
        kept, swapped = f"log sigmoid({self.beta:g} {MARGIN})", self.label_smoothing
        if not swapped:
            return f"-{kept}"
        return f"-{1 - swapped:g} {kept} - {swapped:g} log sigmoid(-{self.beta:g} {MARGIN})"


@dataclass(frozen=True)
class RobustPair(BetaPair):
    """Logistic loss that is unbiased if a known fraction of pairs is swapped (robust DPO, arXiv 2403.00409)."""

    kind = "robust"
    label_smoothing: float = rare(bounded(0.1, at_least=0, below=0.5))
    """Known fraction of pairs with swapped sides."""

    def __call__(self, pairs: Pairs) -> Tensor:
        x, swapped = self.beta * pairs.margin, self.label_smoothing
        clean = -(1 - swapped) * torch.nn.functional.logsigmoid(x)
        # the noise-corrected loss: its mean over swapped labels is the loss on clean ones
        return (clean + swapped * torch.nn.functional.logsigmoid(-x)) / (1 - 2 * swapped)

    def formula(self) -> str:
        swapped, x = self.label_smoothing, f"{self.beta:g} {MARGIN}"
        top = f"-{1 - swapped:g} log sigmoid({x}) + {swapped:g} log sigmoid(-{x})"
        return f"[{top}] / {1 - 2 * swapped:g}"


@dataclass(frozen=True)
class HingePair(BetaPair):
    """Hinge loss, 0 for pairs whose margin is at least 1 / beta (SLiC-HF, arXiv 2305.10425, with a reference)."""

    kind = "hinge"

    def __call__(self, pairs: Pairs) -> Tensor:
        # no gradient once the margin is reached, which bounds how far a pair can push
        return torch.relu(1 - self.beta * pairs.margin)

    def formula(self) -> str:
        return f"max(0, 1 - {self.beta:g} {MARGIN})"


@dataclass(frozen=True)
class IpoPair(BetaPair):
    """Squared distance of the margin to 1 / (2 beta) (IPO, arXiv 2310.12036, eq. 17; beta is its tau)."""

    kind = "ipo"

    def __call__(self, pairs: Pairs) -> Tensor:
        # a target and not a sign: the margin of a pair stops growing there, even if all labels agree
        return (pairs.margin - 1 / (2 * self.beta)).square()

    def formula(self) -> str:
        return f"({MARGIN} - {1 / (2 * self.beta):g})^2"


@dataclass(frozen=True)
class SppoPair(PairLoss):
    """Regresses each side's log-ratio on its win probability (SPPO, arXiv 2405.00675, eq. 4.7).

    The probability that w wins is the sigmoid of the difference of the two scores in the data.
    """

    kind = "sppo"
    needs: ClassVar[frozenset[str]] = frozenset({"logp_ref", "pair_scores"})
    beta: float = rare(bounded(1e-3, above=0))
    """The paper's 1 / eta: the target of the log-ratios is (P - 1/2) / beta."""

    def win_probability(self, pairs: Pairs) -> Tensor:
        """Probability (M,) that w wins."""
        assert pairs.score_w is not None
        assert pairs.score_l is not None
        # in the precision of log-probabilities, since the data's scores may be float64
        return torch.sigmoid(pairs.score_w - pairs.score_l).to(pairs.logp_w.dtype)

    def __call__(self, pairs: Pairs) -> Tensor:
        # the target of the log-ratio: 0 if both answers are equally good
        target = (self.win_probability(pairs) - 0.5) / self.beta
        # symmetric: what the preferred side gains in probability, the other is drawn to lose
        return 0.5 * ((pairs.log_ratio_w - target).square() + (pairs.log_ratio_l + target).square())

    @property
    def reward_scale(self) -> float:
        return self.beta

    def formula(self) -> str:
        return f"0.5 [(r_w - p)^2 + (r_l + p)^2], p = {self._probability}, r = logp - logp_ref"

    @property
    def _probability(self) -> str:
        return f"(sigmoid(score_w - score_l) - 0.5) / {self.beta:g}"


@dataclass(frozen=True)
class SppoHardPair(SppoPair):
    """SPPO for data without scores: w wins for certain (`sppo_hard` of TRL, which has no factor 1/2)."""

    kind = "sppo_hard"
    needs: ClassVar[frozenset[str]] = frozenset({"logp_ref"})

    def win_probability(self, pairs: Pairs) -> Tensor:
        """1 for every pair."""
        return torch.ones_like(pairs.logp_w)

    @property
    def _probability(self) -> str:
        return f"{0.5 / self.beta:g}"


@dataclass(frozen=True)
class NoPairLoss(PairLoss):
    """No loss on the pair; only the likelihood of the preferred answers remains (supervised learning)."""

    kind = "none"
    needs: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, pairs: Pairs) -> Tensor:
        # zeros that keep the shape, so that the count of pairs stays that of the data
        return torch.zeros_like(pairs.logp_w)

    def formula(self) -> str:
        return ""


@dataclass(frozen=True)
class PairScore(Block):
    """Reduce the log-probabilities of an answer's decisions to the score that a pair compares."""

    def __call__(self, logp: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Scores (B, K) of logp (B, T) in nats, with K = 1 or T, and a mask (B, K) of those that count."""
        raise NotImplementedError


@dataclass(frozen=True)
class SumScore(PairScore):
    """Log-probability of the whole answer, the sum over its decisions (DPO and related losses)."""

    kind = "sum"

    def __call__(self, logp: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        # a side with no trained decision has no score, as opposed to the score 0
        return masked_sum(logp, mask)[:, None], (mask > 0).any(1, keepdim=True)

    def formula(self) -> str:
        return "logp = sum over the decisions of an answer"


@dataclass(frozen=True)
class MeanScore(PairScore):
    """Log-probability per decision, the mean over an answer (IPO as computed by its authors and TRL)."""

    kind = "mean"

    def __call__(self, logp: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return masked_mean(logp, mask)[:, None], (mask > 0).any(1, keepdim=True)

    def formula(self) -> str:
        return "logp = mean over the decisions of an answer"


@dataclass(frozen=True)
class DecisionScore(PairScore):
    """Each decision is its own pair: noisy versions of two images at the same time with the same noise."""

    kind = "decision"

    def __call__(self, logp: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return logp, mask > 0

    def formula(self) -> str:
        return "logp of each decision, every one a pair of its own"


@dataclass(frozen=True)
class ChosenLikelihood(Block):
    """Negative log-likelihood of the preferred answers as an additional term (RPO, arXiv 2405.16436)."""

    kind = "nll"
    coef: float = bounded(0.0, at_least=0)
    """Weight of the term."""
    average: str = rare(choice("answers", ("answers", "decisions")))
    """answers: mean over answers of the mean of each answer; decisions: mean over all decisions of the step (TRL)."""

    def formula(self) -> str:
        over = "preferred answers of each one's mean" if self.average == "answers" else "preferred decisions"
        return f"{self.coef:g} * mean over {over} (-logp_it)"
