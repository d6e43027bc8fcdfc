"""Information gains: how much each turn of an episode raised the probability of the task's true answer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from mmrl.agents.environments.agent_tasks import AgentTask
from mmrl.agents.rollout.episodes import Episode
from mmrl.core.blocks.turns import InformationGain
from mmrl.core.payload import to_device
from mmrl.core.rollouts import Rollouts
from mmrl.errors import UserError
from mmrl.vlm.data.prompt import Insert, Prompt, VlmPayload, join_prompts
from mmrl.vlm.data.task import VlmTask
from mmrl.vlm.data.turn_template import MARKUP, encode_text
from mmrl.vlm.engine.rows import split_row
from mmrl.vlm.engine.vlm_policy import VlmPolicy

Score = Callable[[Rollouts], Tensor]
"""Rollouts to the log-probabilities (B, T) of their decisions."""


def check_answers(tasks: Sequence[AgentTask], advantage: InformationGain) -> None:
    """Reject tasks without a true answer; raises UserError."""
    for task in tasks:
        if not isinstance(task.task.get(advantage.entry), str) or not task.task[advantage.entry]:
            raise UserError(
                f"objective.advantage '{advantage.kind}' scores the true answer of each task (entry "
                f"'{advantage.entry}'), but {task.id} has {task.task.get(advantage.entry)!r} there; expected a text"
            )


def add_gains(
    episodes: Sequence[Episode], advantage: InformationGain, policy: VlmPolicy, score: Score, rows: int
) -> None:
    """Set the gains of episodes, `rows` answers at a time; an episode whose answer does not fit ends as overflow."""
    wanted: dict[tuple[int, str], Prompt] = {}
    own: dict[int, list[tuple[int, str]]] = {}
    for number, episode in enumerate(episodes):
        if episode.has_result:
            answer = str(episode.task.task[advantage.entry])
            contexts = list(contexts_before_turns(episode))
            # episodes of a group share the prompt object, so its answer is scored once
            own[number] = [(id(context), answer) for context in contexts]
            wanted |= dict(zip(own[number], contexts, strict=True))
    found: dict[tuple[int, str], float] = {}
    distinct = list(wanted)
    for start in range(0, len(distinct), rows):
        keys = distinct[start : start + rows]
        values = _score_answers([(wanted[key], key[1]) for key in keys], advantage, policy, score)
        found |= dict(zip(keys, values, strict=True))
    for number, keys in own.items():
        values, episode = [found[key] for key in keys], episodes[number]
        if any(map(math.isnan, values)):
            episode.ending = "overflow"
            episode.overflows = True
            episode.reason = f"the true answer of {episode.task.id} does not fit"
        episode.gains = [after - before for before, after in itertools.pairwise(values)]


def contexts_before_turns(episode: Episode) -> Iterator[Prompt]:
    """The conversation that the agent read before each of its turns."""
    steps = episode.trajectory
    assert episode.prompt is not None
    yield episode.prompt
    # the last assignment wins: the first sampled token of each turn
    first = {turn: index for index, turn in reversed([*enumerate(steps.turn)]) if steps.sampled[index]}
    for turn in range(1, steps.turns):
        end = first[turn]
        start = 0
        prompt = episode.prompt
        for context in steps.contexts:
            if context.start <= end:
                start, prompt = context.start, context.prompt
        inserts = [Insert(x.start - start, x.prompt) for x in steps.inserts if start <= x.start < end]
        yield join_prompts([prompt, *split_row(torch.tensor(steps.ids[start:end], dtype=torch.int64), inserts)])


def _score_answers(
    asked: Sequence[tuple[Prompt, str]], advantage: InformationGain, policy: VlmPolicy, score: Score
) -> list[float]:
    """Mean log-probability of each answer's tokens after its prompt, or its exponential; NaN if it does not fit."""
    tokenizer = policy.processor.tokenizer
    # the words before the answer are given, only the answer's tokens count
    front = encode_text(advantage.before, tokenizer, MARKUP)
    rows = [[*front, *encode_text(answer, tokenizer, MARKUP)] for _, answer in asked]
    rows = [
        # kept as an empty row, so that results stay aligned
        row if len(prompt) + len(row) <= policy.positions else []
        for (prompt, _), row in zip(asked, rows, strict=True)
    ]
    width = max(1, *map(len, rows))
    ids = torch.tensor([[*row, *[policy.pad_id] * (width - len(row))] for row in rows])
    place = torch.arange(width)
    ends = torch.tensor([len(row) for row in rows])
    mask = ((place >= len(front)) & (place < ends[:, None])).float()
    names = [""] * len(asked)
    payload = VlmPayload([prompt for prompt, _ in asked], [VlmTask("answer", [])] * len(asked), ids, names, names)
    answers = Rollouts(torch.arange(len(asked)), mask, torch.zeros_like(mask), torch.zeros(len(asked)), payload)
    with torch.no_grad():
        logp = score(answers.to(policy.device)).cpu().double()
    mean = logp.sum(1) / mask.sum(1)  # 0 / 0 where the answer does not fit
    return (mean if advantage.log else mean.exp()).tolist()


def tabulate_gains(episodes: Sequence[Episode], like: Tensor) -> Tensor:
    """(B, T), the gains of episodes at the last token of each turn."""
    table = torch.zeros(like.shape, dtype=like.dtype)
    for row, episode in enumerate(episodes):
        index = episode.trajectory.last_tokens()[: len(episode.gains)]
        table[row, index] = torch.tensor(episode.gains, dtype=like.dtype)
    return to_device(table, like.device)
