"""The arms of `python -m benchmarks vlm --only turns`: savings of continuing from a conversation's history.

The episodes are made up: every turn answers with the same number of tokens, and is followed by an image. "again" reads
the whole conversation in every turn, in sampling and in the update, as trainers do whose rows are single turns.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from benchmarks import measure
from benchmarks.harness import check
from benchmarks.measure import repeat
from benchmarks.vlm.arms import make_recipe
from benchmarks.vlm.workload import shape_of
from mmrl.agents.rollout.episodes import Trajectory, tabulate_tokens
from mmrl.agents.rollout.turns import TurnSampler
from mmrl.core.rollouts import Rollouts
from mmrl.vlm.data.prompt import VlmPayload, join_prompts
from mmrl.vlm.data.task import VlmTask
from mmrl.vlm.engine.rows import text_prompt
from mmrl.vlm.vlm_recipe import VlmRecipe

CHUNK = 6
"""Rows of single turns per pass; more would not fit in memory."""
TOLERANCE = 1e-5
"""Maximum difference of a log-probability between the arms, in nats."""


def sample_arm(options: dict[str, Any]) -> dict[str, Any]:
    """Sample all turns of a group's episodes; with the option `again` each turn reads its whole conversation."""
    with make_recipe(options) as recipe:
        drawn: list[Rollouts] = []

        def once(watch: measure.Stopwatch) -> None:
            drawn.append(_converse(recipe, options))
            recipe.policy.features.clear()

        found = repeat(once, options["repetitions"], options["device"])
    return found | {"counts": {"sampled_tokens": float(drawn[0].mask.sum())}}


def update_arm(options: dict[str, Any]) -> dict[str, Any]:
    """Forward and backward pass of a group's log-probabilities; with `again` each turn is a separate row."""
    with make_recipe(options) as recipe:
        whole = _converse(recipe, options)
        rollouts = turn_rows(whole) if options["anew"] else whole
        differences: list[float] = []

        def once(watch: measure.Stopwatch) -> None:
            for chunk in rollouts.micro_batches(CHUNK if options["anew"] else rollouts.num_rows):
                with watch.stage("forward"):
                    logp = recipe.policy(chunk).logp
                with watch.stage("backward"):
                    (logp.sum() / rollouts.mask.sum()).backward()
                differences.append(float((logp.detach() - chunk.logp_old * chunk.mask).abs().max()))
            recipe.policy.zero_grad(set_to_none=True)

        found = repeat(once, options["repetitions"], options["device"])
    limit = TOLERANCE if options["device"] == "cpu" else 0.5
    return found | {"checks": {"logp of sampling": check(max(differences), limit)}}


def turn_rows(rollouts: Rollouts) -> Rollouts:
    """Episodes without a window as rows of single turns, each after its whole conversation."""
    payload = VlmPayload.of(rollouts)
    prompts, ids, logp = [], [], []
    for row, inserts in enumerate(payload.inserts):
        parts, start = [payload.prompts[int(rollouts.group[row])]], 0
        length = int((rollouts.turn[row] >= 0).sum()) if rollouts.turn is not None else 0
        for stop, behind in [*((insert.start, insert) for insert in inserts), (length, None)]:
            own = payload.response_ids[row, start:stop]
            prompts.append(dataclasses.replace(join_prompts(parts)))
            ids.append(own)
            logp.append(rollouts.logp_old[row, start:stop])
            if behind is not None:
                parts, start = [*parts, text_prompt(own.cpu()), dataclasses.replace(behind.prompt)], behind.stop
    table = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    sizes = torch.tensor([len(own) for own in ids], device=table.device)
    mask = (torch.arange(table.shape[1], device=table.device) < sizes[:, None]).float()
    count = len(prompts)
    tasks = [VlmTask(str(number), []) for number in range(count)]
    return Rollouts(
        group=torch.arange(count, device=table.device),
        mask=mask,
        logp_old=torch.nn.utils.rnn.pad_sequence(logp, batch_first=True),
        reward=torch.zeros(count, device=table.device),
        payload=VlmPayload(prompts, tasks, table, [""] * count, ["length"] * count),
    )


def _converse(recipe: VlmRecipe, options: dict[str, Any]) -> Rollouts:
    """Episodes of a group, with an image a turn."""
    shape, policy = shape_of(options["shape"]), recipe.policy
    _, prompts = recipe.encode(policy, recipe.train_tasks[:1])
    part = policy.encode_turn(recipe.train_tasks[1 % len(recipe.train_tasks)], answered=False)  # no answer has an end
    rows = torch.arange(shape.group)
    trajectories = [Trajectory() for _ in range(shape.group)]
    turns = TurnSampler(policy, recipe.config.sampler, shape.group, reread=options["anew"])
    turns.begin(rows, prompts, torch.zeros_like(rows))
    generator = torch.Generator().manual_seed(0)
    for turn in range(options["turns"]):
        if options["anew"]:
            policy.features.clear()
        drawn = turns.sample(rows, torch.rand(shape.group, shape.completion, generator=generator))
        for row, trajectory in enumerate(trajectories):
            trajectory.add_turn(drawn.response_ids[row].tolist(), drawn.logp[row].tolist())
        if turn + 1 < options["turns"]:
            parts = [dataclasses.replace(part) for _ in trajectories]
            for trajectory, given in zip(trajectories, parts, strict=True):
                trajectory.add_given(given)
            turns.extend(rows, parts)
    table = tabulate_tokens(trajectories, policy.pad_id)
    count, tasks = len(trajectories), [VlmTask("0", [])]
    payload = VlmPayload(list(prompts), tasks, table.ids, [""] * count, ["length"] * count, inserts=table.inserts)
    rollouts = Rollouts(
        group=torch.zeros(count, dtype=torch.int64),
        mask=table.mask,
        logp_old=table.logp,
        reward=torch.zeros(count),
        payload=payload,
        turn=table.turn,
    )
    return rollouts.to(policy.device)
