"""A vision-language model behind an HTTP server as the judge of images."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmrl.errors import UserError
from mmrl.hub.chat_endpoint import ask_chat, check_url

HIGHEST = 5.0
MAX_TOKENS = 512
QUESTION = (
    "You are given a picture that was generated for this prompt: {prompt}\n"
    "Judge how well the picture shows what the prompt asks for and how good it looks. Explain briefly, then end with "
    "a line 'Final Score: x', where x is a number from 1 (worst) to 5 (best)."
)
FINAL_SCORE = re.compile(r"Final Score:\s*\**\s*(-?\d+(?:\.\d+)?)", re.IGNORECASE)


def unified_reward(
    prompts: Sequence[str],
    completions: Sequence[NDArray[np.uint8]],
    *,
    url: str,
    model: str = "UnifiedReward",
    question: str = QUESTION,
    timeout_s: float = 60.0,
    **_: Any,
) -> list[float]:
    """Ask an OpenAI-compatible server, such as one for UnifiedReward, to score each image.

    Options: `url`, address of the server up to /v1; `model`, name of the model there; `question`, in which {prompt} is
    replaced by the caption; `timeout_s`, seconds from the connection to the last byte of the answer.

    Source: UnifiedReward, arXiv 2503.05236; the scale of yifan123/flow_grpo flow_grpo/rewards.py, where a failure
        scores 0.
    """
    check_url(url, "unified_reward")
    if "{prompt}" not in question:
        raise UserError("unified_reward: the question must contain {prompt}")
    rewards = []
    for prompt, image in zip(prompts, completions, strict=True):
        asked = question.replace("{prompt}", prompt)
        rewards.append(read_score(ask_chat(url, model, asked, [image], max_tokens=MAX_TOKENS, timeout_s=timeout_s)))
    return rewards


def read_score(answer: str) -> float:
    """Read the last "Final Score: x" in a response."""
    found = FINAL_SCORE.findall(answer)
    if not found:
        raise RuntimeError(f"the response has no 'Final Score: x': {answer[-200:]!r}")
    score = float(found[-1])
    if not 0.0 <= score <= HIGHEST:
        raise RuntimeError(f"the final score is {score}; must be between 0 and {HIGHEST:.0f}")
    return score / HIGHEST
