"""Preview of a run's questions for `mmrl train CONFIG --dry-run`: their number, the first one, its answer's rewards.

A reward that expects another form of the answer gives 0 to every response. That shows here, before a model is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mmrl.rewards import RewardConfig
from mmrl.rewards.reward_config import TrainerState
from mmrl.rewards.sum import RewardSum
from mmrl.vlm.data.task import VlmTask, score_texts

FORMS = ("{}", "\\boxed{{{}}}", "<think>why</think>\\boxed{{{}}}", "<think>why</think><answer>{}</answer>")
"""Formats in which the correct answer is scored."""
MARKS = ("<think>", "<answer>", "\\boxed")
"""Parts of these formats that a prompt must mention."""
SHOWN = 200
"""Maximum characters of a question to show."""


def preview(config: Any, recipe: Any) -> list[str]:
    """Lines about the questions that a recipe has read.

    Raises:
        UserError: an image that cannot be opened, or a reward that cannot be loaded.
    """
    first: Any = recipe.train_tasks[0]
    rewards = getattr(config, "rewards", None) or getattr(config.evaluation, "rewards", [])
    lines = [f"data: {config.data.path}: {len(recipe.train_tasks)} questions"]
    lines += _first(first if isinstance(first, VlmTask) else first.task, rewards)
    held_out = recipe.eval_tasks.items()
    return lines + [
        f"eval_data.{name}: {config.eval_data[name].path}: {len(tasks)} questions" for name, tasks in held_out
    ]


def _first(task: VlmTask, rewards: Sequence[RewardConfig]) -> list[str]:
    """The first question, and the rewards of its correct answer."""
    text = " ".join(item["text"] for turn in task.messages for item in turn["content"] if "text" in item)
    sizes = [f"image {image.width} x {image.height}" for image in task.load_images()]
    shown = ", ".join([*sizes, *(["a video"] * len(task.videos)), repr(text[:SHOWN])])
    answer = task.columns.get("answer")
    told = f"  the first: {shown}" + ("" if answer is None else f", answer {answer!r}")
    if not rewards or any("url" in reward.options for reward in rewards):
        return [told]
    texts = [""] if answer is None else [form.format(answer) for form in FORMS]  # without one: does the function run?
    terms = RewardSum(rewards, workers=1)
    try:
        found = score_texts(terms, TrainerState(), [task] * len(texts), texts, [[]] * len(texts))
    finally:
        terms.close()
    earned = [
        f"  {repr(text) if text else 'an empty response'} earns "
        + ", ".join(f"{name} {_shown(values[number])}" for name, values in found.terms.items())
        for number, text in enumerate(texts)
    ]
    return [told, *earned, *_unasked(task, texts, found.total), *(f"  {text}" for text in found.examples.values())]


def _unasked(task: VlmTask, texts: Sequence[str], earned: Sequence[float]) -> list[str]:
    """A line of advice if the answer format that earns most is not mentioned in the prompt; else none."""
    values = [value if value == value else -math.inf for value in earned]
    if not max(values) > values[0]:
        return []
    asked = "".join(item.get("text", "") for turn in task.messages for item in turn["content"])
    best = [text for text, value in zip(texts, values, strict=True) if value == max(values)]
    missing = [[mark for mark in MARKS if mark in text and mark not in asked] for text in best]
    fewest = min(missing, key=len)
    if not fewest:
        return []
    return [
        f"  {best[missing.index(fewest)]!r} earns the highest reward, but the prompt does not mention "
        f"{' and '.join(fewest)}; unless the model writes it anyway, ask for it in data.format_prompt or "
        "data.system_prompt"
    ]


def _shown(value: float) -> str:
    return f"{value:g}" if value == value else "nothing"
