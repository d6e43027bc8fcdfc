"""A policy-optimisation method as data: typed blocks, composed into advantages and a loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from mmrl.core.block import Block, unknown_name
from mmrl.core.blocks import BLOCKS, PREFERENCE_BLOCKS, all_kinds, kind_names
from mmrl.core.blocks.advantage import Advantage, AdvantageScaling, GroupMeanStd
from mmrl.core.blocks.clip import LOG_RATIO_LIMIT, Clip, PpoClip, Ratio, StepClip, TokenRatio
from mmrl.core.blocks.credit import CriticLoss, ValueLoss
from mmrl.core.blocks.divergence import Divergence, Entropy, entropy_sampled, k3, row_weights
from mmrl.core.blocks.filter import Epochs, GroupFilter, KeepAll, TaskOrder
from mmrl.core.blocks.mismatch import Correction, Gate, OffPolicyGate
from mmrl.core.blocks.turns import WEIGHT, Weight
from mmrl.core.loss import (
    Aggregation,
    Denominators,
    FixedLength,
    LossOutput,
    Metric,
    PolicyOutputs,
    TokenMean,
    count,
    masked_sum,
    max_metric,
    mean_metric,
    required,
)
from mmrl.core.returns import decision_rewards, turn_starts
from mmrl.core.rollouts import SAMPLED, Rollouts
from mmrl.core.state import ObjectiveState
from mmrl.fields import bounds_of, hints_of

if TYPE_CHECKING:
    from torch import Tensor


def changed_blocks(current: Mapping[str, Any], changes: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The blocks that `Objective.override` replaces, by field."""
    parts: dict[str, Any] = {}
    for key, options in changes.items():
        if key not in BLOCKS:
            raise ValueError(f"An objective has no part '{key}'; its parts: {', '.join(BLOCKS)}.")
        base = current[key]
        switched_off = base is None and "kind" not in options and options.get("coef") == 0
        parts[key] = None if switched_off else changed(base, _with_aggregation(options, key), key)
    for key in ("kl", "entropy"):
        if key in parts:
            parts[key] = weighted(parts[key], changes[key], key)
    return parts


def blocks_line(blocks: Mapping[str, Block]) -> str:
    """The blocks in one line, for tables; parts without effect are omitted."""
    shown = [
        block.summary().replace("scaling ", "scaled ") if key == "scaling" else f"{SHOWN_AS[key]}{block.summary()}"
        for key, block in blocks.items()
        if block not in (AdvantageScaling(), KeepAll(), Epochs())
    ]
    return ", ".join(shown)


def _with_aggregation(options: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Options of a block whose `aggregation`, given by name or as keys and values, is made a block."""
    made = dict(options)
    given = made.get("aggregation")
    if key == "kl" and given is not None and not isinstance(given, Aggregation):
        if not isinstance(given, str | Mapping):
            names = ", ".join(sorted(BLOCKS["aggregation"]))
            raise ValueError(f"kl.aggregation is {given!r}; expected a name, or kind and options; names: {names}")
        named = {"kind": given} if isinstance(given, str) else given
        made["aggregation"] = changed(None, named, "aggregation", "kl.aggregation")
    return made


def changed(base: Block | None, changes: Mapping[str, Any], part: str, where: str = "") -> Block | None:
    """Change numbers of a block, or replace it by another kind; `where` is its key, by default the part's."""
    if not changes:
        return base
    options, where = dict(changes), where or part
    kind = options.pop("kind", base.kind if base is not None else None)
    table = (BLOCKS | PREFERENCE_BLOCKS)[part]
    if kind == "none" and "none" not in table:
        return None
    if not isinstance(kind, str) or kind not in table:
        table = all_kinds(part)
    if kind is None:
        raise ValueError(
            f"{where} is not part of this objective, so {where}.{next(iter(options))} would do nothing; to "
            f"disable it, set objective.{where}.kind=none; to add one, set its kind: {', '.join(kind_names(part))}"
        )
    if not isinstance(kind, str):
        raise ValueError(f"{where}.kind is {kind!r}; expected a name: {', '.join(kind_names(part))}")
    if kind not in table:
        raise ValueError(f"{where}.kind: {unknown_name(kind, kind_names(part), where)}")
    block_class = table[kind]
    known = block_class.options()
    for name in options:
        if name not in known:
            exists = f"it has: {', '.join(known)}" if known else "it has none"
            raise ValueError(f"{where}: '{kind}' has no option '{name}'; {exists}")
    kept = {} if base is None else {name: getattr(base, name) for name in known if name in base.options()}
    given = {name: _typed(block_class, name, value, f"{where}.{name}") for name, value in options.items()}
    return block_class(**(kept | given))


def weighted(block: Any, options: Mapping[str, Any], where: str) -> Any:
    """The block, or None if its `coef` was set to 0; raises ValueError if `coef` was not set and is 0 by default."""
    if block is None or block.coef != 0:
        return block
    if "coef" not in options:
        raise ValueError(
            f"{where} is '{block.kind}', whose coef is 0 by default, so it would have no effect; set its coef"
        )
    return None


def _typed(block_class: type[Block], name: str, value: Any, key: str) -> Any:
    """`value` as the type of the field: whole numbers become floats where a float is expected."""
    allowed = _types(hints_of(block_class)[name])
    if value is None and type(None) in allowed:
        return None
    if float in allowed and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    for kind in allowed:
        if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
            return value
    expected = " or ".join("none" if kind is type(None) else kind.__name__ for kind in allowed)
    item = next(item for item in dataclasses.fields(block_class) if item.name == name)
    raise ValueError(f"{key} is {value!r}; expected {expected}{_allowed(item)}")


def _allowed(item: dataclasses.Field[Any]) -> str:
    bounds = bounds_of(item)
    return f", {bounds}" if bounds is not None else ""


def _types(hint: Any) -> tuple[type, ...]:
    return getattr(hint, "__args__", None) or (hint,)


SHOWN_AS = {
    "advantage": "",
    "scaling": "",
    "ratio": "ratio ",
    "clip": "",
    "kl": "KL ",
    "entropy": "entropy ",
    "aggregation": "",
    "filter": "groups: ",
    "value": "value ",
    "weight": "weight ",
    "correction": "mismatch ",
    "gate": "gate ",
    "order": "order ",
}
"""Prefix of each block in `Objective.parts`."""


Term: TypeAlias = "tuple[Tensor | None, dict[str, Metric]]"
"""A loss term, or None, and its metrics."""


@dataclass(frozen=True)
class Objective:
    """One method: how advantages are estimated and which loss the policy minimises.

    loss = agg[u w clip(ratio, A)] + kl.coef * agg_kl[v * KL] - entropy.coef * agg[H] + value.coef * agg[value loss],
    where agg divides by counts over the whole optimiser step.

        Objective("dapo", GroupMeanStd(), PpoClip(low=0.2, high=0.28), TokenMean(), filter=ResampleGroups())
    """

    name: str
    """Short name, as in the catalogue."""
    advantage: Advantage = field(default_factory=GroupMeanStd)
    """Estimator that turns rewards into advantages."""
    clip: Clip = field(default_factory=PpoClip)
    """Policy loss of a decision."""
    aggregation: Aggregation = field(default_factory=TokenMean)
    """Aggregation of decisions into the loss of an optimiser step."""
    ratio: Ratio = field(default_factory=TokenRatio)
    """Importance ratio, per decision or per row."""
    scaling: AdvantageScaling = field(default_factory=AdvantageScaling)
    """Post-processing of advantages."""
    kl: Divergence | None = None
    """Divergence from the reference or the old policy."""
    entropy: Entropy | None = None
    """Entropy bonus."""
    value: CriticLoss | None = None
    """Critic loss, for estimators with a critic."""
    filter: GroupFilter = field(default_factory=KeepAll)
    """Which groups to train on."""
    weight: Weight | None = None
    """Weight of each decision, computed once per step."""
    correction: Correction | None = None
    """Weight of each decision that corrects for the difference between sampler and trainer."""
    gate: Gate | OffPolicyGate | None = None
    """Rule that excludes decisions or rows on which sampler and trainer differ too much."""
    order: TaskOrder = field(default_factory=Epochs)
    """Order in which tasks are drawn."""
    claim: str = ""
    """Claim of the paper, in one line."""
    citation: str = ""
    """Paper that the method is from."""
    verified: str = ""
    """Reference implementation used in tests, such as "verl 0.9.1" or a commit of the authors' repository."""
    differs: str = ""
    """Differences from the paper and its code, in one line; empty if there are none."""

    @property
    def blocks(self) -> dict[str, Block]:
        """The blocks that are set, by field."""
        found = {key: getattr(self, key) for key in BLOCKS}
        return {key: block for key, block in found.items() if block is not None}

    @property
    def needs(self) -> frozenset[str]:
        """Union of the blocks' `needs`; blocks with coefficient 0 need nothing."""
        # a coefficient of 0 must not cost a reference model or a pass for entropies
        idle = {"kl": not self.regularises, "entropy": self.entropy is None or self.entropy.coef == 0}
        active = [block.inputs for key, block in self.blocks.items() if not idle.get(key, False)]
        active += [mean.needs for mean in self._averages]
        # aggregations have needs too, that of the KL term included
        return frozenset().union(*active) | self.scaling.needed_turns()

    @property
    def needs_values(self) -> bool:
        """Whether the policy must have a value head."""
        return "values" in self.advantage.needs

    @property
    def regularises(self) -> bool:
        """Whether a divergence from the reference or the old policy is used."""
        return self.kl is not None and self.kl.coef > 0

    @property
    def needs_reference(self) -> bool:
        """Whether the reference is used."""
        divergence = self.regularises and self.kl is not None and self.kl.to == "reference"
        return divergence or "logp_ref" in self.clip.needs

    @property
    def kl_in_reward(self) -> bool:
        """Whether the divergence is subtracted from the reward."""
        return self.kl is not None and self.kl.in_reward

    @property
    def kl_coef(self) -> float:
        """Weight of the divergence; 0 without one."""
        return 0.0 if self.kl is None else self.kl.coef

    @property
    def compares(self) -> str:
        """Which data of the untrained rows of a group the advantages use; see `Advantage.compares`."""
        return "scores" if self.kl_in_reward and "samples" in self.advantage.needs else self.advantage.compares

    @property
    def regularised(self) -> bool:
        """Whether rows have a gradient even if all their advantages are 0."""
        # a comparison of rows pulls on log-ratios even if all advantages are equal
        if self.compares_rows or self.clip.without_advantage:
            return True
        # a divergence that is in the reward acts through the advantage, so it has no gradient by itself
        divergence = self.regularises and not self.kl_in_reward
        entropy = self.entropy is not None and self.entropy.coef != 0
        return divergence or entropy or (self.needs_values and isinstance(self.value, ValueLoss))

    @property
    def compares_rows(self) -> bool:
        """Whether the loss of a row depends on the other rows of its group, so that groups must be scored together."""
        return self.clip.compares_rows

    def replace(self, **changes: Any) -> Objective:
        """Return a copy with some blocks replaced."""
        return dataclasses.replace(self, **changes)

    def with_kl_coef(self, coef: float) -> Objective:
        """Return a copy with another KL coefficient; unchanged if there is no divergence."""
        return self if self.kl is None else self.replace(kl=self.kl.replace(coef=coef))

    def at(self, progress: float) -> Objective:
        """Return the objective at a fraction of the run, with its KL coefficient annealed if it is scheduled."""
        # the same object where nothing is annealed: this runs for every micro-batch
        return self if self.kl is None or not self.kl.anneal else self.replace(kl=self.kl.at(progress))

    def override(self, changes: Mapping[str, Mapping[str, Any]]) -> Objective:
        """Change numbers of blocks, or replace blocks by `kind`.

        Args:
            changes: Field to new numbers, such as {"clip": {"high": 0.3}, "kl": {"kind": "none"}}. A divergence or an
                entropy bonus whose coefficient becomes 0 is removed.

        Returns:
            The changed objective, not yet validated.

        Raises:
            ValueError: Unknown field, kind or option, or a value of the wrong type; the message lists the valid ones.
        """
        return self.replace(**changed_blocks({key: getattr(self, key) for key in BLOCKS}, changes))

    def validate(self) -> None:
        """Reject numbers out of range and blocks that contradict each other.

        Raises:
            ValueError: The message states the options, their valid values and what to try.
        """
        problems = [problem for key, block in self.blocks.items() for problem in block.problems(key)]
        # conflicts are only checked between blocks that are valid by themselves
        problems = problems or list(self._conflicts())
        if problems:
            listed = "\n".join(f"- {problem}" for problem in problems)
            raise ValueError(f"The objective '{self.name}' cannot be used:\n{listed}")

    def describe(self) -> str:
        """Return the formula of this objective, with its constants.

        Raises:
            ValueError: The objective is not valid.
        """
        self.validate()
        lines = [f"{self.name}: {self.citation}" if self.citation else self.name]
        advantage = self.advantage.formula() + self.scaling.formula()
        # KL with importance weights shows r_it in the formula, even if the clip does not use it
        corrected = self.regularises and self.kl is not None and self.kl.importance
        ratio = self.ratio.formula() if self.clip.uses_ratio or corrected else ""
        weights = [block.formula() for block in (self.weight, self.gate, self.correction) if block is not None]
        shown = (self.order.formula(), self.filter.formula(), self._reward_formula(), advantage, ratio, *weights)
        lines += ["  " + line for line in shown if line]
        weight = ("" if self.weight is None else "u_it ") + ("" if self.correction is None else "w_it ")
        terms = [f"mean {weight}{self.clip.formula()}", *self._term_formulas()]
        lines += ["  minimise  " + "\n          + ".join(terms)]
        lines += [f"  averages: {self.aggregation.formula()}"]
        if self.regularises and self.kl is not None and self.kl.aggregation and not self.kl_in_reward:
            lines += [f"  KL averages: {self.kl.aggregation.formula()}"]
        return "\n".join(lines)

    def parts(self) -> str:
        """The blocks in one line, for tables; idle ones are omitted."""
        return blocks_line(self.blocks)

    def state(self, tasks: Sequence[Any] = ()) -> ObjectiveState:
        """Return a new state for the blocks that remember earlier steps; `tasks` are the training tasks of a run."""
        # the order is a block whose state depends on the training tasks, which no other state does
        found = {key: block.state() for key, block in self.blocks.items() if key != "order"}
        found["order"] = self.order.state(tasks)
        return ObjectiveState({key: state for key, state in found.items() if state is not None})

    def compute_advantages(self, rollouts: Rollouts, state: ObjectiveState | None = None) -> Rollouts:
        """Turn rewards into advantages (and returns, with a critic).

        Call it on all rows of a rollout step, before they are split into minibatches: groups must be complete, and
        batch statistics are computed over all rows.

        Args:
            rollouts: Scored rows; with `logp_ref` if the divergence goes into the reward, with `values` if a
                critic is used.
            state: The object returned by `state()` at the start of the run, for blocks that remember earlier steps; it
                is updated in place. None means a first step.

        Returns:
            A copy with `advantage` (B, T), 0 on untrained decisions; with `returns` (B, T) if there is a critic; and
            with `extras["weight"]` (B, T) if there is a `weight` block.

        Gradient: none; all of them are constants.
        """
        with torch.no_grad():
            shaped = self._estimated_from(rollouts)
            # a first step, such as a single call in a notebook, gets fresh states
            memory = (self.state() if state is None else state).blocks
            own = (memory["advantage"],) if "advantage" in memory else ()
            advantage = self.advantage(shaped, *own)
            if SAMPLED in rollouts.extras:
                advantage = torch.where(rollouts.loss_mask > 0, advantage, 0.0)
                kept = {name: value for name, value in rollouts.extras.items() if name != SAMPLED}
                rollouts = rollouts.replace(extras=kept)
            returns = rollouts.returns
            if self.needs_values and rollouts.values is not None:
                # before scaling: the critic regresses on returns in units of reward, and whitening is for the policy
                # alone
                returns = torch.where(rollouts.loss_mask > 0, advantage + rollouts.values, 0.0)
            # after the returns: what is scaled is only the policy's advantage
            advantage = self.scaling(advantage, rollouts)
            # in the precision of logp_old, which a loss multiplies it with
            rollouts = self.weighed(rollouts.replace(advantage=advantage.to(rollouts.logp_old.dtype), returns=returns))
            return self.observed(rollouts, ObjectiveState(memory))

    def observed(self, rollouts: Rollouts, state: ObjectiveState) -> Rollouts:
        """Update the state of all blocks but the estimator, from rows with advantages."""
        for key, memory in state.blocks.items():
            # the estimator has moved its own state when it was called
            rollouts = rollouts if key == "advantage" else self.blocks[key].observe(rollouts, memory)
        return rollouts

    def weighed(self, rollouts: Rollouts) -> Rollouts:
        """Add the constants of the loss that depend on advantages, such as those of a `weight` block."""
        # detached: a weight is a constant of the update, as the advantages are
        found = {} if self.weight is None else {WEIGHT: self.weight(rollouts).detach().to(rollouts.logp_old.dtype)}
        found |= self.clip.constants(rollouts) if isinstance(self.clip, StepClip) else {}
        return rollouts.replace(extras=rollouts.extras | found) if found else rollouts

    @property
    def surveys(self) -> bool:
        """Whether the loss depends on all decisions of an optimiser step together; see `survey`."""
        return isinstance(self.clip, StepClip) and self.clip.surveys

    def survey(self, outputs: PolicyOutputs, rollouts: Rollouts) -> Tensor:
        """Summarise a part of an optimiser step, without gradient; pass the summaries of all parts to `settled`."""
        assert isinstance(self.clip, StepClip)
        # masked as in `loss`, so that the summary sees the same numbers
        log_ratio, advantage = self._log_ratio(outputs.masked(rollouts.loss_mask), rollouts)
        return self.clip.survey(log_ratio.detach(), advantage, rollouts.loss_mask)

    def settled(self, parts: Sequence[Tensor], rollouts: Rollouts) -> Rollouts:
        """Add what the loss needs to know about the whole optimiser step; without it, a batch knows only itself."""
        assert isinstance(self.clip, StepClip)
        return self.clip.settle(parts, rollouts)

    def denominators(self, rollouts: Rollouts) -> Denominators:
        """Count what the loss of an optimiser step is divided by.

        Args:
            rollouts: All rows of one optimiser step on this rank.

        Returns:
            The counts; add those of other ranks with `Denominators.total` before calling `loss`.
        """
        # a turn-level critic is averaged over turns, which are then counted even if no aggregation needs them
        counted = self.advantage.level == "turn" or any("turns" in mean.needs for mean in self._averages)
        turns = turn_starts(rollouts).sum() if counted else 0.0
        return count(rollouts.loss_mask, length=self.fixed_length or 0.0, turns=turns)

    @property
    def fixed_length(self) -> int | None:
        """Constant length of a `FixedLength` aggregation; None if there is none."""
        return next((mode.length for mode in self._averages if isinstance(mode, FixedLength)), None)

    def with_fixed_length(self, length: int, kept: Collection[str] = ()) -> Objective:
        """A copy whose `FixedLength` aggregations have this length, but for those of the parts "aggregation", "kl"."""
        changes: dict[str, Any] = {}
        if isinstance(self.aggregation, FixedLength) and "aggregation" not in kept:
            changes["aggregation"] = FixedLength(length)
        if self.kl is not None and isinstance(self.kl.aggregation, FixedLength) and "kl" not in kept:
            changes["kl"] = self.kl.replace(aggregation=FixedLength(length))
        return self.replace(**changes)

    def loss(self, outputs: PolicyOutputs, rollouts: Rollouts, denominators: Denominators) -> LossOutput:
        """Return the loss of a batch or micro-batch.

        Args:
            outputs: Current policy outputs of these rollouts.
            rollouts: Rows with advantages; `extras["kl_weight"]` (B,) multiplies the divergence of each row.
            denominators: Counts over the whole optimiser step, so that the losses of its micro-batches add up.

        Returns:
            The scalar loss and its metrics.

        Raises:
            ValueError: Something the objective needs is missing or has the wrong shape.

        Gradient: through `outputs` only.
        """
        mask = rollouts.loss_mask
        # all terms below may then compute on padding without producing NaN
        outputs = outputs.masked(mask)
        policy, metrics = self._policy_term(outputs, rollouts, denominators)
        terms = {"loss/policy": policy}
        for name, (term, more) in (
            ("loss/kl", self._kl_term(outputs, rollouts, denominators)),
            ("loss/entropy", self._entropy_term(outputs, rollouts, denominators)),
            ("loss/value", self._value_term(outputs, rollouts, denominators)),
        ):
            metrics |= more
            if term is not None:
                terms[name] = term
        total = torch.stack(list(terms.values())).sum()
        # shares of the step's loss add up, so these metrics are sums and not means
        summed = {name: Metric.summed(term.detach()) for name, term in {"loss/total": total, **terms}.items()}
        return LossOutput(total, summed | metrics)

    def critic_loss(self, outputs: PolicyOutputs, rollouts: Rollouts, denominators: Denominators) -> LossOutput:
        """The critic part of `loss`, for warming up the critic before the policy is trained.

        Raises:
            ValueError: The objective has no critic.
        """
        # the same masking as in `loss`: padding of the values may hold anything
        term, _ = self._value_term(outputs.masked(rollouts.loss_mask), rollouts, denominators)
        value = required(
            term, "the value loss", f"advantage '{self.advantage.kind}' has no critic; use gae or gae_turn"
        )
        return LossOutput(value, {name: Metric.summed(value.detach()) for name in ("loss/total", "loss/value")})

    @property
    def _averages(self) -> list[Aggregation]:
        """All aggregations."""
        # the KL term may average differently from the policy term
        own = self.kl.aggregation if self.kl is not None else None
        return [self.aggregation, *([own] if own is not None else [])]

    def _policy_term(
        self, outputs: PolicyOutputs, rollouts: Rollouts, denominators: Denominators
    ) -> tuple[Tensor, dict[str, Metric]]:
        mask, logp_old = rollouts.loss_mask, rollouts.logp_old.detach()
        log_ratio, trained = self._log_ratio(outputs, rollouts)
        loss, indicators = self.clip.of_rollouts(log_ratio, outputs, trained, rollouts)
        # a ratio without a limit (losses on log-ratios) could overflow here, in a metric
        rho = log_ratio.detach().clamp(max=LOG_RATIO_LIMIT).exp()
        metrics = {
            "policy/ratio_mean": mean_metric(rho, mask),
            "policy/ratio_max": max_metric(rho, mask),
            # of the policy that the update started from, not the reference: a measure of the size of the update
            "policy/kl_old": mean_metric(k3(logp_old, outputs.logp.detach()), mask),
        }
        metrics |= {name: mean_metric(value, mask) for name, value in indicators.items()}
        weight, more = self._weights(outputs, rollouts)
        if weight is not None:
            # where, because 0 * inf is NaN. The mask stays as it is: rejected decisions still count in the denominator,
            # so that rejecting some does not raise the weight of the others.
            loss = torch.where(weight > 0, weight * loss, 0.0)
        return _average(self.aggregation, loss, mask, denominators, rollouts), metrics | more

    def _log_ratio(self, outputs: PolicyOutputs, rollouts: Rollouts) -> tuple[Tensor, Tensor]:
        """Log-ratios (B, T) and advantages (B, T), 0 on untrained decisions."""
        advantage = required(rollouts.advantage, "rollouts.advantage", "compute_advantages(rollouts) sets it")
        log_ratio = self.ratio(outputs.logp, rollouts.logp_old.detach(), rollouts.loss_mask)
        # 0 on untrained decisions, where a NaN of an unscored row could otherwise get into the loss
        return log_ratio, torch.where(rollouts.loss_mask > 0, advantage, 0.0)

    def _weights(self, outputs: PolicyOutputs, rollouts: Rollouts) -> tuple[Tensor | None, dict[str, Metric]]:
        """Weight (B, T) of each decision, or None if all are 1, and metrics."""
        weight, metrics = self._mismatch(outputs, rollouts)
        if self.weight is None:
            return weight, metrics
        own, mask = rollouts.extras.get(WEIGHT), rollouts.loss_mask
        own = required(own, f"rollouts.extras['{WEIGHT}']", "compute_advantages(rollouts) sets it")
        metrics["policy/weight_mean"] = mean_metric(own, mask)
        metrics["policy/weight_zero"] = mean_metric((own == 0).to(own.dtype), mask)
        # both are constants or follow from detached numbers, so the product has no gradient
        return own if weight is None else own * weight, metrics

    def _mismatch(self, outputs: PolicyOutputs, rollouts: Rollouts) -> tuple[Tensor | None, dict[str, Metric]]:
        """Weight (B, T) for the difference between trainer and sampler, or None if all are 1, and metrics."""
        blocks = [block for block in (self.correction, self.gate) if block is not None]
        if self.correction is not None:
            required(rollouts.logp_rollout, "rollouts.logp_rollout", "the sampler's own log-probabilities")
        if rollouts.logp_rollout is not None:
            # the sampler's own log-probabilities were kept: the difference is that between two engines, constant in a
            # step
            trainer, sampler = rollouts.logp_old.detach(), rollouts.logp_rollout
        elif blocks:
            # logp_old is the sampler's: the difference grows with the updates of the step
            trainer, sampler = outputs.logp.detach(), rollouts.logp_old.detach()
        else:
            return None, {}
        mask = rollouts.loss_mask
        # where: the sampler's log-probabilities are not defined on padding
        difference = torch.where(mask > 0, trainer - sampler, 0.0)
        metrics = {
            # k3 of (sampler, trainer): the samples are the sampler's, so this estimates KL(sampler || trainer)
            "policy/mismatch_kl": mean_metric(k3(sampler, trainer), mask),
            "policy/mismatch_max": max_metric(difference.abs(), mask),
        }
        if not blocks:
            return None, metrics
        # a decision that any block rejects has the weight 0 in the product
        weight = torch.stack([block.of_rollouts(difference, outputs, rollouts) for block in blocks]).prod(0)
        metrics["policy/mismatch_weight"] = mean_metric(weight, mask)
        metrics["policy/mismatch_rejected"] = mean_metric((weight == 0).to(weight.dtype), mask)
        return weight, metrics

    def _kl_term(self, outputs: PolicyOutputs, rollouts: Rollouts, denominators: Denominators) -> Term:
        if self.kl is None or not self.regularises:
            return None, {}
        mask = rollouts.loss_mask
        divergence = self.kl(outputs, rollouts)
        metrics = {"policy/kl_ref": mean_metric(divergence, mask)} if self.needs_reference else {}
        # it is in the advantages already; here it is only measured
        if self.kl.in_reward:
            return None, metrics
        # `kl_weight` of a row, 1 unless a recipe sets it
        weighted = divergence * row_weights(rollouts)
        if self.weight is not None and self.weight.weighs_kl:
            weighted = weighted * rollouts.extras[WEIGHT]
        if self.kl.importance:
            # KL under the current policy, from samples of the old one: DeepSeek-V3.2, arXiv 2512.02556
            weighted = weighted * self.ratio(outputs.logp, rollouts.logp_old.detach(), mask).exp()
        mean = self.kl.aggregation or self.aggregation
        return self.kl.coef * _average(mean, weighted, mask, denominators, rollouts), metrics

    def _entropy_term(self, outputs: PolicyOutputs, rollouts: Rollouts, denominators: Denominators) -> Term:
        mask = rollouts.loss_mask
        # logged in every run; without a pass over the whole distribution, from the sampled decisions
        shown = entropy_sampled(outputs.logp) if outputs.entropy is None else outputs.entropy
        metrics = {"policy/entropy": mean_metric(shown, mask)}
        if self.entropy is None or self.entropy.coef == 0:
            return None, metrics
        bonus = _average(self.aggregation, self.entropy.of_rollouts(outputs, rollouts), mask, denominators, rollouts)
        # negative, because the loss is minimised and the bonus rewards entropy
        return -self.entropy.coef * bonus, metrics

    def _value_term(self, outputs: PolicyOutputs, rollouts: Rollouts, denominators: Denominators) -> Term:
        if not self.needs_values or not isinstance(self.value, ValueLoss):
            return None, {}
        mask, counts, mode = rollouts.loss_mask, denominators, self.aggregation
        if self.advantage.level == "turn":
            # A turn-level critic is only asked at the first decision of a turn, so it is only trained there.
            mask, mode = turn_starts(rollouts).to(mask.dtype), TokenMean()
            # and a turn counts once, however many decisions it has
            counts = dataclasses.replace(denominators, tokens=denominators.turns)
        values = required(outputs.values, "scores.values", "the policy needs a value head")
        values_old = required(rollouts.values, "rollouts.values", "the critic's predictions at sampling time")
        returns = required(rollouts.returns, "rollouts.returns", "compute_advantages(rollouts) sets it")
        return self.value.coef * _average(mode, self.value(values, values_old, returns), mask, counts, rollouts), {}

    def _estimated_from(self, rollouts: Rollouts) -> Rollouts:
        """Rows as the estimator reads them."""
        if (whole := rollouts.extras.get(SAMPLED)) is None:
            return self.shaped(rollouts)
        # rows that have left the update still count in the statistics of their groups
        shaped = self.shaped(rollouts.replace(mask=whole))
        return shaped.replace(mask=rollouts.mask) if self.advantage.compares == "rewards" else shaped

    def shaped(self, rollouts: Rollouts) -> Rollouts:
        """Subtract the divergence from the rewards if it is in the reward, but not from those that are logged."""
        if self.kl is None or not (self.kl_in_reward and self.needs_reference):
            return rollouts
        # from the log-probabilities at sampling time: a reward is a constant of the update
        mask, penalty = rollouts.loss_mask, self.kl.penalty(rollouts)
        shaped = decision_rewards(rollouts) - torch.where(mask > 0, penalty, 0.0)
        return rollouts.replace(
            # group estimators read the sum, critics the rewards of decisions; both get the same penalty
            reward=rollouts.reward - masked_sum(penalty, mask),
            extras={**rollouts.extras, "decision_reward": shaped},
        )

    def _conflicts(self) -> Iterator[str]:
        # each block knows what it can be combined with; nothing here asks for its name
        yield from self.ratio.conflicts(self.advantage)
        yield from self.clip.conflicts(self.ratio)
        if not self.ratio.limited and (self.clip.exponentiates or (self.kl is not None and self.kl.importance)):
            what = f"clip '{self.clip.kind}'" if self.clip.exponentiates else "kl.importance"
            yield (
                f"{what} needs the ratio itself, but ratio.limit is null. Set it; a usual value is {LOG_RATIO_LIMIT:g}."
            )
        for part in ("weight", "correction", "gate"):
            if self.compares_rows and part in self.blocks:
                yield f"{part} weights decisions, but clip '{self.clip.kind}' compares whole rows. Remove {part}."
        if self.value is not None and not self.needs_values:
            yield (
                f"a value loss is set but advantage '{self.advantage.kind}' has no critic. Use 'gae', or remove value."
            )
        if self.weight is not None and self.weight.thins and self.compares == "scores":
            what = "kl.in_reward" if self.kl_in_reward else f"advantage '{self.advantage.kind}'"
            yield (
                f"weight '{self.weight.kind}' leaves rows out before the policy scores them, but {what} compares the "
                "scores of all rows of a group. Use one of the two."
            )
        yield from self.order.conflicts(self.advantage)
        if self.value is None and self.needs_values:
            yield f"advantage '{self.advantage.kind}' needs a critic, but there is no value loss. Set value."

    def _reward_formula(self) -> str:
        if self.kl is None or not (self.kl.in_reward and self.needs_reference):
            return ""
        divergence = self.kl.formula().replace("logp_it", "logp_old_it")
        # a group estimator reads the sum of a row, so the formula shows the penalty summed
        if "samples" in self.advantage.needs:
            return f"R_i <- R_i - {self.kl.coef:g} * sum_t {divergence}"
        return f"R_it <- R_it - {self.kl.coef:g} * {divergence}"

    def _term_formulas(self) -> Iterator[str]:
        if self.kl is not None and self.regularises and not self.kl.in_reward:
            weighs = self.weight is not None and self.weight.weighs_kl
            yield self.kl.terms("u_it " if weighs else "")
        if self.entropy is not None and self.entropy.coef:
            yield f"({-self.entropy.coef:g}) * mean {self.entropy.formula()}"
        if isinstance(self.value, ValueLoss) and self.needs_values:
            where = " at the first decision of each turn" if self.advantage.level == "turn" else ""
            yield f"{self.value.coef:g} * mean {self.value.formula()}{where}"


def _average(mode: Aggregation, x: Tensor, mask: Tensor, counts: Denominators, rollouts: Rollouts) -> Tensor:
    """Aggregate (B, T); only aggregations that need turns get them, so a user's own block can ignore them."""
    return mode(x, mask, counts, *((rollouts.turn,) if "turns" in mode.needs else ()))
