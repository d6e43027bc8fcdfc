"""A reward by a rubric: a judge scores a response by the criteria in the column `rubric` of its question.

    rewards:
      - name: rubric
        options: {url: "http://localhost:8000/v1", model: my-judge}

The judge is a model behind an OpenAI-compatible endpoint. The wording of the question is this project's own.

Source: Meta Policy Optimization, arXiv 2504.20157.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from mmrl.hub.chat_endpoint import ask_chat, check_url
from mmrl.rewards.answers import Chat, chat_text, completion_text

JUDGE = (
    "Score a response to a task by a rubric.\n\nTask:\n{task}\n\nResponse:\n{response}\n\nRubric:\n{rubric}\n\n"
    "Explain briefly. Then write the score, from 0 to 10, on a last line of its own."
)


def rubric_reward(
    prompts: Sequence[Chat],
    completions: Sequence[Chat],
    *,
    rubric: Sequence[str],
    url: str,
    model: str,
    max_tokens: int = 1024,
    request_timeout_s: float = 600.0,
    **_: Any,
) -> list[float]:
    """Score from 0 to 1 by a judge that reads the rubric; a verdict without a score is a failed reward.

    Options: `url`, the judge's address up to /v1; `model`, its name there; `max_tokens` and `request_timeout_s` of a
    verdict, in addition to the reward's `timeout_s`.
    """
    check_url(url, "rubric")
    scores = []
    for prompt, completion, text in zip(prompts, completions, rubric, strict=True):
        task = prompt if isinstance(prompt, str) else chat_text(prompt)
        asked = filled(JUDGE, task=task, response=completion_text(completion), rubric=text)
        scores.append(read_score(ask_chat(url, model, asked, max_tokens=max_tokens, timeout_s=request_timeout_s)))
    return scores


def read_score(verdict: str) -> float:
    """The last number of a verdict's last line, from 0 to 10, as a share of 10; raises RuntimeError."""
    lines = verdict.strip().splitlines()
    numbers = re.findall(r"-?\d+(?:\.\d+)?", lines[-1].removesuffix("/10")) if lines else []
    if not numbers or not 0 <= float(numbers[-1]) <= 10:
        raise RuntimeError(f"the verdict's last line has no score from 0 to 10: {verdict[-200:]!r}")
    return float(numbers[-1]) / 10


def filled(template: str, **values: str) -> str:
    """A template with {name} replaced, in one pass: texts may hold braces themselves."""
    return re.sub(r"\{(\w+)\}", lambda match: values.get(match[1], match[0]), template)
