"""Extract the answer of a completion (an answer block, a box, or nothing), and rewards that compare it as text.

Every reader is linear in the length of the text and none looks at the right answer, so a completion cannot earn
anything by offering several answers at once. The rewards are for the shape of a response (think first, then answer),
for an answer equal to the right one, and against long responses.
"""

from __future__ import annotations

import math
import re
import string
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from numbers import Number
from typing import Any, TypeAlias

Chat: TypeAlias = "str | Sequence[Mapping[str, Any]]"
"""Text, or chat turns with role and content as passed by TRL."""

MAX_ANSWER_CHARS = 1000
"""Maximum length of an answer in characters; the bound also keeps every parser fast."""

TAG = re.compile(r"<\s{0,4}(/?)\s{0,4}(think|answer)\s{0,4}>")
BOX = "\\boxed{"
SPECIAL_TOKEN = re.compile(r"<\|[^|<>]{1,40}\|>|<(?:image|video)>")
"""Special tokens, and the marks of images and videos in questions."""
ROLE = re.compile(r"\A\s*(?:system|user|assistant)\s*\n")


THOUGHTS = (
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<|channel>thought\n", "<channel|>"),
)
"""Reasoning markers other than <think>, used by Magistral, Seed-OSS, Sky-T1 and Gemma 4."""
MESSAGE = re.compile(
    r"(?:<\|(?:end|eom)\|>\s{0,4})?(?:<\|start\|>assistant)?(?:<\|channel\|>| to=)"
    r"(analysis|final|commentary|self|user)\b(?: [^<>|]{0,80})?(?:<\|constrain\|>\w{1,20})?<\|message\|>"
)
"""Head of a message of gpt-oss (analysis, commentary, final) or Muse (to itself, to the user)."""


def with_think_tags(text: str) -> str:
    """Return a completion with its reasoning in <think> blocks, regardless of the markers of the model.

    Of the channels of gpt-oss, analysis is the thought and final the answer; commentary, which has calls, stays.
    """
    for opened, closed in THOUGHTS:
        if opened in text or closed in text:
            text = text.replace(opened, "<think>").replace(closed, "</think>")
    # heads of messages are searched for only where there is one: most texts have none
    heads = [*MESSAGE.finditer(text)] if "<|message|>" in text else []
    if not heads:
        return text
    parts, ends = [text[: heads[0].start()]], [head.start() for head in heads[1:]] + [len(text)]
    for head, end in zip(heads, ends, strict=True):
        body = text[head.end() : end]
        if head[1] in ("final", "user"):
            parts.append(body)
        elif head[1] == "commentary":
            parts.append(head[0] + body)
        else:  # the last one may be unfinished
            # an unfinished thought has no closing tag, so that nothing after it counts as an answer
            done = end < len(text) or body.endswith(("<|end|>", "<|eom|>"))
            parts.append(f"<think>{body.removesuffix('<|end|>').removesuffix('<|eom|>')}{'</think>' if done else ''}")
    return "".join(parts)


def completion_text(completion: Chat) -> str:
    """Return the text of a completion given as a string or as chat turns; for agents, the last response.

    Reasoning is in <think> blocks, regardless of the markers of the model.
    """
    if isinstance(completion, str):
        return with_think_tags(completion)
    if isinstance(completion, Sequence):
        roles = [turn.get("role") if isinstance(turn, Mapping) else None for turn in completion]
        # of several turns the last answer of the assistant is what is judged
        if {"user", "tool"} & set(roles) and "assistant" in roles:
            return with_think_tags(_turn_text(completion[len(roles) - 1 - roles[::-1].index("assistant")]))
        return with_think_tags(chat_text(completion))
    raise TypeError(f"a completion must be a string or a list of chat turns, not {type(completion).__name__}")


def chat_text(turns: Sequence[Any]) -> str:
    """Return the texts of chat turns joined together."""
    return "".join(_turn_text(turn) for turn in turns)


def _turn_text(turn: Any) -> str:
    content = turn.get("content") if isinstance(turn, Mapping) else None
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "".join(str(item.get("text", "")) for item in content if isinstance(item, Mapping))
    raise TypeError(f"a chat turn must have a role and a content, found {type(turn).__name__}")


def without_prompt(text: str, prompt: Chat) -> str:
    """Remove the question from a completion that repeats it."""
    turns = [prompt] if isinstance(prompt, str) else [_turn_text(turn) for turn in prompt or ()]
    for turn in turns:
        for echo in _echoes(turn):
            text = text.replace(echo, " ")
    return text


@lru_cache(maxsize=1024)
def _echoes(prompt: str) -> tuple[str, ...]:
    """Return the forms of a repeated prompt, with and without special tokens and role words."""
    pieces = [ROLE.sub("", piece).strip() for piece in (prompt, *SPECIAL_TOKEN.split(prompt))]
    # shorter pieces may well occur in an honest answer
    return tuple(dict.fromkeys(piece for piece in pieces if len(piece.split()) >= 3))


def final_part(text: str) -> str | None:
    """Return the text after the last think block, the whole text without one, None if it ends inside its thinking."""
    # linear in the text: one pass over the tags
    text, opened, end = with_think_tags(text), False, 0
    for tag in TAG.finditer(text):
        if tag[2] == "think":
            opened = not tag[1]
            end = tag.end() if tag[1] else end
    return None if opened else text[end:]


def answer_blocks(text: str) -> list[str] | None:
    """Return the contents of all answer blocks, or None if the tags are nested or unbalanced."""
    blocks: list[str] = []
    start: int | None = None
    for tag in TAG.finditer(text):
        if tag[2] != "answer":
            # <think> tags inside an answer are text
            continue
        if tag[1]:
            if start is None:
                return None
            blocks.append(text[start : tag.start()])
            start = None
        elif start is None:
            start = tag.end()
        else:
            return None
    return blocks if start is None else None


def boxes(text: str) -> list[str]:
    r"""Return the contents of all closed \boxed{...}, braces balanced, an inner box as part of the outer."""
    found: list[str] = []
    index = text.find(BOX)
    while index >= 0:
        start = index + len(BOX)
        end = _closing_brace(text, start)
        # an unclosed box has no content
        if end is None:
            return found
        found.append(text[start:end])
        index = text.find(BOX, end)
    return found


def _closing_brace(text: str, start: int) -> int | None:
    depth = 1
    # escaped braces do not count
    for brace in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        if brace[0] in "{}":
            depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return brace.start()
    return None


def final_answer(text: str, *, several: str = "wrong") -> str | None:
    r"""Return the content of the answer block after the thinking, else of the \boxed{...} there."""
    part = final_part(text)
    blocks = None if part is None else answer_blocks(part)
    if part is None or blocks is None:
        return None
    # a block is more explicit than a box, which may be part of the working
    found = blocks or boxes(part)
    if not found:
        return None
    # several different answers are a guess, and the last one would reward guessing
    if several != "last" and len({normalise(answer) for answer in found}) > 1:
        return None
    answer = _open_boxes(found[-1]).strip()
    # a long text is an explanation and not an answer
    return answer if 0 < len(answer) <= MAX_ANSWER_CHARS else None


def read_answer(completion: Chat, prompt: Chat, *, require_block: bool = True, several: str = "wrong") -> str | None:
    """Return the answer in a response, or None."""
    text = without_prompt(completion_text(completion), prompt)
    found = final_answer(text, several=several)
    # marks that are wrong are not read as plain text: the format would never be learned
    if found is not None or require_block or has_answer_marks(text):
        return found
    part = final_part(text)
    return part.strip() if part is not None and 0 < len(part.strip()) <= MAX_ANSWER_CHARS else None


def has_answer_marks(text: str) -> bool:
    """Whether a text tries to mark its answer, correctly or not."""
    return BOX in text or any(tag[2] == "answer" for tag in TAG.finditer(text))


def _open_boxes(text: str) -> str:
    r"""Replace each \boxed{x} by x, so that text around a box stays part of the answer."""
    for inner in boxes(text):
        text = text.replace(BOX + inner + "}", inner)
    return text


def gold_text(gold: Any) -> str:
    """Return the reference answer of a dataset row as text, without tags or a box around it."""
    # bool is a number in Python, and no answer of a data set
    if isinstance(gold, bool) or not isinstance(gold, str | Number | date):
        raise ValueError(f"the reference answer is {gold!r:.200}; expected a text or a number")
    if isinstance(gold, float | Decimal) and math.isfinite(gold) and gold == int(gold):
        gold = int(gold)  # tables store 5 as 5.0
    text = str(gold)
    # GSM8K writes its working before ####
    if "####" in text:
        text = text.rpartition("####")[2]
    text = final_answer(text) or text
    if not text.strip():
        raise ValueError("the reference answer is empty")
    return text.strip()


def normalise(text: str) -> str:
    """Normalise case, width, spaces, quotes and closing punctuation, so that equal answers become equal strings."""
    # NFKC folds full-width and other forms of the same letter
    folded = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(folded.split()).strip(" \"'`*.,;:!?“”‘’")


def number_answers(groups: Sequence[int], prompts: Sequence[Chat], completions: Sequence[Chat]) -> list[int]:
    """Number the answers of each group, so that responses with the same answer share a number.

    A response without an answer that rewards could read counts by its whole text.

    Args:
        groups: Group of each response.
        prompts: Question of each response.
        completions: The responses.

    Returns:
        A number a response; each group counts from 0 in the order of its responses.
    """
    seen: dict[int, dict[str, int]] = {}
    found = []
    for group, prompt, completion in zip(groups, prompts, completions, strict=True):
        text = read_answer(completion, prompt, require_block=False)
        # numbers count from 0 in every group, so that they do not depend on other groups
        known = seen.setdefault(group, {})
        found.append(known.setdefault(normalise(completion_text(completion) if text is None else text), len(known)))
    return found


STYLES = ("either", "answer_tags", "boxed")
TAGS = {
    "answer_tags": ("<think>", "</think>", "<answer>", "</answer>"),
    "boxed": ("<think>", "</think>"),
}


def format_reward(
    prompts: Sequence[Any],
    completions: Sequence[Chat],
    *,
    style: str = "either",
    rule: str = "one_block",
    **_: Any,
) -> list[float]:
    r"""Give 1 to a think block with a thought, followed by an answer, 0 to everything else.

    The answer is a block <answer>...</answer> (answer_tags), a \boxed{...} (boxed), or either: a block, and a box if
    there is no tag of a block, as the rewards for right answers read it.

    Source: hiyouga/EasyR1 examples/reward_function/{math,r1v}.py and MikeWangWZHL/PAPO (fullmatch);
        Indolent-Kawhi/View-R1 examples/scripts/reward_func.py (one_block).
    """
    if style not in STYLES:
        raise ValueError(f"format: style is {style!r}; expected one of {', '.join(STYLES)}")
    if rule not in RULES:
        raise ValueError(f"format: rule is {rule!r}; expected one of {', '.join(RULES)}")
    texts = [completion_text(completion) for completion in completions]
    return [float(RULES[rule](text, _style_of(text) if style == "either" else style)) for text in texts]


def _style_of(text: str) -> str:
    return "answer_tags" if any(tag[2] == "answer" for tag in TAG.finditer(text)) else "boxed"


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
    """Return the text before the think block and after the answer block; None if the blocks are malformed."""
    # in this order, and each tag once
    indices = [text.find(tag) for tag in TAGS[style]]
    if -1 in indices or indices != sorted(indices) or any(text.count(tag) != 1 for tag in TAGS[style]):
        return None
    before, _, rest = text.partition("<think>")
    thought, _, rest = rest.partition("</think>")
    if not thought.strip():
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


def exact_reward(
    prompts: Sequence[Chat],
    completions: Sequence[Chat],
    *,
    answer: Sequence[Any],
    require_block: bool = True,
    **_: Any,
) -> list[float]:
    r"""Give 1 when the answer equals the right one, apart from case, width, spaces and closing punctuation."""
    rewards = []
    for prompt, completion, gold in zip(prompts, completions, answer, strict=True):
        golds = gold if isinstance(gold, list | tuple) else [gold]
        # also as text: a number and its text are the same answer
        right = {normalise(form) for one in golds for form in (gold_text(one), gold_text(str(one)))}
        if not right or "" in right:
            raise ValueError(f"the reference answer {gold!r} is empty")
        found = read_answer(completion, prompt, require_block=require_block)
        rewards.append(float(found is not None and normalise(found) in right))
    return rewards


def overlong_penalty(
    prompts: Sequence[Chat],
    completions: Sequence[Chat],
    *,
    completion_lengths: Sequence[int],
    max_tokens: int,
    buffer_tokens: int,
    **_: Any,
) -> list[float]:
    """Penalise responses close to the length limit by up to 1.

    0 up to max_tokens - buffer_tokens, falling linearly to -1 at max_tokens.

    Source: DAPO (arXiv 2503.14476), equation 13.
    """
    if not 0 < buffer_tokens <= max_tokens:
        raise ValueError(f"overlong: buffer_tokens {buffer_tokens} is not in 1..max_tokens ({max_tokens})")
    start = max_tokens - buffer_tokens
    # linear between start and limit, as in eq. 13
    return [-min(1.0, max(0.0, (int(length) - start) / buffer_tokens)) for length in completion_lengths]


MAX_NUMBER_CHARS = 64
PERCENT = ("strip", "value")

_PLAIN = r"(?:\d{1,3}(?:(?:,|\{,\})\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_POWER = r"(?:[eE]([+-]?\d{1,3})(?!\w)|\s*(?:[x×*]|\\times|\\cdot)\s*10\s*(?:\^|\*\*)\s*\{?\s*([+-]?\d{1,3})\}?)?"
_UNSIGNED = rf"({_PLAIN}){_POWER}"
TOKEN = re.compile(
    rf"(?P<sign>[+-]\s?)?(?:\\[dt]?frac\s*\{{\s*(?P<top>-?\d+)\s*\}}\s*\{{\s*(?P<under>-?\d+)\s*\}}"
    rf"|(?<![\w.^])(?:(?P<whole>\d+)\s+(?=\d+\s*/\s*\d))?{_UNSIGNED}(?:\s*/\s*(?P<over>\d+(?:\.\d+)?))?)"
    r"(?P<percent>\s*\\?%)?"
)
BETWEEN = re.compile(r"\s*(?:[-+*/×÷,;:]|\\times|\\cdot|\\div)?\s*")
_UNIT = "(units?|[cdmk]?m|ft|in|yd|mi|s)"
UNIT_POWER = re.compile(rf"\b{_UNIT}\s*(?:\^\{{?-?\d\}}?|[²³]|[23]\b)|(?<=\d){_UNIT}[²³]")
# NFKC would make 23 of 2³, and 11⁄2 of 1½
SUPERSCRIPT = re.compile(r"(?<=[\d)])[⁰¹²³⁴-⁹⁻]+")
FRACTION = re.compile(r"(?<=\d)(?=[¼-¾⅐-⅞↉])")
# The text without the numbers must be words, units and layout: no digit, power, root, factorial or function.
EXPRESSION = re.compile(r"[\d^√∛π∞]|\*\*|#\s*!|[A-Za-z]\(\s*#|\\(?!text|mathrm|\$|%|[,;!\s])")


def number_reward(
    prompts: Sequence[Chat],
    completions: Sequence[Chat],
    *,
    answer: Sequence[Any],
    absolute: float = 1e-6,
    relative: float = 0.0,
    percent: str = "strip",
    require_block: bool = True,
    **_: Any,
) -> list[float]:
    r"""Give 1 when the response gives one number and it is the right one.

    Read are integers, decimals, thousands separators (1,234), fractions (3/4, 1 3/4, \frac{3}{4}), powers of
    ten (1.2e3, 1.2 x 10^3) and percentages, with words or units around them. Different numbers in the answer,
    or an expression that would have to be computed, get 0.
    """
    if percent not in PERCENT or absolute < 0 or relative < 0:
        raise ValueError(f"number: percent must be one of {', '.join(PERCENT)}, and tolerances must not be negative")
    rewards = []
    for prompt, completion, gold in zip(prompts, completions, answer, strict=True):
        wanted = read_number(gold_text(gold), percent)
        if wanted is None:
            raise ValueError(
                f"the reference answer {str(gold)[:60]!r} is not a single number; try the reward math or exact"
            )
        text = read_answer(completion, prompt, require_block=require_block)
        value = None if text is None else read_number(text, percent)
        allowed = max(Fraction(absolute), Fraction(relative) * abs(wanted))
        rewards.append(float(value is not None and abs(value - wanted) <= allowed))
    return rewards


def read_number(text: str, percent: str = "strip") -> Fraction | None:
    """Parse the single number in a text exactly."""
    text = FRACTION.sub(" ", SUPERSCRIPT.sub(r"^\g<0>", UNIT_POWER.sub(r"\1\2", text)))
    text = unicodedata.normalize("NFKC", text).replace("−", "-").replace("⁄", "/")
    matches = list(TOKEN.finditer(text))
    values = {_value(match, percent) for match in matches}
    listed = any(BETWEEN.fullmatch(text[a.end() : b.start()]) for a, b in pairwise(matches))
    if len(values) != 1 or listed or EXPRESSION.search(TOKEN.sub("#", text)):
        return None
    return values.pop()


def _value(match: re.Match[str], percent: str) -> Fraction | None:
    if len(match[0]) > MAX_NUMBER_CHARS:
        return None
    try:
        value = _magnitude(match)
    except (ValueError, ZeroDivisionError):
        return None
    if match["percent"] and percent == "value":
        value /= 100
    return -value if (match["sign"] or "").startswith("-") else value


def _magnitude(match: re.Match[str]) -> Fraction:
    if match["top"] is not None:
        return Fraction(int(match["top"]), int(match["under"]))
    plain, exponent, power = match.group(5, 6, 7)
    value = Fraction(plain.replace("{,}", "").replace(",", ""))
    value *= Fraction(10) ** int(exponent or power or 0)
    if match["over"] is not None:
        value /= Fraction(match["over"])
    return value + int(match["whole"] or 0)


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
    """Return the letter that a response chooses, or None if it chooses none or several."""
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
            f"the reference answer {text[:60]!r} does not start with one of the letters {letters}; use the reward "
            "exact or number for other answers, or set options.letters"
        )
    return match[1].upper()
