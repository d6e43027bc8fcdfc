"""Reward for an answer that equals the right one as text, and the penalty for long responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmrl.rewards.answers import Chat, gold_text, normalise, read_answer


def exact_reward(
    prompts: Sequence[Chat],
    completions: Sequence[Chat],
    *,
    answer: Sequence[Any],
    require_block: bool = True,
    **_: Any,
) -> list[float]:
    r"""Give 1 when the answer equals the right one, apart from case, width, spaces and closing punctuation."""
    rewards = []
    for prompt, completion, gold in zip(prompts, completions, answer, strict=True):
        right = {normalise(gold_text(one)) for one in (gold if isinstance(gold, list | tuple) else [gold])}
        if not right or "" in right:
            raise ValueError(f"the right answer {gold!r} is empty")
        found = read_answer(completion, prompt, require_block=require_block)
        rewards.append(float(found is not None and normalise(found) in right))
    return rewards


def overlong_penalty(
    prompts: Sequence[Chat],
    completions: Sequence[Chat],
    *,
    completion_lengths: Sequence[int],
    max_tokens: int,
    buffer_tokens: int,
    **_: Any,
) -> list[float]:
    """Take up to 1 from responses that come close to the length limit.

    0 up to max_tokens - buffer_tokens, falling linearly to -1 at max_tokens.

    Source: DAPO (arXiv 2503.14476), equation 13.
    """
    if not 0 < buffer_tokens <= max_tokens:
        raise ValueError(f"overlong: buffer_tokens {buffer_tokens} is not in 1..max_tokens ({max_tokens})")
    start = max_tokens - buffer_tokens
    return [-min(1.0, max(0.0, (int(length) - start) / buffer_tokens)) for length in completion_lengths]
