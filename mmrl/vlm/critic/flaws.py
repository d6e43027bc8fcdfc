r"""Rewards from a judge: FAPO's, which finds wrong steps in correct answers, and rubric scores.

    rewards:
      - name: flawless
        options: {url: "http://localhost:8000/v1", model: FAPO-GenRM-4B, check: number}

The judge is a model behind an OpenAI-compatible endpoint, which is asked about right answers only. It names the first
wrong step in a box, or -1. What cannot be read counts as a failed reward; the released code takes it for flawless. The
wording of the question is this project's own.

Source: FAPO, arXiv 2510.22543; yyDing1/FAPO fapo/fapo_reasoning/reward_fn.py.

A reward by a rubric: a judge scores a response by the criteria in the column `rubric` of its question.

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

from mmrl.errors import UserError
from mmrl.hub.chat_endpoint import ask_chat, check_url
from mmrl.rewards.answers import Chat, boxes, chat_text, completion_text
from mmrl.rewards.budget import right_answers

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
    """Score from 0 to 1 by a judge that reads the rubric; a verdict without a score counts as a failed reward.

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
    """The last number in a verdict's last line, from 0 to 10, as a fraction of 10; raises RuntimeError."""
    lines = verdict.strip().splitlines()
    numbers = re.findall(r"-?\d+(?:\.\d+)?", lines[-1].removesuffix("/10")) if lines else []
    if not numbers or not 0 <= float(numbers[-1]) <= 10:
        raise RuntimeError(f"the verdict's last line has no score from 0 to 10: {verdict[-200:]!r}")
    return float(numbers[-1]) / 10


def filled(template: str, **values: str) -> str:
    """A template with {name} replaced, in one pass, because texts may contain braces themselves."""
    return re.sub(r"\{(\w+)\}", lambda match: values.get(match[1], match[0]), template)


FIELDS = ("problem", "answer", "solution")
QUESTION = (
    "A problem, its right answer and a solution in steps follow.\n\nProblem:\n{problem}\n\nRight answer:\n{answer}\n\n"
    "Solution:\n{solution}\n\nCheck the solution step by step. Put the index of the first wrong step, counted from 0, "
    "into \\boxed{}; if all steps are right, put -1 into it."
)


def flawless_reward(
    prompts: Sequence[Chat],
    completions: Sequence[Chat],
    *,
    answer: Sequence[Any],
    url: str,
    model: str,
    check: str = "exact",
    penalty: float = 1.0,
    question: str = QUESTION,
    max_tokens: int = 16384,
    request_timeout_s: float = 600.0,
    **options: Any,
) -> list[float]:
    """Give 1 to correct answers, 1 - penalty to correct answers with a wrong step, and -1 to incorrect answers.

    Options: `url`, the judge's address up to /v1; `model`, its name there; `check`, the reward that says whether an
    answer is right, which gets the further options; `question`, with placeholders {problem}, {answer} and
    {solution}; `max_tokens` and `request_timeout_s` of a verdict, in addition to the reward's `timeout_s`.
    """
    check_url(url, "flawless")
    if missing := [name for name in FIELDS if f"{{{name}}}" not in question]:
        raise UserError(f"flawless: the question must contain {{{missing[0]}}}")
    right = right_answers("flawless", check, prompts, completions, answer=answer, **options)
    rewards = []
    for prompt, completion, gold, one in zip(prompts, completions, answer, right, strict=True):
        if one != 1:
            rewards.append(-1.0)
            continue
        texts = (prompt if isinstance(prompt, str) else chat_text(prompt), str(gold), completion_text(completion))
        asked = question
        for name, text in zip(FIELDS, texts, strict=True):
            asked = asked.replace(f"{{{name}}}", text)
        verdict = ask_chat(url, model, asked, max_tokens=max_tokens, timeout_s=request_timeout_s)
        rewards.append(1.0 - penalty if first_wrong_step(verdict) >= 0 else 1.0)
    return rewards


def first_wrong_step(verdict: str) -> int:
    r"""Index of the first wrong step in the last \boxed{} of a verdict, -1 for none; raises RuntimeError."""
    found = boxes(verdict)
    try:
        return int(found[-1].strip())
    except (IndexError, ValueError):
        raise RuntimeError(f"the verdict has no \\boxed{{step index}}: {verdict[-200:]!r}") from None
