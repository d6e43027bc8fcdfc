"""Stages that replace samples by other rows, for questions without a correct sample."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmrl.core.blocks.foreign import SOURCE
from mmrl.core.rollouts import Rollouts
from mmrl.core.state import Tally
from mmrl.training.processes import Streams
from mmrl.training.recipe import RolloutStage, Step
from mmrl.training.scoring import EveryRewardFailedError, with_rewards
from mmrl.vlm.data.prompt import VlmPayload
from mmrl.vlm.engine.vlm_policy import VlmPolicy
from mmrl.vlm.vlm_recipe import VlmRecipe

Exchange = tuple[Tensor, Rollouts]
"""The rows (k,) to remove, and the k rows that replace them."""


class Replacing(RolloutStage, ABC):
    """Replaces scored rows of questions without a correct sample by other rows.

    A subclass chooses in `replacements` which rows leave and which ones take their places.
    """

    name = "replaced"

    def __init__(self, recipe: VlmRecipe, settings: Any) -> None:
        self.recipe, self.settings = recipe, settings
        self.replaced = Tally()
        """Groups, failed groups, and rows replaced in the step."""
        self.added = {"replaced": self.replaced}

    @abstractmethod
    def replacements(
        self, policy: VlmPolicy, rollouts: Rollouts, failed: Sequence[int], streams: Streams, step: Step
    ) -> Exchange | None:
        """Rows for groups that failed; None if there is nothing to replace.

        Args:
            policy: the policy that sampled.
            rollouts: scored rows.
            failed: numbers of the groups without a right answer.
            streams: random streams of these groups.
            step: position in the run.
        """

    def after(self, policy: VlmPolicy, rollouts: Rollouts, streams: Streams, step: Step) -> Rollouts:
        """Mark all rows as samples of the policy."""
        return rollouts.replace(extras={**rollouts.extras, SOURCE: torch.zeros_like(rollouts.group)})

    def scored(self, policy: VlmPolicy, rollouts: Rollouts, streams: Streams, step: Step) -> Rollouts:
        """Replace rows of groups without a correct sample."""
        correct = self.recipe.correct(rollouts).float().cpu()
        right = torch.zeros(rollouts.num_groups).index_add(0, rollouts.host.group, correct)
        failed = torch.nonzero(right == 0).flatten().tolist()
        self.replaced["groups"] += rollouts.num_groups
        self.replaced["failed"] += len(failed)
        found = self.replacements(policy, rollouts, failed, streams.select(failed), step) if failed else None
        if found is None:
            return rollouts
        self.replaced["rows"] += len(found[0])
        rollouts = rollouts.exchanged(*found)
        # tokens, and numbers of answers, which count over the group: those of the rows that left do not fit
        tokens = VlmPayload.of(rollouts).sampled_tokens(rollouts.mask)
        inputs = self.recipe._block_inputs(rollouts, *self.recipe.asked(rollouts), tokens)
        return rollouts.replace(extras=rollouts.extras | inputs)

    def metrics(self, rollouts: Rollouts, step: Step) -> dict[str, float]:
        """What was replaced in the step."""
        found = {
            "replaced/failed": self.replaced["failed"] / max(self.replaced["groups"], 1),
            "replaced/rows": float(self.replaced["rows"]),
        }
        self.replaced.clear()
        return found

    def rows_of(
        self, like: Rollouts, groups: Sequence[int], ids: Sequence[Sequence[int]], texts: Sequence[str], source: int
    ) -> Rollouts:
        """Rows of given tokens after the prompts of some groups, each row a separate group; not scored.

        Args:
            like: the rows that they are to join.
            groups: group of each row.
            ids: tokens of each row.
            texts: the same as text.
            source: number of `SOURCE`.
        """
        payload, longest = VlmPayload.of(like), max(map(len, ids))
        tokens = torch.tensor([[*row, *[self.recipe.policy.pad_id] * (longest - len(row))] for row in ids])
        mask = torch.tensor([[1.0] * len(row) + [0.0] * (longest - len(row)) for row in ids])
        prompts, tasks = [payload.prompts[group] for group in groups], [payload.tasks[group] for group in groups]
        given = VlmPayload(prompts, tasks, tokens, list(texts), ["eos"] * len(ids))
        first = [like.host.group.tolist().index(group) for group in groups]
        extras = {  # of rows: what the group has in common
            name: value[first].cpu() if value.dim() == 1 else torch.zeros(mask.shape, dtype=value.dtype)
            for name, value in like.extras.items()
        }
        # given text was not truncated, so its whole probability counts
        extras |= {name: torch.ones_like(mask) for name in extras.keys() & {"nucleus_mass"}}
        extras[SOURCE] = torch.full((len(ids),), source)
        missing = torch.full((len(ids),), float("nan"))
        rows = Rollouts(torch.arange(len(ids)), mask, torch.zeros_like(mask), missing, given, extras=extras)
        return rows.to(like.mask.device)

    def with_scores(self, rows: Rollouts, step: Step) -> Rollouts:
        """Rows with the rewards of their texts; NaN if a reward failed."""
        payload = VlmPayload.of(rows)
        result = self.recipe.score_texts(payload.tasks, payload.texts, payload.sampled_tokens(rows.mask), step)
        self.recipe.errors.warn(result)
        try:
            return with_rewards(rows, result)
        except EveryRewardFailedError as error:
            return error.rollouts

    def with_logp(self, policy: VlmPolicy, rows: Rollouts) -> Rollouts:
        """Rows with the policy's log-probabilities as the old ones."""
        scores = self.recipe.scores_in_chunks(policy, rows, frozenset({"logp"}))
        return rows.replace(logp_old=scores.logp.to(rows.logp_old.dtype))


def behind(rows: Rollouts, contexts: Sequence[Any]) -> Rollouts:
    """Rows that are read after different prompts than their groups', one context each."""
    payload = VlmPayload.of(rows)
    return rows.replace(payload=dataclasses.replace(payload, contexts=[(context,) for context in contexts]))
