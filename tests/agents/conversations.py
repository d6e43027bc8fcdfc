"""Conversations of several turns with an image each, sampled from a tiny model."""

from collections.abc import Sequence
from typing import Any

import torch

from mmrl.agents.rollout.episodes import Trajectory, tabulate_tokens
from mmrl.agents.rollout.turns import TurnSampler
from mmrl.core.rollouts import Rollouts
from mmrl.vlm.data.prompt import Prompt, VlmPayload, join_prompts
from mmrl.vlm.engine.rows import split_row, text_prompt
from mmrl.vlm.engine.vlm_policy import VlmPolicy
from mmrl.vlm.engine.vlm_sampler import SamplerConfig
from tests.vlm.builders import make_task

SIZES = [(64, 64), (64, 96), (128, 64)]


def observation(policy: VlmPolicy, row: int, turn: int, answered: bool) -> Prompt:
    """Observation of a row and turn: an image of its own size, and no image in some turns."""
    sizes = [] if (row + turn) % 4 == 3 else [SIZES[(row + turn) % 3]]
    task = make_task(f"{row}-{turn}", "What is the sum? " * (1 + (row + turn) % 2), sizes)
    return policy.encode_turn(task, answered=answered)


def converse(
    policy: VlmPolicy,
    group: Sequence[int],
    turns: int,
    *,
    reread: bool = False,
    engine: Any = None,
    restart_at: int | None = None,
    seed: int = 0,
    **options,
) -> Rollouts:
    """Sample conversations: row i follows the prompt of group[i] and has `turns` turns, odd rows one fewer."""
    config = SamplerConfig(**{"max_new_tokens": 6, "temperature": 2.0} | options)
    prompts = [policy.encode(make_task(f"group-{n}", "Sum? " * (n + 1), [SIZES[n % 3]])) for n in range(max(group) + 1)]
    rows = [Trajectory() for _ in group]
    finish = [""] * len(group)
    sampler = TurnSampler(policy, config, len(group), reread=reread, engine=engine)
    live = torch.arange(len(group))
    sampler.begin(live, prompts, torch.tensor(list(group)))
    generator = torch.Generator().manual_seed(seed)
    for turn in range(turns):
        uniforms = torch.rand(len(group), config.max_new_tokens, generator=generator)
        drawn = sampler.sample(live, uniforms[live])
        for place, row in enumerate(live.tolist()):
            length = int(drawn.mask[place].sum())
            rows[row].add_turn(drawn.response_ids[place, :length].tolist(), drawn.logp[place, :length].tolist())
            finish[row] = drawn.finish[place]
        over = [row for row in live.tolist() if turn + 1 == turns - row % 2]
        sampler.drop(torch.tensor(over, dtype=torch.int64))
        live = torch.tensor([row for row in live.tolist() if row not in over], dtype=torch.int64)
        if not len(live):
            break
        end = policy.processor.tokenizer.eos_token_id
        parts = {row: observation(policy, row, turn, rows[row].ids[-1] == end) for row in live.tolist()}
        if turn + 1 == restart_at:
            for row, part in parts.items():
                asked = join_prompts(
                    [prompts[group[row]], *split_row(torch.tensor(rows[row].ids), rows[row].inserts), part]
                )
                cut = join_prompts([prompts[group[row]], part]) if row % 3 else asked
                rows[row].restart(cut)
            new = [rows[row].contexts[-1].prompt for row in parts]
            sampler.begin(live, new, torch.arange(len(live)))
        else:
            for row, part in parts.items():
                rows[row].add_given(part)
            sampler.extend(live, list(parts.values()))
    return as_rollouts(policy, prompts, rows, group, finish)


def as_rollouts(policy, prompts, rows, group, finish) -> Rollouts:
    table = tabulate_tokens(rows, policy.pad_id)
    tasks = [make_task(f"group-{n}", "Sum?") for n in range(len(prompts))]
    payload = VlmPayload(
        prompts, tasks, table.ids, [""] * len(rows), finish, inserts=table.inserts, contexts=table.contexts
    )
    return Rollouts(
        group=torch.tensor(list(group)),
        mask=table.mask,
        logp_old=table.logp,
        reward=torch.zeros(len(rows)),
        payload=payload,
        turn=table.turn,
    )


def one_row_a_turn(rollouts: Rollouts) -> tuple[Rollouts, list[tuple[int, int]]]:
    """The same decisions with every turn as a separate row after the whole conversation before it.

    Returns:
        The rows, and for each the row of `rollouts` and the place of its first token there.
    """
    payload = VlmPayload.of(rollouts)
    prompts, responses, masks, places = [], [], [], []
    for row in range(rollouts.num_rows):
        first, parts, place = 0, [payload.prompts[int(rollouts.group[row])]], 0
        inserts = {insert.start: insert for insert in payload.inserts[row]}
        contexts = {context.start: context for context in payload.contexts[row]}
        length = int((rollouts.turn[row] >= 0).sum())
        while place < length:
            if place in contexts:
                parts = [contexts[place].prompt]
            if place in inserts:
                parts.append(inserts[place].prompt)
                place = inserts[place].stop
            turn, first = rollouts.turn[row, place], place
            ends = {length, *inserts, *contexts, *(rollouts.turn[row] > turn).nonzero().flatten().tolist()}
            place = min(end for end in ends if end > first)
            ids = payload.response_ids[row, first:place]
            prompts.append(join_prompts(parts))
            responses.append(ids)
            masks.append(rollouts.mask[row, first:place])
            places.append((row, first))
            parts = [*parts, text_prompt(ids)]
    pad = torch.nn.utils.rnn.pad_sequence
    tasks = [make_task(f"row-{n}", "Sum?") for n in range(len(prompts))]
    ids = pad(responses, batch_first=True)
    payload = VlmPayload(prompts, tasks, ids, [""] * len(prompts), ["eos"] * len(prompts))
    mask = pad(masks, batch_first=True)
    zeros = torch.zeros(len(prompts))
    return Rollouts(torch.arange(len(prompts)), mask, torch.zeros_like(mask), zeros, payload), places
