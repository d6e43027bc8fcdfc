"""Parts of a context: results that are too long, the budget that is left, and earlier responses as chat turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mmrl.agents.environments.environment import Observation
from mmrl.agents.environments.native_calls import NativeAnswer, ToolCall
from mmrl.errors import UserError
from mmrl.rewards.answers import with_think_tags
from mmrl.vlm.data.turn_template import WHOLE_THOUGHT, Message, as_call, assistant_turn, call_id

LEFT_OUT = "\n[{} tokens left out]\n"
"""Replaces the middle of a result."""
MOST_LEFT_OUT = 10**7
NOTICES = ("[{turns}, {tokens} left]", "[{turns}, {tokens} are left]")
"""Forms of the budget notice. A number of tokens may change its own length; the second form has a token more."""
TRIES = 4
"""Renderings after which a form's number has settled, or alternates between two."""
WITHOUT_NAME = ("invalid_json", "unclosed", "missing_name", "cut")
"""Statuses of calls that cannot be written as a call again."""


class ResultClipper:
    """Cuts the middle out of long results.

    Args:
        tokenizer: counts tokens and says where in the text they are.
        limit: maximum number of tokens of a result, those of the mark included.

    Raises:
        UserError: the mark alone has more tokens, or the tokenizer does not say where its tokens are.
    """

    def __init__(self, tokenizer: Any, limit: int) -> None:
        self._tokenizer = tokenizer
        self._limit = limit
        self._known: dict[str, str] = {}
        if not tokenizer.is_fast:
            raise UserError(
                f"conversation.max_result_tokens needs a tokenizer that says where in the text each token is, which "
                f"{type(tokenizer).__name__} does not"
            )
        if (needed := len(self._spans(LEFT_OUT.format(MOST_LEFT_OUT)))) > limit:
            raise UserError(
                f"conversation.max_result_tokens is {limit}, but the mark {LEFT_OUT.format('N').strip()!r} alone has "
                f"up to {needed} tokens"
            )

    def __call__(self, text: str) -> str:
        """The text; if it has too many tokens, its beginning and its end with the number of those left out."""
        if text not in self._known:
            self._known[text] = self._clip(text)
        return self._known[text]

    def _clip(self, text: str) -> str:
        spans = self._spans(text)
        if len(spans) <= self._limit:
            return text
        room = self._limit - len(self._spans(LEFT_OUT.format(len(spans))))
        # pieces of a text may have more tokens than in the whole, so what fits is tried
        for kept in range(max(room, 0), -1, -1):
            head, tail = (kept + 1) // 2, len(spans) - kept // 2
            while not _is_boundary(spans, head):
                head -= 1
            while not _is_boundary(spans, tail):
                tail += 1
            # by characters of the text itself: a character of several tokens stays whole
            end, start = spans[head - 1][1] if head else 0, spans[tail][0] if tail < len(spans) else len(text)
            clipped = text[:end] + LEFT_OUT.format(tail - head) + text[start:]
            if len(self._spans(clipped)) <= self._limit:
                break
        return clipped

    def _spans(self, text: str) -> list[tuple[int, int]]:
        """Characters of each token; control tokens in a result are plain text."""
        options = {"add_special_tokens": False, "return_offsets_mapping": True, "split_special_tokens": True}
        return [*self._tokenizer(text, **options)["offset_mapping"]]


def _is_boundary(spans: Sequence[tuple[int, int]], index: int) -> bool:
    """Whether no character has tokens on both sides of a token's beginning."""
    return not 0 < index < len(spans) or spans[index][0] >= spans[index - 1][1]


def settle_notice(turns: int, room: int, left_behind: Callable[[str], int]) -> str:
    """The notice whose number of tokens is what is left behind it.

    Args:
        turns: turns that are left.
        room: tokens that were left before it, the first guess.
        left_behind: a notice to the tokens left once it was read.
    """
    notice = ""
    for form in NOTICES:
        left = room
        for _ in range(TRIES):
            notice = form.format(turns=_counted(turns, "turn"), tokens=_counted(left, "token"))
            found = left_behind(notice)
            if found == left:
                return notice
            left = found
    return notice


def _counted(number: int, name: str) -> str:
    return f"{max(number, 0)} {name}{'' if number == 1 else 's'}"


def split_thought(text: str) -> tuple[str, str]:
    """The thought at the beginning of a response, and the rest; an unfinished thought leaves nothing."""
    text = with_think_tags(text)
    if found := WHOLE_THOUGHT.match(text):
        return found[1].strip(), found[2]
    if text.lstrip().startswith("<think>"):
        return text.partition("<think>")[2].strip(), ""
    return "", text


def as_message(text: str, found: NativeAnswer | None, seen: Observation, *, has_thoughts: bool, most: int) -> Message:
    """An earlier response as a chat turn, as a server that parses responses returns it.

    Args:
        text: the response, from the thought on that its prompt opened.
        found: its calls; None if they are not read.
        seen: what followed; calls are calls only if each has a result.
        has_thoughts: whether the chat template takes thoughts apart from contents.
        most: calls that the template writes in a turn.
    """
    calls = found.calls if found is not None else ()
    if found is not None and 0 < len(calls) == len(seen.results) <= most and all(map(_is_written, calls)):
        thought, content = found.thought, found.text
        written = [as_call(call.name, call.arguments, call.id or call_id(n)) for n, call in enumerate(calls)]
        further: Message = {"tool_calls": written}
        if thought and not has_thoughts:
            content = f"<think>\n{thought}\n</think>\n\n{content}"
    else:
        thought, content = split_thought(text) if has_thoughts else ("", text)
        further = {}
    if thought and has_thoughts:
        # under every name that templates use for it
        further |= dict.fromkeys(("reasoning_content", "thinking", "reasoning"), thought)
    return assistant_turn(content, **further)


def _is_written(call: ToolCall) -> bool:
    # arguments that are no object are not kept
    return call.status not in WITHOUT_NAME and (call.status != "bad_arguments" or bool(call.arguments))
