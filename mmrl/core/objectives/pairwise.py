"""A method that learns from pairs of a preferred and a rejected answer, as data: typed blocks, composed into a loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from mmrl.core.block import Block
from mmrl.core.blocks import PREFERENCE_BLOCKS
from mmrl.core.blocks.filter import Epochs, GroupFilter, KeepAll, TaskOrder
from mmrl.core.blocks.preference import (
    BASELINE,
    OWN,
    PREVIOUS,
    SCORE,
    ChosenLikelihood,
    NoPairLoss,
    PairLoss,
    Pairs,
    PairScore,
    SigmoidPair,
    SumScore,
    pair_rows,
    side_rows,
)
from mmrl.core.loss import Denominators, LossOutput, Metric, PolicyOutputs, count, masked_mean, masked_sum, required
from mmrl.core.objectives.objective import changed, weighted
from mmrl.core.rollouts import Rollouts
from mmrl.core.state import ObjectiveState

if TYPE_CHECKING:
    from torch import Tensor

PAIRS, ANSWERS, DECISIONS = "pairs", "preferred_answers", "preferred_decisions"
"""Keys of `Denominators.others`."""


@dataclass(frozen=True)
class PreferenceObjective:
    """One method on pairs: what is minimised over (prompt, preferred answer, rejected answer).

    loss = mean over pairs [pair loss] + coef * NLL of the preferred answers, both means over the optimiser step.

        PreferenceObjective("rpo", SigmoidPair(beta=0.01), SumScore(), ChosenLikelihood(0.005))
    """

    name: str
    """Short name, as in the catalogue."""
    loss: PairLoss = field(default_factory=SigmoidPair)
    """Loss of a pair."""
    score: PairScore = field(default_factory=SumScore)
    """Score by which two answers are compared."""
    likelihood: ChosenLikelihood | None = None
    """Likelihood of the preferred answers as an additional term."""
    claim: str = ""
    """Claim of its paper, in one line."""
    citation: str = ""
    """Paper that the method is from."""
    verified: str = ""
    """Reference implementation used in tests, such as "verl 0.9.1" or a commit of the authors' repository."""
    differs: str = ""
    """Differences from the paper and its code, in one line; empty if there are none."""
    # read by the training loop; pairs are given, so nothing is filtered, reordered or valued by a critic
    filter: ClassVar[GroupFilter] = KeepAll()
    order: ClassVar[TaskOrder] = Epochs()
    needs_values: ClassVar[bool] = False
    kl_in_reward: ClassVar[bool] = False
    kl_coef: ClassVar[float] = 0.0
    regularised: ClassVar[bool] = True
    surveys: ClassVar[bool] = False
    compares_rows: ClassVar[bool] = True
    """The two sides of a pair must be scored together."""

    @property
    def blocks(self) -> dict[str, Block]:
        """The blocks that are set, by field."""
        found = {key: getattr(self, key) for key in PREFERENCE_BLOCKS}
        return {key: block for key, block in found.items() if block is not None}

    @property
    def needs(self) -> frozenset[str]:
        """Required inputs: "logp_ref", "pair_scores", "kl_baseline", "logp_previous", ..."""
        return frozenset().union(*(block.needs for block in self.blocks.values()))

    @property
    def needs_reference(self) -> bool:
        """Whether the reference is used."""
        return "logp_ref" in self.needs

    @property
    def needs_scores(self) -> bool:
        """Whether the data must score both answers."""
        return "pair_scores" in self.needs

    def state(self, tasks: Sequence[Any] = ()) -> ObjectiveState:
        """No block remembers earlier steps."""
        return ObjectiveState({})

    def replace(self, **changes: Any) -> PreferenceObjective:
        """A copy with some blocks replaced."""
        return dataclasses.replace(self, **changes)

    def override(self, changes: Mapping[str, Mapping[str, Any]]) -> PreferenceObjective:
        """Change numbers of blocks, or replace blocks by `kind`.

        Args:
            changes: Field to new numbers, such as {"loss": {"beta": 0.3}, "likelihood": {"kind": "nll", "coef": 0.1}}.

        Returns:
            The changed objective, not yet validated.

        Raises:
            ValueError: Unknown field, kind or option, or a value of the wrong type; the message lists what exists.
        """
        parts: dict[str, Any] = {}
        for key, options in changes.items():
            if key not in PREFERENCE_BLOCKS:
                known = ", ".join(PREFERENCE_BLOCKS)
                raise ValueError(f"A preference objective has no part '{key}'; its parts: {known}.")
            parts[key] = changed(getattr(self, key), options, key)
        if "likelihood" in parts:
            # a likelihood with coefficient 0 is removed rather than averaged with weight 0
            parts["likelihood"] = weighted(parts["likelihood"], changes["likelihood"], "likelihood")
        return self.replace(**parts)

    def validate(self) -> None:
        """Reject numbers out of range and blocks that contradict each other.

        Raises:
            ValueError: The message names the options, what they may be and what to try.
        """
        problems = [problem for key, block in self.blocks.items() for problem in block.problems(key)]
        if isinstance(self.loss, NoPairLoss) and self.likelihood is None:
            problems.append("loss is 'none' and there is no likelihood, so nothing is minimised. Set likelihood.coef.")
        if problems:
            listed = "\n".join(f"- {problem}" for problem in problems)
            raise ValueError(f"The preference objective '{self.name}' cannot be used:\n{listed}")

    def describe(self) -> str:
        """Return the formula this objective computes, with its constants.

        Raises:
            ValueError: The objective is not valid, so there is no such formula.
        """
        self.validate()
        lines = [f"{self.name}: {self.citation}" if self.citation else self.name, f"  {self.score.formula()}"]
        pair = self.loss.formula()
        # as a word, since every formula with an exponential contains the letter
        if "h" in pair.replace("(", " ").replace(")", " ").split():
            ratio = "(logp_w - logp_ref_w) - (logp_l - logp_ref_l)" if self.needs_reference else "logp_w - logp_l"
            lines.append(f"  h = {ratio}, w preferred, l rejected")
        terms = [f"mean {pair}"] if pair else []
        terms += [self.likelihood.formula()] if self.likelihood is not None else []
        return "\n".join([*lines, "  minimise  " + "\n          + ".join(terms)])

    def parts(self) -> str:
        """The blocks in one line, for tables."""
        return ", ".join(block.summary() for block in self.blocks.values())

    def denominators(self, rollouts: Rollouts) -> Denominators:
        """Count what the loss of an optimiser step is divided by; see `Objective.denominators`."""
        chosen, rejected = self._sides(rollouts)
        mask = rollouts.loss_mask
        # the mask takes the place of log-probabilities: only which sides have a score matters here
        kept = self._kept(self.score(mask, mask)[1], chosen, rejected)
        others = {
            # sides that are compared count as one pair, otherwise each counts
            PAIRS: float(kept[0].sum() if self.loss.paired else kept[0].sum() + kept[1].sum()),
            ANSWERS: float((mask[chosen] > 0).any(1).sum()),
            DECISIONS: float(mask[chosen].sum()),
        }
        return dataclasses.replace(count(mask), others=others)

    def step_loss(self, outputs: PolicyOutputs, rollouts: Rollouts, denominators: Denominators) -> LossOutput:
        """Return the loss of a batch or micro-batch of whole pairs.

        Args:
            outputs: Current policy outputs of the answers.
            rollouts: Groups of two rows, see `pair_rows`; with `logp_ref` where the loss has a reference, and with
                `extras[SCORE]` where it reads the scores of the data.
            denominators: Counts over the whole optimiser step, so that the losses of its micro-batches add up.

        Returns:
            The scalar loss and its metrics.

        Raises:
            ValueError: Something the objective needs is missing or has the wrong shape.

        Gradient: through `outputs` only.
        """
        # checked here because KTO falls back to 0 without it, silently
        if "kl_baseline" in self.needs:
            required(rollouts.extras.get(BASELINE), f"rollouts.extras['{BASELINE}']", "answers to other questions")
        outputs = outputs.masked(rollouts.loss_mask)
        pairs = self.pairs(outputs.logp, rollouts)
        # divided by the pairs of the whole optimiser step, not of this micro-batch
        term = self.loss(pairs).sum() / max(denominators.others[PAIRS], 1.0)
        terms = {"loss/preference": term}
        if self.likelihood is not None:
            nll = self._nll(outputs.logp, rollouts, denominators)
            # without a pair loss its 0 would only be a flat line in the log
            terms = ({} if isinstance(self.loss, NoPairLoss) else terms) | {"loss/nll_chosen": nll}
        total = torch.stack(list(terms.values())).sum()
        summed = {name: Metric.summed(value.detach()) for name, value in {"loss/total": total, **terms}.items()}
        return LossOutput(total, summed | self.pair_metrics(pairs))

    def pairs(self, logp: Tensor, rollouts: Rollouts) -> Pairs:
        """Form the pairs whose sides both have a score.

        Args:
            logp: (B, T) nats.
            rollouts: Groups of two rows.

        Returns:
            M pairs, M = N, or up to N * T with a score a decision. Sides that are not compared may differ in number.

        Raises:
            ValueError: The reference or the scores of the data are missing.
        """
        # indices of rows, in the order of the groups
        chosen, rejected = self._sides(rollouts)
        mask = rollouts.loss_mask
        scores, valid = self.score(logp, mask)
        kept_w, kept_l = self._kept(valid, chosen, rejected)

        def sides(table: Tensor) -> tuple[Tensor, Tensor]:
            # first the rows of the side, then those of them that have a score
            return table[chosen][kept_w], table[rejected][kept_l]

        found = dict(zip(("logp_w", "logp_l"), sides(scores), strict=True))
        if self.needs_reference:
            reference = required(rollouts.logp_ref, "rollouts.logp_ref", "log-probabilities of the reference")
            found |= dict(zip(("ref_w", "ref_l"), sides(self.score(reference, mask)[0]), strict=True))
        if self.needs_scores:
            given = required(
                rollouts.extras.get(SCORE), f"rollouts.extras['{SCORE}']", "the data must score both answers"
            )
            # one score a row, repeated over its decisions if each decision is a pair
            found |= dict(zip(("score_w", "score_l"), sides(given[:, None].expand_as(scores)), strict=True))
        if "logp_previous" in self.needs:
            given = required(rollouts.extras.get(PREVIOUS), f"rollouts.extras['{PREVIOUS}']", "the previous policy")
            found |= dict(zip(("previous_w", "previous_l"), sides(self.score(given, mask)[0]), strict=True))
        if "own_answers" in self.needs:
            own = required(
                rollouts.extras.get(OWN), f"rollouts.extras['{OWN}']", "one answer of each pair must be the policy's"
            )
            found["own_w"] = sides(own[:, None].expand_as(scores))[0] > 0.5
            # the log-ratio is a constant factor: the product then has the gradient of the KL to the reference
            drift = self.score((logp - required(rollouts.logp_ref, "rollouts.logp_ref", "")).detach() * logp, mask)[0]
            found |= dict(zip(("drift_w", "drift_l"), sides(drift), strict=True))
        if BASELINE in rollouts.extras:
            # the same number in every row, so that a micro-batch can take it from any of them
            found["baseline"] = rollouts.extras[BASELINE][0]
        # sides of KTO data may be unrelated answers; equal numbers are only a hint that they are pairs
        return Pairs(**found, matched=self.loss.paired or rollouts.num_rows == 2 * rollouts.num_groups)

    def pair_numbers(self, pairs: Pairs) -> dict[str, Tensor]:
        """Numbers about each pair (M,), named as in TRL: implicit rewards (beta times log-ratios), log-probabilities.

        Without a reference an answer has no implicit reward, and `rewards/` is left out; so are comparisons of the
        sides where these answer different questions.
        """
        logp_w, logp_l, scale = pairs.logp_w.detach(), pairs.logp_l.detach(), self.loss.reward_scale
        found = {"logps/chosen": logp_w, "logps/rejected": logp_l}
        # as a pair or not at all: an accuracy over answers to different questions means nothing
        compared = pairs.matched and len(logp_w) == len(logp_l)
        if compared:
            found["logps/accuracies"] = (logp_w > logp_l).to(logp_w)
        if not self.needs_reference:
            return found
        chosen, rejected = scale * pairs.log_ratio_w.detach(), scale * pairs.log_ratio_l.detach()
        found |= {"rewards/chosen": chosen, "rewards/rejected": rejected}
        if compared:
            found |= {"rewards/accuracies": (chosen > rejected).to(chosen), "rewards/margins": chosen - rejected}
        return found

    def pair_metrics(self, pairs: Pairs) -> dict[str, Metric]:
        """Means of `pair_numbers` as metrics."""
        return {name: Metric(values.sum(), float(len(values))) for name, values in self.pair_numbers(pairs).items()}

    def _sides(self, rollouts: Rollouts) -> tuple[Tensor, Tensor]:
        return pair_rows(rollouts) if self.loss.paired else side_rows(rollouts)

    def _kept(self, valid: Tensor, chosen: Tensor, rejected: Tensor) -> tuple[Tensor, Tensor]:
        """Which of the preferred and of the rejected sides are learned from: those with a score, and pairs whole."""
        both = valid[chosen], valid[rejected]
        # a pair with one empty side teaches nothing about preferring the other
        return (both[0] & both[1],) * 2 if self.loss.paired else both

    def _nll(self, logp: Tensor, rollouts: Rollouts, denominators: Denominators) -> Tensor:
        assert self.likelihood is not None
        chosen, _ = self._sides(rollouts)
        logp, mask = logp[chosen], rollouts.loss_mask[chosen]
        # the mean of means weighs every answer the same, the mean over decisions weighs long answers more
        if self.likelihood.average == "answers":
            mean = masked_mean(logp, mask).sum() / max(denominators.others[ANSWERS], 1.0)
        else:
            mean = masked_sum(logp, mask).sum() / max(denominators.others[DECISIONS], 1.0)
        return -self.likelihood.coef * mean
