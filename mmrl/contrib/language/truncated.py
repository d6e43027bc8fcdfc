"""T-PPO: responses grow by one window of tokens per step, and unfinished ones are carried over (arXiv 2506.15050).

A step samples at most `window` tokens of each answer. Questions with unfinished answers keep their slot of the step,
and these answers go on from where they were; the slots of all other questions get new ones (successive batching). The
policy learns the new tokens alone: the advantage of an unfinished answer ends with the critic's last value (EGAE,
`objective.advantage.truncation: repeat`). The critic learns the rewards of answers that have finished, at all of their
tokens.

The paper has no public code. Differences: policy and critic share a network and a loss, so that old tokens of finished
answers, whose advantage is 0, count in its mean, and unfinished ones have the critic's own values as targets. The new
question that a kept slot would have had is passed over. Rewards of unfinished answers are computed and dropped.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator

from mmrl.contrib.language.segment import continued
from mmrl.core.loss import row_metric
from mmrl.core.returns import decision_rewards, returns_to_go
from mmrl.core.rollouts import Rollouts
from mmrl.fields import bounded
from mmrl.training.objectives import ObjectiveConfig, make_objective
from mmrl.training.processes import Streams, from_all, merge_in_order
from mmrl.training.recipe import Step
from mmrl.vlm.data.prompt import Prompt, VlmPayload, token_lists
from mmrl.vlm.data.task import VlmTask
from mmrl.vlm.engine.vlm_policy import VlmPolicy
from mmrl.vlm.engine.vlm_sampler import sample
from mmrl.vlm.vlm_config import VlmConfig
from mmrl.vlm.vlm_recipe import VlmRecipe

TRUNCATED = "truncated"
NEW = "new"
"""Extra (B, T): 1 on tokens sampled in this step."""
Answer = tuple[list[int], list[float]]
"""Tokens at the beginning of a response, and their log-probabilities."""
Slot = tuple[str, list[Answer]]
"""Id of a question, and its unfinished responses."""


@dataclass
class TruncatedConfig(VlmConfig):
    """A T-PPO run."""

    window: int = bounded(1024, at_least=1)
    """Maximum number of tokens added to a response per step."""
    objective: ObjectiveConfig = field(default_factory=lambda: ObjectiveConfig(preset="tppo"))
    """Objective to optimise; its advantage needs a critic."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        super().validate()
        objective = make_objective(self.objective)
        if not objective.needs_values:
            raise ValueError(
                f"objective.advantage is '{objective.advantage.kind}', but unfinished responses need a critic"
            )
        if objective.filter.resamples:
            raise ValueError(
                "objective.filter is resample, but each step continues each response once; use drop or none"
            )
        if self.mask_truncated_completions:
            raise ValueError(
                "mask_truncated_completions is set, but responses cut by the window are what recipe truncated learns "
                "from; leave it false"
            )
        if self.rollers.overlap:
            raise ValueError(
                "rollers.overlap is set, but each step starts from the unfinished responses of the previous one"
            )


class Carried:
    """Unfinished responses by the index of their question in a step, the same in every process."""

    def __init__(self) -> None:
        self.slots: dict[int, Slot] = {}

    def state_dict(self) -> dict[int, Any]:
        """The responses."""
        return dict(self.slots)

    def load_state_dict(self, state: Mapping[int, Any]) -> None:
        """Restore `state_dict`."""
        self.slots = dict(state)


@dataclass
class SampledRow:
    """A response after this step."""

    group: int
    ids: list[int]
    logp: list[float]
    new: int
    finish: str
    unfinished: bool


class TruncatedRecipe(VlmRecipe):
    """PPO on responses that are sampled over several steps."""

    config: TruncatedConfig

    def __init__(self, config: TruncatedConfig) -> None:
        super().__init__(config)
        self.carried = self.parts["carried"] = Carried()
        self.tasks_by_id = {task.id: task for task in self.train_tasks}
        self.left: list[tuple[tuple[int, int], tuple[int, Slot]]] = []
        """Unfinished responses of the step by the draw of its tasks and the index of their question."""
        self.added["left"] = self.left

    def rollout(self, policy: VlmPolicy, tasks: Sequence[VlmTask], streams: Streams, step: Step) -> Rollouts:
        """Continue unfinished responses, and start those of new questions in the other slots."""
        slots = self.carried.slots
        asked = [
            # the place's question is the one whose answers are unfinished; its new question is not asked in this step
            self.tasks_by_id[slots[place][0]] if place in slots else task
            for place, task in zip(streams.places, tasks, strict=False)
        ]
        usable, prompts = self.encode(policy, asked)
        streams = streams.select(places_of(asked, usable))
        rows = self._begun(policy, prompts, streams) + self._continued(policy, prompts, streams)
        rows.sort(key=lambda row: row.group)
        answers: list[list[Answer]] = [[] for _ in usable]
        for row in rows:
            if row.unfinished:
                answers[row.group].append((row.ids, row.logp))
        # finished questions too, which tell the last draw of the step from earlier ones
        for place, task, own in zip(streams.places, usable, answers, strict=True):
            self.left.append(((streams.draw, place), (place, (task.id, own))))
        return streams.noted(self._rollouts(policy, prompts, usable, rows))

    def _begun(self, policy: VlmPolicy, prompts: Sequence[Prompt], streams: Streams) -> list[SampledRow]:
        groups = [group for group in range(len(prompts)) if streams.places[group] not in self.carried.slots]
        if not groups:
            return []
        starts: list[tuple[int, Answer]] = [(group, ([], [])) for group in groups]
        count = self.config.trainer.samples_per_task
        draws = streams.select(groups).uniform(len(groups), count, self.width)
        return self._sampled(policy, prompts, starts, count, draws)

    def _continued(self, policy: VlmPolicy, prompts: Sequence[Prompt], streams: Streams) -> list[SampledRow]:
        slots = self.carried.slots
        draws = []
        starts = []
        for group in range(len(prompts)):
            answers = slots.get(streams.places[group], ("", []))[1]
            starts += [(group, answer) for answer in answers]
            if answers:
                # by the stream of the place, so draws do not depend on other places
                draws.append(streams.select([group]).uniform(1, len(answers), self.width))
        return self._sampled(policy, prompts, starts, 1, torch.cat(draws)) if draws else []

    @property
    def width(self) -> int:
        """Maximum number of tokens of a response in a step."""
        return min(self.config.window, self.config.sampler.max_new_tokens)

    def _sampled(
        self,
        policy: VlmPolicy,
        prompts: Sequence[Prompt],
        starts: Sequence[tuple[int, Answer]],
        count: int,
        draws: torch.Tensor,
    ) -> list[SampledRow]:
        """`count` answers from each start, of a group and the beginning of an answer."""
        longest = self.config.sampler.max_new_tokens
        asked = [continued(prompts[group], ids) for group, (ids, _) in starts]
        # at most a window a step, and no answer longer than `max_new_tokens` in all
        limits = [min(self.width, longest - len(ids)) for _, (ids, _) in starts]
        window = dataclasses.replace(self.config.sampler.config, max_new_tokens=self.width)
        drawn = sample(policy, asked, count, window, draws, limits=limits)
        rows = []
        for number, (own, logp) in enumerate(
            zip(token_lists(drawn.response_ids, drawn.mask), drawn.logp.tolist(), strict=True)
        ):
            group, (before, known) = starts[number // count]
            ids, finish = [*before, *own], drawn.finish[number]
            # a model's positions may end an answer before `max_new_tokens`
            room = min(longest, policy.positions - len(prompts[group]))
            # "length" also ends an answer that has used all its room; that one is finished
            unfinished = finish == "length" and len(ids) < room
            rows.append(SampledRow(group, ids, [*known, *logp[: len(own)]], len(own), finish, unfinished))
        return rows

    def _rollouts(
        self, policy: VlmPolicy, prompts: list[Prompt], tasks: list[VlmTask], rows: Sequence[SampledRow]
    ) -> Rollouts:
        shape = (len(rows), max(len(row.ids) for row in rows))
        ids = torch.full(shape, policy.pad_id)
        mask, logp, new = torch.zeros(3, *shape).unbind()
        for number, row in enumerate(rows):
            length = len(row.ids)
            ids[number, :length], logp[number, :length] = torch.tensor(row.ids), torch.tensor(row.logp)
            mask[number, :length], new[number, length - row.new : length] = 1.0, 1.0
        texts = policy.turns.decode([row.ids for row in rows])
        texts = [prompts[row.group].answer_start + text for row, text in zip(rows, texts, strict=True)]
        payload = VlmPayload(prompts, tasks, ids, texts, [row.finish for row in rows])
        extras = {TRUNCATED: torch.tensor([float(row.unfinished) for row in rows]), NEW: new}
        group, missing = torch.tensor([row.group for row in rows]), torch.full((len(rows),), math.nan)
        return Rollouts(group, mask, logp, missing, payload, extras=extras).to(policy.device)

    def completed(self, rollouts: Rollouts, step: Step) -> Rollouts:
        """Rewards of finished responses; 0 for the others."""
        # 0 rather than NaN, which would leave the row untrained
        return rollouts.replace(reward=rollouts.reward.masked_fill(rollouts.extras[TRUNCATED] > 0, 0.0))

    def advantages(self, rollouts: Rollouts, accelerator: Accelerator, step: Step) -> Rollouts:
        """Advantages of the step's tokens; targets of the critic at all tokens of finished responses."""
        whole = rollouts.mask
        new = rollouts.extras[NEW]
        cut = rollouts.extras[TRUNCATED] > 0
        # earlier tokens were trained in the step that sampled them
        found = super().advantages(rollouts.replace(mask=whole * new), accelerator, step)
        # the critic has not yet seen returns of a finished answer's earlier tokens, so it learns all of them
        mask = torch.where(cut[:, None], found.mask, whole)
        gamma = getattr(self.objective.advantage, "gamma", 1.0)
        # as the advantages: a divergence in the reward is part of the return
        to_go = returns_to_go(decision_rewards(self.objective.shaped(rollouts)), whole, gamma)
        assert rollouts.values is not None
        # the value itself as target: the critic learns nothing from unfinished answers
        returns = torch.where(cut[:, None], rollouts.values, to_go) * mask
        # a draw in which another process had no usable question is repeated
        last = max(from_all(max((draw for (draw, _), _ in self.left), default=0)))
        # places are unique over processes, so the same answers follow in every process
        slots = merge_in_order([entry for entry in self.left if entry[0][0] == last])
        self.carried.slots = {place: slot for place, slot in slots if slot[1]}
        self.left.clear()
        continued_rows = (whole * (1 - new)).sum(1) > 0
        self.noted |= {
            "truncated/unfinished": row_metric(cut),
            "truncated/continued": row_metric(continued_rows),
            "truncated/reward_mean": row_metric(rollouts.reward[~cut & rollouts.scored]),
        }
        return found.replace(mask=mask, returns=returns)

    def rollout_state(self, tasks: Sequence[VlmTask]) -> dict[int, Slot]:
        """The unfinished responses."""
        return self.carried.state_dict()

    def load_rollout_state(self, state: Mapping[int, Slot]) -> None:
        """Restore `rollout_state`."""
        self.carried.load_state_dict(state)

    def describe(self) -> str:
        """The objective's formula and the windows."""
        return (
            f"{super().describe()}\nan answer grows by at most {self.config.window} tokens a step; unfinished ones are "
            "carried over, and the critic learns those that have finished"
        )


def places_of(asked: Sequence[object], kept: Sequence[object]) -> list[int]:
    """Positions of the objects that were kept, in order; an object may occur twice."""
    places, number = list[int](), 0
    for one in kept:
        # by identity: a task may be asked at two places
        while asked[number] is not one:
            number += 1
        places.append(number)
        number += 1
    return places
