"""Further objectives that learn from pairs of a preferred and a rejected response."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from mmrl.core.blocks.preference import MARGIN, BetaPair, MeanScore, PairLoss, Pairs, SumScore
from mmrl.core.objectives.pairwise import PreferenceObjective
from mmrl.fields import bounded, choice, rare

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class InpoPair(BetaPair):
    """IPO against the reference and the policy of an iteration before (INPO, arXiv 2407.00617, eq. 8)."""

    kind = "inpo"
    needs: ClassVar[frozenset[str]] = frozenset({"logp_ref", "logp_previous"})
    beta: float = rare(bounded(7.5e-3, above=0))
    """Regularisation (eta in the paper): the target margin is 1 / (2 beta)."""
    previous: float = rare(bounded(2 / 3, at_least=0, at_most=1))
    """Weight of the previous policy in the policy that the margin is measured from (1 - tau / eta)."""

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
    """DPO, plus lower likelihood for the opponent's responses, so the policy explores (XPO, arXiv 2405.21046)."""

    kind = "xpo"
    needs: ClassVar[frozenset[str]] = frozenset({"logp_ref", "own_answers"})
    opponent: ClassVar[str] = "reference"
    alpha: float = rare(bounded(1e-5, at_least=0))
    """Weight of the log-probability of the opponent's response."""

    def __call__(self, pairs: Pairs) -> Tensor:
        assert pairs.own_w is not None
        other = torch.where(pairs.own_w, pairs.logp_l, pairs.logp_w)
        return self.alpha * other - torch.nn.functional.logsigmoid(self.beta * pairs.margin)

    def formula(self) -> str:
        return f"-log sigmoid({self.beta:g} {MARGIN}) + {self.alpha:g} logp of the opponent's answer"


@dataclass(frozen=True)
class NashPair(BetaPair):
    """Policy gradient on the probability of winning against an opponent, with a KL to the reference (arXiv 2312.00886).

    Only the policy's own answer is learned from. TRL's loss, `beta` the weight of the KL.
    """

    kind = "nash"
    needs: ClassVar[frozenset[str]] = frozenset({"logp_ref", "pair_scores", "own_answers"})
    opponent: ClassVar[str] = "mixture"
    probability: str = rare(choice("sigmoid", ("sigmoid", "linear")))
    """Win probability for a score difference d: sigmoid(d) (TRL), or (1 + d) / 2 for scores that are fractions."""

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
    """Policy gradient of each side with a positive advantage, which is its score in the data (A-LoL, arXiv 2305.14718).

    The weight is the ratio of the whole answer to the reference, within bounds and without a gradient.
    """

    kind = "advantage"
    needs: ClassVar[frozenset[str]] = frozenset({"logp_ref", "pair_scores"})
    paired: ClassVar[bool] = False
    clip: float = rare(bounded(0.9, above=0, below=1))
    """Maximum distance of the ratio from 1."""

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
class ClippedRatioPair(PairLoss):
    """PPO's clipped loss with reward 1 for w and -1 for l, on the ratio to the reference (SPC, arXiv 2504.19162).

    The ratio is that of a whole answer; with a mean over its decisions, the geometric mean of theirs.
    """

    kind = "clipped_ratio"
    clip: float = rare(bounded(0.2, above=0, below=1))
    """Distance of the ratio from 1 beyond which it has no gradient."""

    def __call__(self, pairs: Pairs) -> Tensor:
        # bounds on the logarithms: the gradient of a clamped exp that overflows is 0 * inf
        good = pairs.log_ratio_w.clamp(max=math.log1p(self.clip)).exp()
        return 0.5 * (pairs.log_ratio_l.clamp(min=math.log1p(-self.clip)).exp() - good)

    def formula(self) -> str:
        low, high = f"{1 - self.clip:g}", f"{1 + self.clip:g}"
        return f"0.5 [max(rho_l, {low}) - min(rho_w, {high})], rho = exp(logp - logp_ref)"


@dataclass(frozen=True)
class RefuelPair(PairLoss):
    """Squared distance of the margin to the difference of the two scores (REFUEL, arXiv 2410.04612).

    The reference is the policy that drew the answers.
    """

    kind = "refuel"
    needs: ClassVar[frozenset[str]] = frozenset({"logp_ref", "pair_scores"})
    eta: float = rare(bounded(1.0, above=0))
    """Nats per unit of score difference; the public runs use 1000 with normalised rewards."""

    def __call__(self, pairs: Pairs) -> Tensor:
        assert pairs.score_w is not None
        assert pairs.score_l is not None
        return (pairs.margin - self.eta * (pairs.score_w - pairs.score_l).to(pairs.margin.dtype)).square()

    @property
    def reward_scale(self) -> float:
        return 1 / self.eta

    def formula(self) -> str:
        return f"({MARGIN} - {self.eta:g} (score_w - score_l))^2"


def _scores(pairs: Pairs) -> Tensor:
    """Scores of the preferred, then of the rejected sides."""
    assert pairs.score_w is not None
    assert pairs.score_l is not None
    return torch.cat([pairs.score_w, pairs.score_l])


ROWS: tuple[PreferenceObjective, ...] = (
    PreferenceObjective(
        "a_lol",
        AdvantagePair(clip=0.9),
        SumScore(),
        claim="offline learning from answers of positive advantage alone is stable on any language data",
        citation="Baheti et al., Advantage-Leftover Lunch RL (A-LoL), arXiv 2305.14718; clip 0.9 of its public code",
        verified="abaheti95/LoL-RL at 9f8d81660bfa",
        differs="the data's scores are the advantages, which the code takes from a value head on the frozen model; "
        "rows are drawn alike, in the code in proportion to their advantage",
    ),
    PreferenceObjective(
        "direct_advantage",
        RegressionPair(beta=0.1),
        SumScore(),
        claim="regressing on the advantages of given answers improves reasoning offline",
        citation="Liu et al., Direct Advantage Policy Optimization, arXiv 2412.18279; beta 0.1",
        verified="hand computation",
        differs="the data's scores are the advantages, which the paper takes from a critic that is trained before; "
        "whole answers, where the paper has the steps of a solution",
    ),
    PreferenceObjective(
        "xpo",
        XpoPair(beta=0.1),
        SumScore(),
        claim="an exploration bonus added to online DPO is provably sample-efficient",
        citation="Xie et al., XPO, arXiv 2405.21046, alg. 1; beta 0.1 and alpha 1e-5 as in TRL",
        verified="trl 0.29.1",
        differs="pairs with equal rewards are left out; TRL prefers the policy's answer",
    ),
    PreferenceObjective(
        "nash_md",
        NashPair(beta=0.1),
        SumScore(),
        claim="playing against a mixture with the reference converges to the regularised Nash equilibrium",
        citation="Munos et al., Nash-MD, arXiv 2312.00886, sec. 7 (Nash-MD-PG); beta 0.1 as in TRL",
        verified="trl 0.29.1",
    ),
    PreferenceObjective(
        "inpo",
        InpoPair(beta=7.5e-3),
        SumScore(),
        claim="no-regret self-play approximates the Nash equilibrium without estimating win rates",
        citation="Zhang et al., INPO, arXiv 2407.00617, eq. 8; eta 0.0075, tau = eta / 3",
        verified="hand computation",
    ),
    PreferenceObjective(
        "spc",
        ClippedRatioPair(clip=0.2),
        MeanScore(),
        claim="a critic improves by playing against a generator that hides errors",
        citation="Chen et al., SPC (self-play critic), arXiv 2504.19162; clip 0.2 of its public code",
        verified="chen-judge/SPC at e2d999d8335d",
        differs="right and wrong critiques in pairs; no supervised rows, which its script adds with weight 0.15",
    ),
    PreferenceObjective(
        "refuel",
        RefuelPair(eta=1.0),
        SumScore(),
        claim="regressing on differences of future rewards learns to plan over turns",
        citation="Gao et al., REFUEL, arXiv 2410.04612; eta 1 of its public code",
        verified="ZhaolinGao/REFUEL at b76c5343211c",
    ),
)
