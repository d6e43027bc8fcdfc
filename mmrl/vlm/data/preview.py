"""Preview of a run's questions for `mmrl train CONFIG --dry-run`: their number, the first one, its answer's rewards.

A reward that expects another form of the answer gives 0 to every response. That shows here, before a model is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mmrl.files import expanded
from mmrl.rewards import RewardConfig
from mmrl.rewards.config import TrainerState
from mmrl.rewards.sum import RewardSum
from mmrl.vlm.data.dataset import DataConfig, load_tasks
from mmrl.vlm.data.task import VlmTask, check_columns, score_texts

FORMS = ("{}", "\\boxed{{{}}}", "<think>why</think>\\boxed{{{}}}", "<think>why</think><answer>{}</answer>")
"""Forms in which the right answer is scored."""
MARKS = ("<think>", "<answer>", "\\boxed")
"""Parts of these forms that a prompt asks for by name."""
SHOWN = 200
"""Characters of a question."""


def preview(config: Any) -> list[str]:
    """Lines on the questions of a run; those that are not on this machine are named and not read.

    Raises:
        UserError: rows that cannot be used, an image that cannot be opened, or a reward that cannot be loaded.
    """
    data = getattr(config, "data", None)
    if not isinstance(data, DataConfig):
        return []
    named = {"data": data} | {f"eval_data.{name}": split for name, split in config.eval_data.items()}
    lines = []
    for name, split in named.items():
        if not expanded(split.path).exists():
            why = "the run builds it" if split.build else "a hub id, or not on this machine; not checked"
            lines.append(f"{name}: {split.path}: {why}")
            continue
        tasks = load_tasks(split).tasks
        lines.append(f"{name}: {split.path}: {len(tasks)} questions")
        if name == "data":
            lines += _first(tasks, getattr(config, "rewards", None) or getattr(config.evaluation, "rewards", []))
    return lines


def _first(tasks: Sequence[VlmTask], rewards: Sequence[RewardConfig]) -> list[str]:
    """The first question, and the rewards of its right answer."""
    task = tasks[0]
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
        check_columns(terms, {"data": tasks})
        found = score_texts(terms, TrainerState(), [task] * len(texts), [text] * len(texts), texts, [[]] * len(texts))
    finally:
        terms.close()
    earned = [
        f"  {text!r} earns " + ", ".join(f"{name} {_shown(values[number])}" for name, values in found.terms.items())
        for number, text in enumerate(texts)
    ]
    return [told, *earned, *_unasked(task, texts, found.total), *(f"  {text}" for text in found.examples.values())]


def _unasked(task: VlmTask, texts: Sequence[str], earned: Sequence[float]) -> list[str]:
    """A line where the form that earns most is one that no part of the prompt asks for."""
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
        f"  {best[missing.index(fewest)]!r} earns most, but the prompt does not mention {' and '.join(fewest)}; unless "
        "the model writes it anyway, ask for it in data.format_prompt or data.system_prompt"
    ]


def _shown(value: float) -> str:
    return f"{value:g}" if value == value else "nothing"
