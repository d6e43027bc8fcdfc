"""Rules: a sentence about a topic must follow rules that a program checks, as in IFEval. Text only.

Topics and the words that rules name of held-out rows are in no training row.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mmrl.files import write_atomically
from mmrl.rewards.answers import Chat, completion_text

TOPICS = (
    "the sea, a cat, winter, coffee, trains, the moon, a garden, music, bread, mountains, a bicycle, rain, a library, "
    "football, an old house, the forest, cooking, a birthday, spiders, the desert, painting, a river, school, sleep, "
    "a market, the stars, dancing, a bridge, tea, horses, a storm, chess"
)
WORDS = (
    "green quiet yesterday never window seven golden always bright slowly strange water empty north together gentle "
    "sudden paper silver morning"
)
HELD_OUT = 4
"""One topic and one word in this many are held out."""


def _words(text: str) -> list[str]:
    return re.findall(r"[A-Za-z0-9'’-]+", text)


RULES: dict[str, tuple[str, Callable[[str, Any], bool], Sequence[Any] | None]] = {
    "lowercase": ("use lowercase letters only", lambda text, _: text == text.lower(), (None,)),
    "capitals": ("use capital letters only", lambda text, _: text == text.upper(), (None,)),
    "no_comma": ("do not use any commas", lambda text, _: "," not in text, (None,)),
    "at_most": ("use at most {} words", lambda text, most: len(_words(text)) <= most, (6, 8, 10, 12)),
    "at_least": ("use at least {} words", lambda text, least: len(_words(text)) >= least, (14, 16, 18, 20)),
    "contains": ('use the word "{}"', lambda text, word: word in _words(text.lower()), None),
    "first_word": ('begin with the word "{}"', lambda text, word: _words(text.lower())[:1] == [word], None),
    "last_word": ('end with the word "{}"', lambda text, word: _words(text.lower())[-1:] == [word], None),
    "quoted": ("put the whole sentence in double quotation marks", lambda text, _: _is_quoted(text), (None,)),
    "question": ("ask a question", lambda text, _: text.rstrip('"').endswith("?"), (None,)),
}
"""Each rule: its wording, its check of a response given its value, and its values; None for words."""
CONTRADICTIONS = {frozenset(pair) for pair in (("lowercase", "capitals"), ("at_most", "at_least"))}
PAIRS = [pair for pair in itertools.combinations(RULES, 2) if frozenset(pair) not in CONTRADICTIONS]


def _is_quoted(text: str) -> bool:
    return len(text) > 2 and text[0] == text[-1] == '"' and '"' not in text[1:-1]


def build_rules(path: str | Path, *, count: int = 600, rules: int = 1, split: str = "train", seed: int = 0) -> Path:
    """Write requests for a sentence about a topic.

    Args:
        path: JSONL file to write; columns question, topic, rules (their names), values (of each rule) and kind (the
            names in one text).
        count: number of rows.
        rules: 1 or 2 for each row.
        split: "train" or "test", whose topics and words are disjoint.
        seed: random seed.

    Returns:
        The file.

    Raises:
        ValueError: unknown split or number of rules.
    """
    if split not in ("train", "test"):
        raise ValueError(f"split is {split!r}; must be train or test")
    if rules not in (1, 2):
        raise ValueError(f"rules is {rules}; must be 1 or 2")
    topics, words = (_part(values, split) for values in (TOPICS.split(", "), WORDS.split()))
    kinds: Sequence[Sequence[str]] = PAIRS if rules == 2 else [(name,) for name in RULES]
    rng = random.Random(f"{split} {seed}")
    rows = []
    for _ in range(count):
        names = rng.sample(rng.choice(kinds), rules)
        values = [rng.choice(RULES[name][2] or words) for name in names]
        told = ", and ".join(RULES[name][0].format(value) for name, value in zip(names, values, strict=True))
        topic = rng.choice(topics)
        question = f"Write one sentence about {topic}: {told}. Answer with the sentence only."
        kind = " + ".join(sorted(names))
        rows.append({"question": question, "topic": topic, "rules": names, "values": values, "kind": kind})
    write_atomically(Path(path), "".join(f"{json.dumps(row)}\n" for row in rows))
    return Path(path)


def _part(values: Sequence[Any], split: str) -> list[Any]:
    return [value for place, value in enumerate(values) if (place % HELD_OUT == 1) == (split == "test")]


def follows_rules(
    prompts: Sequence[Chat],
    completions: Sequence[Chat],
    *,
    topic: Sequence[str],
    rules: Sequence[Sequence[str]],
    values: Sequence[Sequence[Any]],
    **_: Any,
) -> list[float]:
    """Give the fraction of its rules that a response follows; without its topic, or with several lines, it earns 0.

    Args:
        prompts: requests.
        completions: responses.
        topic: topic of each request, whose last word has to occur in the answer.
        rules: names of the rules of each request.
        values: their values.

    Returns:
        0, 0.5 or 1 for each response.

    Source: checks as in google-research/instruction_following_eval.
    """
    scores = []
    for said, about, names, given in zip(completions, topic, rules, values, strict=True):
        text = completion_text(said).strip()
        # a rule alone would be easy without writing about anything
        noun = re.escape(about.split()[-1].removesuffix("s"))
        named = re.search(rf"\b{noun}(s|es)?\b", text, re.IGNORECASE)
        sound = named is not None and "\n" not in text and len(_words(text)) >= 4
        kept = [RULES[name][1](text, value) for name, value in zip(names, given, strict=True)]
        scores.append(sum(kept) / len(kept) if sound else 0.0)
    return scores
