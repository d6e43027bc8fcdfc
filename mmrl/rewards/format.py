"""Reward for the shape of a response: think first, then answer."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from mmrl.rewards.answers import Chat, boxes, completion_text

STYLES = ("answer_tags", "boxed")
TAGS = {
    "answer_tags": ("<think>", "</think>", "<answer>", "</answer>"),
    "boxed": ("<think>", "</think>"),
}


def format_reward(
    prompts: Sequence[Any],
    completions: Sequence[Chat],
    *,
    style: str = "answer_tags",
    rule: str = "one_block",
    open_think: bool = False,
    **_: Any,
) -> list[float]:
    r"""Give 1 to a think block followed by an answer, 0 to everything else.

    Source: hiyouga/EasyR1 examples/reward_function/{math,r1v}.py and MikeWangWZHL/PAPO (fullmatch);
        Indolent-Kawhi/View-R1 examples/scripts/reward_func.py (one_block).
    """
    if style not in STYLES:
        raise ValueError(f"format: style is {style!r}; expected one of {', '.join(STYLES)}")
    if rule not in RULES:
        raise ValueError(f"format: rule is {rule!r}; expected one of {', '.join(RULES)}")
    texts = [completion_text(completion) for completion in completions]
    return [float(RULES[rule]("<think>" + text if open_think else text, style)) for text in texts]


def _fullmatch(text: str, style: str) -> bool:
    r"""Decide EasyR1's expressions by searching, because matching them can take cubic time.

    answer_tags: <think>.*?</think>\s*<answer>.*?</answer>
    boxed, after removing whitespace around <, > and /: <think>.*</think>.*\boxed{.*}.*
    """
    if style == "boxed":
        index = 0
        text = _tighten(text)
        for part in ("<think>", "</think>", "\\boxed{", "}"):
            found = text.find(part, index)
            if found < 0 or (part == "<think>" and found > 0):
                return False
            index = found + len(part)
        return True
    middle = re.compile(r"</think>\s*<answer>").search(text, len("<think>"))
    if not text.startswith("<think>") or middle is None:
        return False
    return text.endswith("</answer>") and len(text) - len("</answer>") >= middle.end()


def _tighten(text: str) -> str:
    """Remove whitespace around <, > and /."""
    first, *parts = re.split(r"([<>/])", text)
    if not parts:
        return text
    return "".join([first.rstrip(), *(part.strip() for part in parts[:-1]), parts[-1].lstrip()])


def _one_block(text: str, style: str) -> bool:
    return _around(text, style) is not None


def _strict(text: str, style: str) -> bool:
    around = _around(text, style)
    return around is not None and not "".join(around).strip()


def _around(text: str, style: str) -> tuple[str, str] | None:
    """Return the text before the think block and after the answer block, None when they are not as wanted."""
    indices = [text.find(tag) for tag in TAGS[style]]
    if -1 in indices or indices != sorted(indices) or any(text.count(tag) != 1 for tag in TAGS[style]):
        return None
    before, _, rest = text.partition("<think>")
    thought, _, rest = rest.partition("</think>")
    if not thought:
        return None
    if style == "boxed":
        found = boxes(rest)
        return (before, "") if rest.count("\\boxed") == 1 and found and found[0].strip() else None
    gap, _, rest = rest.partition("<answer>")
    answer, _, after = rest.partition("</answer>")
    return None if gap.strip() or not answer.strip() else (before, after)


RULES: dict[str, Callable[[str, str], bool]] = {
    "one_block": _one_block,
    "strict": _strict,
    "fullmatch": _fullmatch,
}
