"""Data of responses that some estimators need: where their code begins, and their budgets of tokens."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mmrl.errors import UserError
from mmrl.vlm.data.task import VlmTask

CODE_MARKS = ("```", "<tool_call>")
"""Texts with which code or the call of a tool begins."""
BUDGET = "budget"
"""Column with a question's budget of tokens."""
USUAL_BUDGET = 4096
"""Budget of a question that states none, as in ZJU-REAL/HBPO rllm/rewards/math_reward.py."""


def row_extras(
    needs: Collection[str],
    tasks: Sequence[VlmTask],
    tokens: Sequence[list[int]],
    decode: Callable[[list[int]], str],
) -> dict[str, Tensor]:
    """Entries (B,) of `Rollouts.extras` for what an objective needs.

    Args:
        needs: names of needs; those of other parts are left alone.
        tasks: question of each response.
        tokens: its tokens, without padding.
        decode: tokens to text.
    """
    found = {}
    if "code_starts" in needs:
        found["code_start"] = torch.tensor([code_start(row, decode) for row in tokens])
    if "budgets" in needs:
        found["budget"] = torch.tensor([int(task.columns.get(BUDGET) or USUAL_BUDGET) for task in tasks])
    return found


def code_start(tokens: list[int], decode: Callable[[list[int]], str]) -> int:
    """Index of the token with which the first code block or call of a tool of a response is complete; -1 without."""

    def coded(length: int) -> bool:
        text = decode(tokens[:length])
        return any(mark in text for mark in CODE_MARKS)

    if not coded(len(tokens)):
        return -1
    return bisect.bisect_left(range(1, len(tokens) + 1), True, key=coded)


def with_budgets(tasks: Sequence[VlmTask], budgets: Sequence[int]) -> list[VlmTask]:
    """Each question once for each budget of tokens, which is asked for at its end and kept as its column `budget`."""
    if not budgets:
        return list(tasks)
    if min(budgets) < 1:
        raise UserError(f"data.budgets holds {min(budgets)}; a budget is at least 1 token")
    return [_with_budget(task, budget) for task in tasks for budget in budgets]


def _with_budget(task: VlmTask, budget: int) -> VlmTask:
    text = {"type": "text", "text": f"\n\nAnswer the question with {budget} tokens."}
    *earlier, last = task.messages
    messages = [*earlier, {**last, "content": [*last["content"], text]}]
    return replace(task, id=f"{task.id} ({budget} tokens)", messages=messages, columns=task.columns | {BUDGET: budget})
