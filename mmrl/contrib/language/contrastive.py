"""GRACE: the policy is an embedder, and its hidden states reward what it writes about a text (arXiv 2510.04506).

The policy writes answers to a document, the question of the data, and to the row's query and negative document. The
mean of its last hidden states over an answer, normalised, embeds the text. An answer to a document is rewarded by

    (cos(query, document) - cos(query, negative) + agreement * a - apart * b) / temperature,

a its mean cosine to the group's other answers, b the mean over the step's other groups of the largest cosine between
its query and their documents. Without a negative, b is the mean cosine of the document to the other groups' first
queries. Only the answers to documents are trained. The negative's cosine is the same in a whole group, so that it moves
no advantage that compares its rows.

Differences from GasolSun36/GRACE verl/workers/reward_manager/grace.py: it averages the states of the prompt as well,
without its system prompt, here those from which the answer's tokens are predicted; the same reward is added to those of
`rewards`. Constants of train.sh.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from mmrl.core.payload import to_device, to_host
from mmrl.core.rollouts import Rollouts
from mmrl.errors import UserError
from mmrl.fields import bounded, rare
from mmrl.training.objectives import ObjectiveConfig
from mmrl.training.processes import Streams, merge_in_order
from mmrl.training.recipe import Step
from mmrl.vlm.data.prompt import VlmPayload
from mmrl.vlm.data.task import VlmTask
from mmrl.vlm.engine.vlm_policy import VlmPolicy
from mmrl.vlm.engine.vlm_sampler import sample
from mmrl.vlm.methods.augmentation import augment_task
from mmrl.vlm.vlm_config import VlmConfig
from mmrl.vlm.vlm_recipe import VlmRecipe

MAIN, QUERY, NEGATIVE = "document", "query", "negative"
TERM = "contrastive"


@dataclass
class ContrastSettings:
    """Reward from the policy's hidden states."""

    query_key: str = rare(QUERY)
    """Column with the text of the query."""
    negative_key: str = rare(NEGATIVE)
    """Column with a text that does not match the query (a negative); without it, the reward has no negatives."""
    weight: float = bounded(1.0, above=0)
    """Weight of the contrastive reward when it is added to `rewards`."""
    temperature: float = bounded(0.1, above=0)
    """Divisor of the cosines."""
    agreement: float = bounded(0.2, at_least=0)
    """Weight of the cosine similarity to the group's other responses."""
    apart: float = bounded(0.2, at_least=0)
    """Weight of the cosine similarity to other groups."""
    unfinished: float | None = rare(-1.0)
    """Reward of a response that reached `sampler.max_new_tokens`; null = the cosines, as for other responses."""


@dataclass
class ContrastiveConfig(VlmConfig):
    """A GRACE run."""

    contrast: ContrastSettings = field(default_factory=ContrastSettings)
    """Reward from the policy's hidden states."""
    objective: ObjectiveConfig = field(default_factory=lambda: ObjectiveConfig(preset="grace"))
    """Objective that is optimised."""


def contrastive_terms(main: Tensor, query: Tensor, negative: Tensor | None, group: Tensor) -> dict[str, Tensor]:
    """Components of the reward of each response, (B,) each, before weights and temperature; 0 if nothing is compared.

    Args:
        main: (B, H) unit vectors of the answers to documents.
        query: (B, H) of as many answers to the queries.
        negative: (N, H) of the groups' negatives, or None.
        group: (B,) int64, 0..N-1.
    """
    number, rows = int(group.max()) + 1, torch.arange(len(group), device=group.device)
    first = torch.full((number,), len(group), device=group.device).scatter_reduce(0, group, rows, "amin")
    same = (group[:, None] == group).to(main.dtype)
    others = same.sum(1) - 1
    found = {
        "positive": (query * main).sum(1),
        # an answer alone in its group agrees with nothing, and gets 0
        "agreement": ((main @ main.T * same).sum(1) - (main * main).sum(1)) / others.clamp(min=1),
    }
    if negative is None:
        towards = main @ query[first].T
    else:
        found["negative"] = -(query[first] * negative).sum(1)[group]
        # below every cosine, so that the maximum is over real rows
        towards = main.new_full((len(group), number), -2.0)
        towards = towards.scatter_reduce(1, group.expand(len(group), -1), query @ main.T, "amax")
    own = functional.one_hot(group, number).to(main.dtype)
    found["apart"] = -(towards * (1 - own)).sum(1) / max(number - 1, 1)
    return found


class ContrastiveRecipe(VlmRecipe):
    """GRPO, or another objective, with a contrastive reward from the policy's hidden states."""

    config: ContrastiveConfig
    scores_apart = False  # groups are compared with one another

    def __init__(self, config: ContrastiveConfig) -> None:
        super().__init__(config)
        keys = [key for key in (config.contrast.query_key, config.contrast.negative_key) if self._has(key)]
        self.keys = dict(zip((QUERY, NEGATIVE), keys, strict=False))

    def check_data(self) -> None:
        """Reject questions without a query; raises UserError."""
        key = self.config.contrast.query_key
        if not self._has(key):
            raise UserError(
                f"data: question {self.train_tasks[0].id} has no text in column '{key}' (contrast.query_key); columns: "
                f"{', '.join(self.train_tasks[0].columns)}"
            )

    def _has(self, key: str) -> bool:
        return all(isinstance(task.columns.get(key), str) for task in self.train_tasks)

    def rollout(self, policy: VlmPolicy, tasks: Sequence[VlmTask], streams: Streams, step: Step) -> Rollouts:
        """Sample responses to documents, queries and negatives, and embed them."""
        rollouts = super().rollout(policy, tasks, streams, step)
        payload, size = VlmPayload.of(rollouts), self.config.trainer.samples_per_task
        streams = streams.among(tasks, payload.tasks)
        found = {MAIN: pooled(policy, rollouts)}
        for name, key in self.keys.items():
            asked = [task_of_text(task, task.columns[key]) for task in payload.tasks]
            # each document row is compared with one query row; a negative serves its whole group
            rows = self._answers(policy, asked, size if name == QUERY else 1, streams, name)
            self.extra_samples += rows.num_rows
            states = pooled(policy, rows)
            # one a row, as rows are what travels between processes
            found[name] = states if name == QUERY else states[rollouts.group]
        return rollouts.replace(payload=dataclasses.replace(payload, embeddings=found))

    def _answers(
        self, policy: VlmPolicy, tasks: Sequence[VlmTask], size: int, streams: Streams, purpose: str
    ) -> Rollouts:
        prompts = [policy.encode(task) for task in tasks]
        draws = streams.uniform(len(tasks), size, self.config.sampler.max_new_tokens, purpose=purpose)
        drawn = sample(policy, prompts, size, self.config.sampler, draws)
        payload = VlmPayload(prompts, list(tasks), drawn.response_ids, drawn.texts, drawn.finish)
        group = torch.arange(len(tasks), device=drawn.mask.device).repeat_interleave(size)
        return Rollouts(group, drawn.mask, drawn.logp, torch.full_like(drawn.mask[:, 0], torch.nan), payload)

    def completed(self, rollouts: Rollouts, step: Step) -> Rollouts:
        """Add the contrastive reward to the others."""
        settings = self.config.contrast
        payload = VlmPayload.of(rollouts)
        places = rollouts.places or list(range(rollouts.num_groups))
        number = {place: group for group, place in enumerate(places)}
        rows = [torch.nonzero(rollouts.host.group == group).flatten() for group in range(rollouts.num_groups)]
        states = dict(zip(payload.embeddings, to_host(list(payload.embeddings.values())), strict=True))
        parts = [
            (place, (place, {k: v[own] for k, v in states.items()})) for place, own in zip(places, rows, strict=True)
        ]
        # all groups of the step: those of other processes are what a row should be apart from
        everywhere = merge_in_order(parts)
        sizes = torch.tensor([len(part[MAIN]) for _, part in everywhere])
        main, query = (torch.cat([part[name] for _, part in everywhere]) for name in (MAIN, QUERY))
        negative = torch.stack([part[NEGATIVE][0] for _, part in everywhere]) if NEGATIVE in self.keys else None
        terms = contrastive_terms(main, query, negative, torch.arange(len(sizes)).repeat_interleave(sizes))
        total = terms["positive"] + terms.get("negative", 0.0)
        total = (
            total + settings.agreement * terms["agreement"] + settings.apart * terms["apart"]
        ) / settings.temperature
        reward = torch.empty(rollouts.num_rows)
        for (place, _), part in zip(everywhere, total.split(sizes.tolist()), strict=True):
            if place in number:
                reward[rows[number[place]]] = part.to(reward.dtype)
        if settings.unfinished is not None:
            reward[torch.tensor([finish == "length" for finish in payload.finish])] = settings.unfinished
        reward = reward.to(rollouts.reward.device)
        terms_of_rows = rollouts.reward_terms | {TERM: reward}
        return rollouts.replace(reward=rollouts.reward + settings.weight * reward, reward_terms=terms_of_rows)

    def describe(self) -> str:
        """The objective's formula and the reward."""
        settings, negative = self.config.contrast, " - cos(query, negative)" if NEGATIVE in self.keys else ""
        parts = f"cos(query, i){negative} + {settings.agreement:g} cos(i, group) - {settings.apart:g} cos(other groups)"
        factor = f"{settings.weight:g} / {settings.temperature:g}"
        return f"{super().describe()}\nR_i = rewards + {factor} ({parts}), of mean last hidden states"


def task_of_text(task: VlmTask, text: str) -> VlmTask:
    """A question with only this text, after the system turns of a task."""
    system = [turn for turn in task.messages if turn["role"] == "system"]
    turn = {"role": "user", "content": [{"type": "text", "text": text}]}
    return augment_task(task, messages=[*system, turn], images=[], videos=[], image_wh=[])


def pooled(policy: VlmPolicy, rollouts: Rollouts) -> Tensor:
    """Unit vectors (B, H) in the direction of the mean of the states that predict the tokens of each row."""
    with torch.no_grad():
        states = policy.states(rollouts).float()
    # states come row by row under the mask
    row = to_device(torch.nonzero(rollouts.host.mask)[:, 0], states.device)
    return functional.normalize(states.new_zeros(rollouts.num_rows, states.shape[1]).index_add(0, row, states), dim=1)
