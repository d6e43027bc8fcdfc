"""A vision-language model behind an HTTP server as the judge of pictures.

Request and answer are JSON with the picture as PNG in base64; nothing that comes over the network is ever unpickled.
"""

from __future__ import annotations

import base64
import io
import json
import re
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mmrl.errors import UserError

__all__ = ["read_score", "unified_reward"]

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
    """Ask a server for a score of each picture, as UnifiedReward is asked through an OpenAI-compatible endpoint.

    Args:
        prompts: B captions.
        completions: B pictures (H, W, 3) uint8.
        url: address of the server up to /v1, to which /chat/completions is added.
        model: name of the model at the server.
        question: what the model is asked; {prompt} stands for the caption.
        timeout_s: seconds for one answer.

    Returns:
        B numbers from 0 to 1, the score over 5.

    Raises:
        UserError: the address is not http or https, or the question has no {prompt}.
        RuntimeError: the server cannot be reached, or its answer has no score; that is no reward of 0.
        TimeoutError: it took too long.

    Source: UnifiedReward, arXiv 2503.05236; the scale of yifan123/flow_grpo flow_grpo/rewards.py, where a failure
        scores 0.
    """
    if not url.startswith(("http://", "https://")):
        raise UserError(f"unified_reward: url is {url!r}; must start with http:// or https://")
    if "{prompt}" not in question:
        raise UserError("unified_reward: the question must contain {prompt}")
    rewards = []
    for prompt, image in zip(prompts, completions, strict=True):
        asked = _request(model, question.replace("{prompt}", prompt), image)
        rewards.append(read_score(_post(f"{url.rstrip('/')}/chat/completions", asked, timeout_s)))
    return rewards


def read_score(answer: str) -> float:
    """Read the last "Final Score: x" of an answer.

    Args:
        answer: what the model wrote.

    Returns:
        x / 5.

    Raises:
        RuntimeError: there is no score, or it is not between 0 and 5.
    """
    found = FINAL_SCORE.findall(answer)
    if not found:
        raise RuntimeError(f"the answer has no 'Final Score: x': {answer[-200:]!r}")
    score = float(found[-1])
    if not 0.0 <= score <= HIGHEST:
        raise RuntimeError(f"the final score is {score}; must be between 0 and {HIGHEST:.0f}")
    return score / HIGHEST


def _request(model: str, text: str, image: NDArray[np.uint8]) -> dict[str, Any]:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="PNG")
    picture = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
    content = [{"type": "image_url", "image_url": {"url": picture}}, {"type": "text", "text": text}]
    return {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
    }


def _post(url: str, body: dict[str, Any], timeout_s: float) -> str:
    request = urllib.request.Request(
        url, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            answer = json.load(response)
        return str(answer["choices"][0]["message"]["content"])
    except urllib.error.URLError as error:
        if isinstance(error.reason, TimeoutError):
            raise TimeoutError(f"{url} gave no answer within {timeout_s} s") from error
        raise RuntimeError(f"{url} cannot be asked: {error}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise RuntimeError(f"{url} did not answer as a chat endpoint does: {type(error).__name__}: {error}") from error
