"""Reward for the letter of a multiple-choice answer."""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from mmrl.rewards.answers import (
    MAX_ANSWER_CHARS,
    Chat,
    completion_text,
    final_answer,
    final_part,
    gold_text,
    has_answer_marks,
    without_prompt,
)

MENTION = re.compile(r"(?<![\w'’\-])([A-Z])(?![\w'’\-])")
CONNECTOR = r"(?:or|and|nor|to|vs|through|then|else|also|maybe|perhaps)"
# "A dog", but not "A or B": an article is followed by a word of the sentence, not by a connector or a verb.
ARTICLE = re.compile(
    rf"[AI]\s+(?!(?:{CONNECTOR}|is|was|not|but|because|since|as|would|seems|looks|has|for|with)\b)[a-z]"
)
JOINT = re.compile(rf"[\s).,;:/&|(\[\]*+]*{CONNECTOR}?[\s).,;:/&|(\[\]*+]*", re.IGNORECASE)
LEADING = re.compile(r"[\s(\[*]*([A-Z])\s*[.):\]*]")
PHRASE = re.compile(r"(?:answer|option|choice)\s*(?:is|:|=)?[\s:(\[*]*([A-Z])(?![\w'’\-])", re.IGNORECASE)
GOLD = re.compile(r"[(\[]?\s*([A-Za-z])\s*[)\].:]*(?:\s.*)?", re.DOTALL)


def choice_reward(
    prompts: Sequence[Chat],
    completions: Sequence[Chat],
    *,
    answer: Sequence[Any],
    letters: str = "ABCDEFGH",
    require_block: bool = False,
    **_: Any,
) -> list[float]:
    r"""Give 1 when the response settles on the right letter and on no other.

    The letter is looked for in the answer block, else in \boxed{...}, else (unless `require_block`) in the
    text after the thinking. A response that repeats the question or lists several options gets 0.

    Source: Indolent-Kawhi/View-R1 examples/scripts/reward_func.py (the letter occurs, no other letter does).
    """
    wanted = [_gold_letter(gold, letters) for gold in answer]
    return [
        float(find_choice(completion_text(completion), prompt, letters, require_block) == gold)
        for prompt, completion, gold in zip(prompts, completions, wanted, strict=True)
    ]


def find_choice(text: str, prompt: Chat, letters: str, require_block: bool) -> str | None:
    """Return the one letter a response settles on, None without one or with several."""
    text = without_prompt(text, prompt)
    block = final_answer(text)
    if block is not None:
        return _read_letter(block, letters, in_block=True)
    part = final_part(text)
    if require_block or has_answer_marks(text) or part is None or len(part.strip()) > MAX_ANSWER_CHARS:
        return None
    return _read_letter(part, letters, in_block=False)


def _read_letter(text: str, letters: str, *, in_block: bool) -> str | None:
    text = unicodedata.normalize("NFKC", text).strip()
    bare = text.strip(string.punctuation + string.whitespace)
    if len(bare) == 1 and bare.upper() in letters:
        return bare.upper()
    mentions = [m for m in MENTION.finditer(text) if m[1] in letters and not ARTICLE.match(text, m.start())]
    named = {mention[1] for mention in mentions}
    if len(named) <= 1:
        return next(iter(named), None)
    if _any_joined(text, mentions):
        return None
    leading = LEADING.match(text)
    if leading and leading[1] in letters:
        others = {mention[1] for mention in mentions if _is_marked(text, mention)} - {leading[1]}
        return None if others else leading[1]
    phrased = {match[1] for match in PHRASE.finditer(text) if match[1] in letters}
    return phrased.pop() if len(phrased) == 1 and not in_block else None


def _any_joined(text: str, mentions: list[re.Match[str]]) -> bool:
    """Whether two different letters are in one list: "A, B", "A or B", "(A) (B)"."""
    return any(a[1] != b[1] and JOINT.fullmatch(text[a.end() : b.start()]) for a, b in pairwise(mentions))


def _is_marked(text: str, mention: re.Match[str]) -> bool:
    """Whether a letter is written as an option: "B.", "B)", "(B", "B:", or after "or"."""
    before, after = text[: mention.start()].rstrip(), text[mention.end() : mention.end() + 2].lstrip()
    joined = re.search(rf"\b{CONNECTOR}\Z", before, re.IGNORECASE) is not None
    return joined or after[:1] in tuple(".):];,/") or before[-1:] in tuple("([,;/")


def _gold_letter(gold: Any, letters: str) -> str:
    text = unicodedata.normalize("NFKC", gold_text(gold))
    match = GOLD.fullmatch(text)
    if match is None or match[1].upper() not in letters:
        raise ValueError(
            f"the right answer {text[:60]!r} does not start with one of the letters {letters}; "
            "use the reward exact or number for other answers, or set options.letters"
        )
    return match[1].upper()
