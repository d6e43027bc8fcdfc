"""Trajectories of one rollout step; each prompt is stored once per group.

Shape letters used throughout the suite:

* B rows: one sampled response, trajectory or denoising run each
* N groups: tasks (prompts, initial states, scenes), each with its samples
* G samples of one group; groups may differ in size
* T decisions of a row, right-padded: a token, a denoising step, a frame pick or an action chunk
* V vocabulary entries, H hidden units, M flattened decisions, K turns of a row
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from mmrl.core.payload import (
    Payload,
    join_fields,
    move_fields,
    nested,
    per_decision,
    per_row,
    select_fields,
    to_device,
    to_host,
    trim_fields,
)

if TYPE_CHECKING:
    from torch import Tensor


def check_rows(group: Tensor, reward: Tensor) -> int:
    """Check the two per-row fields of every `Rollouts` and return B."""
    if group.dim() != 1 or group.dtype != torch.int64:
        raise ValueError(f"group must be (B,) int64; got {group.dtype} of shape {tuple(group.shape)}.")
    if tuple(reward.shape) != tuple(group.shape) or reward.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"reward must be ({len(group)},) float32 or float64, one number per row of group; got {reward.dtype} "
            f"of shape {tuple(reward.shape)}."
        )
    return len(group)


def check_groups(group: Tensor) -> None:
    """Check that the groups are numbered 0..N-1 without a gap."""
    if len(group) == 0:
        return
    # only the numbers matter, not their order: rows of a group need not follow one another
    present = torch.unique(group)
    if int(present[0]) != 0 or int(present[-1]) != len(present) - 1:
        raise ValueError(
            f"group must use every number from 0 to N-1; got {present.tolist()}. "
            "torch.unique(group, return_inverse=True)[1] renumbers them."
        )


def check_mask(mask: Tensor, rows: int) -> tuple[int, int]:
    """Check the shape and kind of the decision mask and return (B, T)."""
    if mask.dim() != 2 or mask.shape[0] != rows:
        raise ValueError(f"mask must be (B, T) with B = {rows} rows; got shape {tuple(mask.shape)}.")
    if mask.shape[1] < 1:
        raise ValueError("mask must have at least one decision; got T = 0.")
    if mask.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"mask must be float32 (0 or 1); got {mask.dtype}. mask.float() converts it.")
    return (rows, mask.shape[1])


def check_zeros_and_ones(mask: Tensor) -> None:
    """Check the values of the decision mask."""
    # a fractional mask would also be in the denominators, so weights go elsewhere
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError("mask must contain only 0 and 1; put decision weights into the advantage.")


def check_decisions(name: str, value: Tensor, shape: tuple[int, int], *, integer: bool = False) -> None:
    """Check one per-decision tensor against the (B, T) of the mask."""
    if tuple(value.shape) != tuple(shape):
        raise ValueError(
            f"{name} must have the shape of the mask, {tuple(shape)}: one number per decision; got "
            f"{tuple(value.shape)}."
        )
    if integer and value.dtype != torch.int64:
        raise ValueError(f"{name} must be int64; got {value.dtype}.")
    if not integer and value.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"{name} must be float32 or float64, because ratios of log-probabilities are lost in "
            f"{value.dtype}. Convert the logits with .float() before the log-softmax."
        )


def turns_before(trained: Tensor, turn: Tensor) -> Tensor:
    """(B, T) int64, turn of the last trained decision before each decision; -1 if there is none."""
    # turns never decrease along a row, so the running maximum is the last trained one
    latest = torch.where(trained, turn, -1).cummax(1).values
    # shifted by one: strictly before the decision
    return torch.nn.functional.pad(latest[:, :-1], (1, 0), value=-1)


def count_turns(mask: Tensor, turn: Tensor | None) -> Tensor:
    """(B,) int64, number of turns with a trained decision; 0 without turns. Raises ValueError if turns decrease."""
    if turn is None:
        return torch.zeros(len(mask), dtype=torch.int64)
    before = turns_before(mask > 0, turn)
    if bool(((mask > 0) & (turn < before)).any()):
        raise ValueError("rollouts.turn decreases along a row; number the environment steps in ascending order.")
    # a turn counts at its first trained decision
    return ((mask > 0) & (turn > before)).sum(1)


class OnHost(NamedTuple):
    """CPU copies of the fields on which control flow on the host depends."""

    group: Tensor
    mask: Tensor
    turns: Tensor
    """(B,) int64, turns with a trained decision."""


PLACE = "place"
"""Key of `Rollouts.extras` (B,) int64: index of the row's task among all tasks drawn in the step by all processes."""
TASK = "task"
"""Key of `Rollouts.extras` (B,) int64: index of the row's task in the training set."""
TOKENS = "tokens"
"""Key of `Rollouts.extras` (B, T) int64: the token of each decision; only set if a block needs it."""
ANSWER = "answer"
"""Key of `Rollouts.extras` (B,) int64: rows of a group with equal final answers share a number; only set if needed."""
SAMPLED = "sampled_mask"
"""Key of `Rollouts.extras` (B, T): the mask before rows left the update; only until advantages are computed."""
KEEPS_OLD = "keeps_logp_old"
"""Key of `Rollouts.extras` (B,): 1 for rows that keep their `logp_old`, such as replayed ones."""
COLLISION = "collision"
"""Key of `Rollouts.extras` (B, T): sum of squared probabilities, before the update; only set if needed."""
_DECISION_FIELDS = ("mask", "logp_old", "advantage", "logp_ref", "values", "returns", "entropy", "turn", "logp_rollout")


@dataclass
class Rollouts:
    """Rows of decisions, in groups that share a prompt. The sampler creates them and the loss consumes them."""

    group: Tensor = per_row()
    """(B,) int64, the group of each row, 0..N-1; every number occurs."""
    mask: Tensor = per_decision()
    """(B, T) float, 1 for decisions of the policy that are trained, 0 for tool output, hints and padding."""
    logp_old: Tensor = per_decision()
    """(B, T) float, log-probability in nats under the policy before the update; constant."""
    reward: Tensor = per_row()
    """(B,) float, total reward of the row; NaN marks a row that could not be scored."""
    payload: Payload | None = nested(default=None)
    """Prompts, images and responses of the domain, opened with `<its class>.of(rollouts)`."""
    reward_terms: dict[str, Tensor] = per_row(default_factory=dict)
    """(B,) each, the unweighted reward terms by name."""
    advantage: Tensor | None = per_decision(default=None)
    """(B, T) float, set by `Objective.compute_advantages`; 0 on untrained decisions."""
    logp_ref: Tensor | None = per_decision(default=None)
    """(B, T) float, log-probability under the frozen reference policy."""
    values: Tensor | None = per_decision(default=None)
    """(B, T) float, value of the state before each decision, as predicted when the rows were sampled."""
    returns: Tensor | None = per_decision(default=None)
    """(B, T) float, regression target of the value head."""
    entropy: Tensor | None = per_decision(default=None)
    """(B, T) float, entropy in nats of the action distribution at sampling time."""
    turn: Tensor | None = per_decision(default=None, padding=-1)
    """(B, T) int64, environment step of each decision, non-decreasing along a row, -1 on padding."""
    logp_rollout: Tensor | None = per_decision(default=None)
    """(B, T) float, log-probability under the sampler; None if `logp_old` already is the sampler's."""
    extras: dict[str, Tensor] = per_decision(default_factory=dict)
    """Additional data per row (B,) or per decision (B, T), such as "kl_weight" or "decision_reward"."""

    def __post_init__(self) -> None:
        self._check(new=("group", "mask"))

    def _check(self, new: Collection[str] = ()) -> None:
        """Check shapes, and also the values of groups, mask and turns if one of them is new.

        Control flow on the host depends on these three, so it keeps CPU copies: the GPU is synchronised once here
        instead of at every selection.
        """
        rows = check_rows(self.group, self.reward)
        shape = check_mask(self.mask, rows)
        for name in _DECISION_FIELDS:
            value = getattr(self, name)
            if value is not None:
                check_decisions(name, value, shape, integer=name == "turn")
        # a selection of valid rows is valid, so values are only checked for new fields
        if not {"group", "mask", "turn"}.isdisjoint(new):
            # one transfer for all three
            group, mask, *turn = to_host([self.group, self.mask, *([] if self.turn is None else [self.turn])])
            check_groups(group)
            check_zeros_and_ones(mask)
            self.host = OnHost(group, mask, count_turns(mask, turn[0] if turn else None))
        # nested batches check themselves; here only that they are of as many rows and groups
        if isinstance(self.payload, Payload):
            self.payload.check_counts(rows, self.num_groups)
        for name, value in (*self.reward_terms.items(), *self.extras.items()):
            if tuple(value.shape) not in ((rows,), shape):
                raise ValueError(
                    f"'{name}' has shape {tuple(value.shape)}; data of {rows} rows of {shape[1]} "
                    f"decisions has shape ({rows},) or {shape}."
                )

    @property
    def num_rows(self) -> int:
        """Number of rows B."""
        return self.group.shape[0]

    @property
    def num_groups(self) -> int:
        """Number of groups N."""
        return int(self.host.group.max()) + 1 if self.num_rows else 0

    @property
    def places(self) -> list[int] | None:
        """Index of each group's task among all tasks drawn in the step; None if not recorded."""
        if PLACE not in self.extras:
            return None
        found = torch.empty(self.num_groups, dtype=torch.int64)
        # the rows of a group share one task, so any of them may write its place
        found[self.host.group] = self.extras[PLACE].cpu()
        return found.tolist()

    @property
    def num_decisions(self) -> int:
        """Width T of the padded decision axis."""
        return self.mask.shape[1]

    @property
    def lengths(self) -> Tensor:
        """(B,) int64, trained decisions of each row."""
        return self.mask.sum(1).long()

    @property
    def scored(self) -> Tensor:
        """(B,) bool, rows whose reward is finite."""
        return torch.isfinite(self.reward)

    @property
    def loss_mask(self) -> Tensor:
        """(B, T) float, the mask, with rows that could not be scored set to 0."""
        # an unscored row (NaN reward) has no gradient and counts in no denominator
        return self.mask * self.scored[:, None].to(self.mask.dtype)

    def replace(self, **changes: Any) -> Rollouts:
        """Return a copy with some fields replaced, validated like a new one."""
        # a misspelt field would otherwise be set as a plain attribute and never be read
        if unknown := changes.keys() - {field.name for field in dataclasses.fields(self)}:
            raise TypeError(f"Rollouts have no field {', '.join(sorted(unknown))}.")
        return self._copied(changes, self.host, new=changes)

    def to(self, device: torch.device | str) -> Rollouts:
        """Return a copy with tensors and payload on a device."""
        return self._copied(move_fields(self, device), self.host)

    def select(self, rows: Tensor) -> Rollouts:
        """Keep some rows, renumber their groups and drop unused prompts.

        Args:
            rows: (b,) int64 row indices or (B,) bool; the order is kept.

        Returns:
            The rows; groups keep their relative order.
        """
        rows = _as_indices(rows, self.num_rows, "rows")
        # on the host: unique has an output of unknown size, for which a GPU would be synchronised
        groups, renumbered = torch.unique(self.host.group[rows], return_inverse=True)
        return self._take(rows, groups, renumbered)

    def select_groups(self, groups: Tensor) -> Rollouts:
        """Keep whole groups, in the order given.

        Args:
            groups: (n,) int64 group indices without repetition or (N,) bool.

        Returns:
            The rows of these groups; group j of the result is `groups[j]`.
        """
        groups = _as_indices(groups, self.num_groups, "groups")
        # inverse of the selection: the new number of each group, -1 for those dropped
        place = torch.full((self.num_groups,), -1, dtype=torch.int64)
        place[groups] = torch.arange(len(groups))
        # a group that is named twice would be written once, and its rows would go missing
        if int((place >= 0).sum()) != len(groups):
            raise ValueError(f"select_groups takes every group at most once; got {groups.tolist()}.")
        position = place[self.host.group]
        # stable keeps the sampling order of the rows within each group
        order = torch.argsort(position, stable=True)
        # groups that were not asked for have position -1
        rows = order[position[order] >= 0]
        return self._take(rows, groups, position[rows])

    def exchanged(self, rows: Tensor, others: Rollouts) -> Rollouts:
        """Replace rows by others, which take over their groups and prompts.

        Args:
            rows: (k,) int64, the rows to replace.
            others: k rows with the same optional fields, terms and extras; their own groups and prompts are dropped.

        Returns:
            As many rows as before, T padded to the longest.
        """
        joined, order = Rollouts.concat([self, others]), torch.arange(self.num_rows)
        # the replacement rows come after those of self in the joined batch
        order[_as_indices(rows, self.num_rows, "rows")] = self.num_rows + torch.arange(others.num_rows)
        # concat puts the groups of self first, so these numbers keep its prompts and drop those of the others
        return joined._take(order, torch.arange(self.num_groups), self.host.group)

    def joined_by(self, others: Rollouts, groups: Tensor) -> Rollouts:
        """Add rows to existing groups; their own groups and prompts are dropped.

        Args:
            others: k rows with the same optional fields, terms and extras.
            groups: (k,) int64, the group that each row joins.

        Returns:
            All rows, group by group.
        """
        # concat numbers the groups of `others` after those of self; `group` overrides that
        # stable, so that the rows a group had stay before those that join it
        joined, group = Rollouts.concat([self, others]), torch.cat([self.host.group, groups.cpu()])
        order = torch.argsort(group, stable=True)
        return joined._take(order, torch.arange(self.num_groups), group[order])

    def regrouped(self, group: Tensor, prompts: Tensor) -> Rollouts:
        """The same rows in other groups.

        Args:
            group: (B,) int64, the new group of each row.
            prompts: (n,) int64, for each new group the current group that provides its prompt.
        """
        return self._take(torch.arange(self.num_rows), prompts, group)

    def minibatches(self, count: int, generator: torch.Generator | None = None) -> list[Rollouts]:
        """Split into minibatches of whole groups, as evenly as possible.

        Args:
            count: Number of minibatches; fewer are returned if there are fewer groups.
            generator: CPU generator that shuffles the groups; None keeps their order.

        Returns:
            The minibatches; every group is in exactly one.
        """
        if count < 1:
            raise ValueError(f"minibatches requires a count of at least 1; got {count}.")
        if self.num_rows == 0:
            return []
        total = self.num_groups
        # groups are shuffled, never rows: group statistics and shared prompts stay in one optimiser step
        order = torch.arange(total) if generator is None else torch.randperm(total, generator=generator)
        # tensor_split gives sizes that differ by at most one
        return [self.select_groups(part) for part in torch.tensor_split(order, min(count, total))]

    def micro_batches(self, rows: int, *, whole_groups: bool = False) -> Iterator[Rollouts]:
        """Split into chunks that fit in memory; their losses add up to the loss of the whole batch.

        A chunk holds whole groups, so that each prompt is processed in one chunk; a group of more than `rows` rows is
        split into even parts, one chunk each. T is trimmed to the longest row of the chunk. A chunk can therefore only
        be used for the loss: compute advantages and denominators first.

        Args:
            rows: Maximum number of rows per chunk.
            whole_groups: Whether to keep larger groups together, in a separate chunk each.

        Returns:
            An iterator over consecutive rows, in order.
        """
        if rows < 1:
            raise ValueError(f"micro_batches requires at least 1 row per chunk; got {rows}.")
        # sizes to stops: the rows of a chunk are consecutive
        stops = list(accumulate(_chunk_sizes(self.host.group, rows, whole_groups)))
        # decisions after the last trained one of a row cannot change its loss
        ends = torch.arange(1, self.num_decisions + 1).where(self.host.mask > 0, 0).amax(1).tolist()
        for start, stop in zip([0, *stops], stops, strict=False):
            chunk = self.select(torch.arange(start, stop))
            # at least one decision: T = 0 is rejected by the checks, and a chunk may hold only untrained rows
            width = max(1, *ends[start:stop])
            yield chunk._copied(trim_fields(chunk, width), chunk.host._replace(mask=chunk.host.mask[:, :width]))

    @staticmethod
    def concat(parts: Sequence[Rollouts]) -> Rollouts:
        """Join rollouts: T is padded to the longest, groups follow one another.

        Args:
            parts: At least one; all with the same optional fields, terms and extras.

        Returns:
            All rows in order.
        """
        if not parts:
            raise ValueError("concat requires at least one Rollouts; got an empty sequence.")
        offsets = [0, *accumulate(part.num_groups for part in parts)]
        # each part numbers its groups from 0, so later parts are shifted
        groups = [part.host.group + offset for part, offset in zip(parts, offsets, strict=False)]
        width = max(part.num_decisions for part in parts)
        masks = [torch.nn.functional.pad(part.host.mask, (0, width - part.num_decisions)) for part in parts]
        turns = [part.host.turns for part in parts]
        # turns are per row and need no padding; the host copies are joined without asking the device again
        return parts[0]._copied(join_fields(parts), OnHost(*map(torch.cat, (groups, masks, turns))))

    def _take(self, rows: Tensor, groups: Tensor, renumbered: Tensor) -> Rollouts:
        return self._copied(
            select_fields(self, rows, groups), OnHost(renumbered, self.host.mask[rows], self.host.turns[rows])
        )

    def _copied(self, changes: dict[str, Any], host: OnHost, *, new: Collection[str] = ()) -> Rollouts:
        """A copy with changed fields; those named in `new` still need their values checked."""
        # a shallow copy shares tensors with the original: fields are replaced, never written in place
        copied = copy.copy(self)
        copied.__dict__ |= changes
        copied.host = host
        # renumbered on the host, so the device needs the new numbers too
        if host.group is not self.host.group:
            copied.group = to_device(host.group, self.group.device)
        # shapes always; values only of new fields, since a selection of valid rows is valid
        copied._check(new)
        return copied


def _chunk_sizes(group: Tensor, rows: int, whole_groups: bool) -> list[int]:
    sizes: list[int] = []
    room = 0
    for length in torch.unique_consecutive(group, return_counts=True)[1].tolist():
        # the group still fits behind the previous one
        if length <= room:
            sizes[-1] += length
            room -= length
            continue
        # even parts: 9 rows at 4 a chunk become 3 + 3 + 3, which pad less than 4 + 4 + 1
        parts = 1 if whole_groups else -(-length // rows)
        sizes += [length // parts + (part < length % parts) for part in range(parts)]
        # a group that was split leaves no room: no other prompt joins its chunks
        room = max(rows - length, 0)
    return sizes


def _as_indices(selection: Tensor, size: int, what: str) -> Tensor:
    # on the CPU, where the copies are that control flow reads
    selection = selection.cpu()
    if selection.dtype == torch.bool:
        if tuple(selection.shape) != (size,):
            raise ValueError(f"A bool selection of {what} has shape ({size},); got {tuple(selection.shape)}.")
        return torch.nonzero(selection).flatten()
    if selection.dtype != torch.int64 or selection.dim() != 1:
        raise ValueError(
            f"{what} must be a 1-d int64 or bool tensor; got {selection.dtype} of shape {tuple(selection.shape)}."
        )
    # negative indices would silently select from the end
    if len(selection) and not (int(selection.min()) >= 0 and int(selection.max()) < size):
        raise ValueError(f"{what} must be in 0..{size - 1}; got {selection.tolist()}.")
    return selection
