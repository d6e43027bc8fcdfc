"""SPO: advantages of segments of a response, from Monte Carlo values at their beginning and end (arXiv 2505.23564).

chain: an answer is cut before every `interval`-th of its uncertain tokens, those sampled with less than `probability`.
The value of a cut is the mean reward of `rollouts` answers that begin with the tokens before it; a cut that several
answers of a question share is valued once. tree: `trainer.samples_per_task` answers of a question are sampled up to
`tokens` tokens, each that has not ended is continued `branches[0]` times, and so on; after the last entry a branch runs
to its end. The value of a branch is its reward, or the mean of its continuations' values.

The advantage of a segment is the value of its end minus that of its beginning; the last segment of an answer ends with
the answer's reward. Only uncertain tokens are trained and counted in the loss. Rows of the tree are whole answers; a
segment that several share is trained in the first of them, and one with advantage 0 in none.

Differences from AIFrameResearch/SPO: all segments of the tree are used in the step that sampled them, where the code
takes at most 32 of a question and keeps the others for later steps; an answer that reached `sampler.max_new_tokens` has
the reward of its text, where the code gives it 0. Constants: 9 rollouts and interval 5 (rho-1B on GSM8K), 6-6-6 and 600
tokens (MATH).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from mmrl.core.blocks.credit import VALUE_AFTER, VALUE_BEFORE, VALUE_STD
from mmrl.core.loss import Metric
from mmrl.core.payload import to_device
from mmrl.core.rollouts import Rollouts
from mmrl.core.state import Tally
from mmrl.errors import ConfigError
from mmrl.fields import bounded, choice
from mmrl.training.objectives import ObjectiveConfig
from mmrl.training.processes import Streams
from mmrl.training.recipe import Step
from mmrl.vlm.data.prompt import Prompt, VlmPayload, join_prompts, token_lists
from mmrl.vlm.data.task import VlmTask
from mmrl.vlm.engine.vlm_policy import VlmPolicy
from mmrl.vlm.engine.vlm_sampler import sample
from mmrl.vlm.vlm_config import VlmConfig
from mmrl.vlm.vlm_recipe import VlmRecipe

EDGE = "segment_edge"
"""Extra (B, T) int64 of the tree's rows: index of the branch that each token belongs to, unique in its group."""
Cut = tuple[int, float]
"""Tokens before a position in a response, and the value at that position."""


@dataclass
class SegmentSettings:
    """Segments of responses and the samples that estimate their values."""

    kind: str = choice("chain", ("chain", "tree"))
    """chain: cut whole responses and estimate the value at each cut from new samples; tree: responses that branch."""
    probability: float = bounded(0.9, above=0, at_most=1)
    """Tokens sampled with at least this probability are not trained, and chains are never cut before them."""
    interval: int = bounded(5, at_least=1)
    """Number of uncertain tokens between two cuts of a chain."""
    rollouts: int = bounded(9, at_least=1)
    """Responses sampled from each cut of a chain."""
    tokens: int = bounded(600, at_least=1)
    """Maximum length of a tree's segments in tokens, except for the last ones."""
    branches: list[int] = field(default_factory=lambda: [6, 6])
    """Number of continuations of each unfinished branch of a tree, after the first segment, after the second, ..."""

    def validate(self) -> None:
        """Reject branches without continuations; raises ConfigError."""
        if min(self.branches, default=0) < 1:
            raise ConfigError(f"segment.branches is {self.branches}; it must be one or more numbers of at least 1")


@dataclass
class SegmentConfig(VlmConfig):
    """An SPO run."""

    segment: SegmentSettings = field(default_factory=SegmentSettings)
    """Segments of responses and the samples that estimate their values."""
    objective: ObjectiveConfig = field(default_factory=lambda: ObjectiveConfig(preset="segment_chain"))
    """Objective that is optimised."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        super().validate()
        if self.segment.kind == "chain" and self.objective.advantage.get("std"):
            raise ValueError(
                "objective.advantage.std is set, but in a chain no other segments begin at the same state; use "
                "segment.kind: tree"
            )


@dataclass
class Branch:
    """A response, or its beginning, in a tree of samples."""

    group: int
    ids: list[int]
    logp: list[float]
    ends: list[int]
    """Tokens up to the end of each segment."""
    path: tuple[int, ...]
    """Number of each segment among those that continue the same branch."""
    finish: str = "length"


def bounds(length: int, cuts: Sequence[Cut], end: float) -> tuple[Tensor, Tensor]:
    """Values at the beginning and the end of each token's segment.

    Args:
        length: tokens of the answer.
        cuts: places in rising order with their values; tokens before the first one have no segment, so both values
            are equal.
        end: value of the end of the answer.

    Returns:
        Two tensors (length,).
    """
    places = [0, *(place for place, _ in cuts), length]
    values = [value for _, value in cuts] or [end]
    sizes = torch.tensor([b - a for a, b in pairwise(places)])
    # tokens before the first cut get the first value twice, so their advantage is 0
    before, after = torch.tensor([values[0], *values]), torch.tensor([*values, end])
    # without a cut there is one segment, and both values are `end`
    return before[: len(sizes)].repeat_interleave(sizes), after[: len(sizes)].repeat_interleave(sizes)


def chain_cuts(probability: Sequence[float], below: float, interval: int) -> list[int]:
    """Numbers of tokens before the cuts of a response whose tokens have these probabilities."""
    # the first uncertain token begins a segment too
    return [place for place, value in enumerate(probability) if value < below][::interval]


def tree_values(paths: Sequence[Sequence[int]], rewards: Sequence[float]) -> dict[int | None, tuple[float, float]]:
    """Value of each branch of a tree, None for its root, and the standard deviation of its continuations' values.

    Args:
        paths: branches from the root to each leaf.
        rewards: reward of each leaf; NaN where it could not be scored, which counts in no mean.
    """
    following: dict[int | None, dict[int, None]] = {}
    for path in paths:
        # None is the root
        for one, other in zip([None, *path], path, strict=False):
            following.setdefault(one, {})[other] = None
    found: dict[int | None, tuple[float, float]] = {
        path[-1]: (reward, 0.0) for path, reward in zip(paths, rewards, strict=True)
    }

    def value(node: int | None) -> float:
        if node not in found:
            known = [x for x in map(value, following[node]) if not math.isnan(x)]
            # an unscored node has no say in its parent's mean; a parent without scored ones is NaN itself
            values = torch.tensor(known or [math.nan], dtype=torch.float64)
            found[node] = float(values.mean()), float(values.std(correction=0))
        return found[node][0]

    value(None)
    return found


class SegmentRecipe(VlmRecipe):
    """A policy gradient with advantages of segments."""

    config: SegmentConfig

    def __init__(self, config: SegmentConfig) -> None:
        super().__init__(config)
        self.counted = self.added["segment"] = Tally()
        """Values estimated and tokens sampled in the step."""
        self._asked: tuple[VlmPolicy, Streams] = (self.policy, Streams(0, ()))

    def rollout(self, policy: VlmPolicy, tasks: Sequence[VlmTask], streams: Streams, step: Step) -> Rollouts:
        """Sample responses, as usual or as trees."""
        grow = self._tree if self.config.segment.kind == "tree" else super().rollout
        rollouts = grow(policy, tasks, streams, step)
        # values are sampled in `completed`, by the policy and the random streams of this rollout
        self._asked = policy, streams.among(tasks, VlmPayload.of(rollouts).tasks)
        return rollouts

    def completed(self, rollouts: Rollouts, step: Step) -> Rollouts:
        """Value the ends of the segments."""
        if self.config.segment.kind == "tree":
            found = self._tree_values(rollouts)
        else:
            self.counted["tokens"] += int(rollouts.host.mask.sum())
            found = self._chain_values(rollouts, step)
        extras = {name: to_device(value, rollouts.mask.device) for name, value in found.items()}
        return rollouts.replace(extras=rollouts.extras | extras)

    def advantages(self, rollouts: Rollouts, accelerator: Accelerator, step: Step) -> Rollouts:
        """Advantages of the objective over uncertain tokens; the others are dropped from the update."""
        before, total = rollouts.extras, rollouts.mask.sum()
        kept = rollouts.logp_old.exp() < self.config.segment.probability
        # the tree alone has it: each shared segment is trained once
        if EDGE in before:
            kept &= self._first(rollouts) & (before[VALUE_AFTER] != before[VALUE_BEFORE])
        rollouts = rollouts.replace(mask=rollouts.mask * kept.to(rollouts.mask.dtype))
        self.noted["segment/trained"] = Metric(rollouts.mask.sum(), total)
        return super().advantages(rollouts, accelerator, step)

    def _first(self, rollouts: Rollouts) -> Tensor:
        """Mask (B, T) of the tokens of each segment in the first row that has it and is trained."""
        trained = rollouts.loss_mask > 0
        if self.config.mask_truncated_completions:
            cut = [finish == "length" for finish in VlmPayload.of(rollouts).finish]
            trained &= ~to_device(torch.tensor(cut), trained.device)[:, None]
        edge, row = rollouts.extras[EDGE], torch.arange(rollouts.num_rows, device=trained.device)[:, None]
        # numbers of branches may recur in groups that were sampled later
        branch = edge + rollouts.group[:, None] * (int(edge.max()) + 1)
        owner = torch.full((int(branch.max()) + 1,), rollouts.num_rows, device=trained.device)
        owner.scatter_reduce_(0, branch[trained], row.expand_as(edge)[trained], "amin")
        return trained & (owner[branch.clamp(min=0)] == row)

    def step_metrics(self, rollouts: Rollouts) -> dict[str, float | Metric]:
        """Adds the number of values estimated and tokens sampled."""
        found = {f"segment/{name}": float(self.counted[name]) for name in ("values", "tokens")}
        self.counted.clear()
        return super().step_metrics(rollouts) | found

    def describe(self) -> str:
        """The objective's formula and the segments."""
        settings = self.config.segment
        form = f"answers are cut before every {settings.interval} tokens with p < {settings.probability:g}"
        if settings.kind == "tree":
            factors = "-".join(map(str, [self.config.trainer.samples_per_task, *settings.branches]))
            form = f"answers branch {factors} after {settings.tokens} tokens each"
        return f"{super().describe()}\n{form}; tokens with p >= {settings.probability:g} are left out"

    def _continue(
        self,
        policy: VlmPolicy,
        prompts: Sequence[Prompt],
        starts: Sequence[Branch],
        count: int,
        draws: Tensor,
        most: int,
    ) -> list[Branch]:
        """Sample `count` continuations of each start, of at most `most` tokens each."""
        longest = self.config.sampler.max_new_tokens
        # tokens of the start count towards the longest answer
        limits = [min(most, longest - len(start.ids)) for start in starts]
        asked = [continued(prompts[start.group], start.ids) for start in starts]
        drawn = sample(policy, asked, count, self.config.sampler, draws, limits=limits)
        ids, found = token_lists(drawn.response_ids, drawn.mask), []
        self.counted["tokens"] += sum(map(len, ids))
        for row, (own, logp) in enumerate(zip(ids, drawn.logp.tolist(), strict=True)):
            start = starts[row // count]
            joined = [*start.ids, *own]
            found.append(
                Branch(
                    start.group,
                    joined,
                    [*start.logp, *logp[: len(own)]],
                    [*start.ends, len(joined)],
                    (*start.path, row % count),
                    drawn.finish[row],
                )
            )
        return found

    def _texts(self, policy: VlmPolicy, prompts: Sequence[Prompt], branches: Sequence[Branch]) -> list[str]:
        texts = policy.turns.decode([one.ids for one in branches])
        return [prompts[one.group].answer_start + text for one, text in zip(branches, texts, strict=True)]

    def _draws(self, streams: Streams, starts: Sequence[Branch], count: int, purpose: str) -> Tensor:
        """Random numbers (S * count, T) of starts in the order of their groups, by the streams of the groups."""
        owned = [0] * len(streams.places)
        for start in starts:
            # a group's starts get rows of its stream, so its draws do not depend on groups in other processes
            owned[start.group] += 1
        width = self.config.sampler.max_new_tokens
        drawn = [
            streams.select([group]).uniform(1, number * count, width, purpose=purpose)
            for group, number in enumerate(owned)
            if number
        ]
        return torch.cat(drawn)

    def _chain_values(self, rollouts: Rollouts, step: Step) -> dict[str, Tensor]:
        """Values before and after the segment of each token (B, T), by answers from the cuts."""
        settings, payload = self.config.segment, VlmPayload.of(rollouts)
        ids = token_lists(payload.response_ids, rollouts.host.mask)
        groups, probability = rollouts.host.group.tolist(), rollouts.logp_old.exp().tolist()
        cuts = [
            chain_cuts(own[: len(row)], settings.probability, settings.interval)
            for own, row in zip(probability, ids, strict=True)
        ]
        # a dict keeps the order, and an answer's beginning that several rows share is valued once
        states = {(group, *row[:cut]): None for group, row, own in zip(groups, ids, cuts, strict=True) for cut in own}
        # `_draws` takes starts group by group
        ordered = sorted(states, key=lambda state: state[0])
        values = dict(zip(ordered, self._value(payload, ordered, step), strict=True))
        width = rollouts.num_decisions
        found = torch.zeros(2, rollouts.num_rows, width)
        for row, (group, own, reward) in enumerate(zip(groups, ids, rollouts.reward.tolist(), strict=True)):
            known = [(cut, values[group, *own[:cut]]) for cut in cuts[row]]
            # a cut that could not be valued joins the segments on both sides of it
            known = [(cut, value) for cut, value in known if not math.isnan(value)]
            # an unscored answer keeps zeros; it is not trained
            if not math.isnan(reward):
                found[:, row, : len(own)] = torch.stack(bounds(len(own), known, reward))
        return {VALUE_BEFORE: found[0], VALUE_AFTER: found[1]}

    def _value(self, payload: VlmPayload, states: Sequence[tuple[int, ...]], step: Step) -> list[float]:
        """Mean reward of answers that begin with given tokens behind the group's prompt; NaN if none was scored."""
        (policy, streams), count = self._asked, self.config.segment.rollouts
        if not states:
            return []
        starts = [Branch(group, list(ids), [0.0] * len(ids), [], ()) for group, *ids in states]
        draws, longest = self._draws(streams, starts, count, "value"), self.config.sampler.max_new_tokens
        found = self._continue(policy, payload.prompts, starts, count, draws, longest)
        self.counted["values"] += len(states)
        # the log of the run counts these answers too
        self.extra_samples += len(found)
        texts = self._texts(policy, payload.prompts, found)
        tasks = [payload.tasks[one.group] for one in found]
        result = self.score_texts(tasks, texts, [one.ids for one in found], step)
        self.errors.count(result)
        return torch.tensor(result.total, dtype=torch.float64).unflatten(0, (-1, count)).nanmean(1).tolist()

    def _tree(self, policy: VlmPolicy, tasks: Sequence[VlmTask], streams: Streams, step: Step) -> Rollouts:
        """Whole answers of trees, question by question."""
        usable, prompts = self.encode(policy, tasks)
        streams, settings = streams.among(tasks, usable), self.config.segment
        longest = self.config.sampler.max_new_tokens
        factors = [self.config.trainer.samples_per_task, *settings.branches]
        live, leaves = [Branch(group, [], [], [], ()) for group in range(len(usable))], list[Branch]()
        for depth, factor in enumerate(factors):
            if not live:
                break
            last = depth + 1 == len(factors)
            draws = self._draws(streams, live, factor, f"tree {depth}")
            grown = self._continue(policy, prompts, live, factor, draws, longest if last else settings.tokens)
            # a model's positions may end an answer before `max_new_tokens`
            room = [min(longest, policy.positions - len(prompts[one.group])) for one in grown]
            ended = [
                # "length" is also what a branch ends with that is to be continued
                last or one.finish != "length" or len(one.ids) >= most
                for one, most in zip(grown, room, strict=True)
            ]
            leaves += [one for one, end in zip(grown, ended, strict=True) if end]
            live = [one for one, end in zip(grown, ended, strict=True) if not end]
        # siblings next to each other: a shared segment is trained in the first row
        leaves.sort(key=lambda leaf: (leaf.group, leaf.path))
        texts, greedy = self._texts(policy, prompts, leaves), self._greedy_answers(policy, prompts)
        rows = leaf_rows(leaves, policy.pad_id)
        finish = [leaf.finish for leaf in leaves]
        payload = VlmPayload(prompts, usable, rows.pop("ids"), texts, finish, greedy=greedy)
        group, missing = torch.tensor([leaf.group for leaf in leaves]), torch.full((len(leaves),), math.nan)
        found = Rollouts(group, rows.pop("mask"), rows.pop("logp"), missing, payload, extras=rows)
        return streams.noted(found.to(policy.device))

    def _tree_values(self, rollouts: Rollouts) -> dict[str, Tensor]:
        """Values before and after the segment of each token (B, T), and the deviation where it begins."""
        edges = rollouts.extras[EDGE].cpu()
        reward = rollouts.reward.tolist()
        groups = rollouts.host.group
        lengths = rollouts.host.mask.sum(1).long().tolist()
        found = torch.zeros(3, *edges.shape)
        for group in range(rollouts.num_groups):
            rows = torch.nonzero(groups == group).flatten().tolist()
            # a branch is one run of equal numbers; padding has none
            paths = [torch.unique_consecutive(edges[row, : lengths[row]]).tolist() for row in rows]
            values = tree_values(paths, [reward[row] for row in rows])
            self.counted["values"] += len(values)
            for row, path in zip(rows, paths, strict=True):
                for one, other in zip([None, *path], path, strict=False):
                    ends = torch.tensor([values[one][0], values[other][0], values[one][1]]).nan_to_num(0.0)
                    found[:, row, edges[row] == other] = ends[:, None]
        return dict(zip((VALUE_BEFORE, VALUE_AFTER, VALUE_STD), found, strict=True))


def continued(prompt: Prompt, ids: Sequence[int]) -> Prompt:
    """A prompt followed by the given first tokens of a response."""
    if not ids:
        return prompt
    tokens = torch.tensor(ids)
    # text has the same place in all three axes of rotary positions
    places = torch.arange(len(ids)).expand(3, -1)
    return join_prompts([prompt, Prompt(tokens, torch.zeros_like(tokens), places, len(ids))])


def leaf_rows(leaves: Sequence[Branch], pad: int) -> dict[str, Any]:
    """Padded tokens, log-probabilities, mask and branches (B, T) of leaves in the order of their paths."""
    shape = (len(leaves), max(len(leaf.ids) for leaf in leaves))
    rows: dict[str, Any] = {"ids": torch.full(shape, pad), EDGE: torch.full(shape, -1)}
    rows |= {name: torch.zeros(shape) for name in ("mask", "logp")}
    seen: dict[tuple[int, ...], int] = {}
    for row, leaf in enumerate(leaves):
        length = len(leaf.ids)
        rows["ids"][row, :length], rows["logp"][row, :length] = torch.tensor(leaf.ids), torch.tensor(leaf.logp)
        rows["mask"][row, :length] = 1.0
        for depth, (start, stop) in enumerate(zip([0, *leaf.ends], leaf.ends, strict=False), start=1):
            node = (leaf.group, *leaf.path[:depth])
            # numbers follow the order of rows, so the same tree always has the same ones
            rows[EDGE][row, start:stop] = seen.setdefault(node, len(seen))
    return rows
