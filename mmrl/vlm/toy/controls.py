"""A reward without a signal: the control for a method's gain from its rewards."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from mmrl.rewards.answers import Chat, exact_reward


def shuffled_exact(prompts: Sequence[Chat], completions: Sequence[Chat], **columns: Any) -> list[float]:
    """The rewards of `exact`, shuffled among the responses of the same batch."""
    return shuffled(exact_reward(prompts, completions, **columns), completions)


def shuffled_environment(
    prompts: Sequence[Chat], completions: Sequence[Chat], environment_reward: Sequence[float], **columns: Any
) -> list[float]:
    """Rewards that the environment gave episodes, shuffled among those of the same step."""
    return shuffled(environment_reward, completions)


def shuffled(rewards: Sequence[float], completions: Sequence[Chat]) -> list[float]:
    """Rewards in an order that follows from the completions."""
    digest = hashlib.blake2b(repr(list(completions)).encode(), digest_size=8).digest()
    order = np.random.default_rng(int.from_bytes(digest)).permutation(len(rewards))
    return [rewards[index] for index in order]
