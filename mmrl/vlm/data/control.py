"""Control tokens in data: encoded as plain characters, except those that belong to an answer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

EARLIER = "\u2063turn\u2063"
"""Placeholder for the text of earlier turns while the template is rendered."""
HIDDEN = "\u2063hidden\u2063"
PLACEHOLDER = re.compile(f"{HIDDEN}(\\d+){HIDDEN}")
"""Placeholder for a control token of a text while the template is rendered."""
MARKUP = re.compile(r"<\|(?:object_ref|box|quad)_(?:start|end)\|>")
"""Special tokens that mark part of a text, as in referring questions; they stay special tokens."""
MARKUP_OR_MEDIA = re.compile(rf"{MARKUP.pattern}|<\|(?:vision_(?:start|end|pad)|(?:image|video)_pad)\|>")


def hide_control_tokens(
    messages: Sequence[Mapping[str, Any]], tokenizer: Any, kept: re.Pattern[str] = MARKUP
) -> tuple[list[str], list[dict[str, Any]]]:
    """Replace control tokens, and texts that look like placeholders, in messages with placeholders."""
    # a text could contain a placeholder: it is hidden as well, and so comes back unchanged
    control = control_pattern(tokenizer, kept).pattern
    # the marks of placeholders are hidden too: a text that contains one could otherwise pass for a control token
    pattern, found = re.compile(f"{control}|{EARLIER}|{HIDDEN}"), list[str]()

    def placeholder(match: re.Match[str]) -> str:
        found.append(match[0])
        return f"{HIDDEN}{len(found) - 1}{HIDDEN}"

    def hide(content: Any) -> Any:
        if isinstance(content, str):
            return pattern.sub(placeholder, content)
        return [item | {"text": hide(item["text"])} if item.get("type") == "text" else item for item in content]

    return found, [{**turn, "content": hide(turn["content"])} for turn in messages]


def control_pattern(tokenizer: Any, kept: re.Pattern[str]) -> re.Pattern[str]:
    """Pattern for all special tokens of a tokenizer, such as ends of turns and roles, except the `kept` ones."""
    control = [token for token in special_tokens(tokenizer) if not kept.fullmatch(token)]
    # longest first: alternatives match in order, and a token may begin with another; without tokens, match nothing
    return re.compile("|".join(map(re.escape, sorted(control, key=len, reverse=True))) or r"(?!)")


def special_tokens(tokenizer: Any) -> list[str]:
    """Texts of the special tokens of a tokenizer."""
    return [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]


def encode_text(text: str, tokenizer: Any, kept: re.Pattern[str] = MARKUP_OR_MEDIA) -> list[int]:
    """Encode the text of an answer; control tokens become plain characters, except the `kept` ones.

    Media tokens are kept by default, so that they are detected and rejected.
    """
    hidden, (turn,) = hide_control_tokens([{"content": text}], tokenizer, kept)
    return encode_rendered(turn["content"], hidden, tokenizer)


def encode_rendered(text: str, hidden: Sequence[str], tokenizer: Any) -> list[int]:
    """Encode a rendered text; placeholders become the characters of the hidden control tokens."""
    ids: list[int] = []
    start = 0
    for match in [*PLACEHOLDER.finditer(text), None]:
        ids += _encode_inside(text[start : len(text) if match is None else match.start()], tokenizer)
        if match is not None:
            # split: the characters of the token, so that data can neither end a turn nor begin one
            ids += tokenizer.encode(hidden[int(match[1])], add_special_tokens=False, split_special_tokens=True)
            start = match.end()
    return ids


def _encode_inside(text: str, tokenizer: Any) -> list[int]:
    """Encode a text that follows another, since Llama tokenizers put a space before the first word of an input."""
    front = next((t for t in tokenizer.added_tokens_decoder.values() if t.special and not (t.rstrip or t.lstrip)), None)
    if front is None or not text:
        return list(tokenizer.encode(text, add_special_tokens=False))
    # behind a special token the text is not the first word, so no space is added; the token is dropped again
    first, *ids = tokenizer.encode(front.content + text, add_special_tokens=False)
    if first != tokenizer.convert_tokens_to_ids(front.content):
        return list(tokenizer.encode(text, add_special_tokens=False))
    return ids
