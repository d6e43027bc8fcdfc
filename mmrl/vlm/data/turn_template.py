"""The assistant's turn as the model's chat template writes it: its header, its end, and what follows.

Sample turns are rendered, and the text around their contents is read from the result:

    [question]                 ... <|im_start|>assistant                                   begin
    [question, X]              ... <|im_start|>assistant <think></think> X <|im_end|>      head, close
    [question, X, message]     ...                                       X <|im_end|> <|im_start|>user ...

Control tokens in data are encoded as plain characters, except those that belong to an answer.
"""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mmrl.errors import UserError
from mmrl.vlm.data.task import OPEN_THINK

LOGGER = logging.getLogger("mmrl")
EARLIER = "\u2063turn\u2063"
"""Placeholder for the text of earlier turns while the template is rendered."""
HIDDEN = "\u2063hidden\u2063"
PLACEHOLDER = re.compile(f"{HIDDEN}(\\d+){HIDDEN}")
"""Placeholder for a control token of a text while the template is rendered."""
MARKUP = re.compile(r"<\|(?:object_ref|box|quad)_(?:start|end)\|>")
"""Special tokens that mark up part of a text, as in referring questions; they stay special tokens."""
MARKUP_OR_MEDIA = re.compile(rf"{MARKUP.pattern}|<\|(?:vision_(?:start|end|pad)|(?:image|video)_pad)\|>")
QUESTION = "\u2063asked\u2063"
THOUGHT = "\u2063thought\u2063"
WHOLE_THOUGHT = re.compile(r"\A\s*<think>(.*?)</think>\s*(.*)\Z", re.DOTALL)
THINKING_MARKS = re.compile(
    r"</?think>|\[/?THINK\]|<\|channel>|<channel\|>|<\|(?:begin|end)_of_thought\|>|</?seed:think>|</?answer>"
)
"""Thought and answer markup, which some tokenizers define as special tokens."""
NOTHING = re.compile(r"(?!)")
PARTS_AS_TEXT = re.compile(r"""\{['"]type['"]: ?['"]text['"]""")
"""A list of content parts that a template printed as Python or JSON."""
Message = dict[str, Any]


def user_turn(text: str) -> Message:
    """A user turn whose text is a list of parts, as the templates of image models expect."""
    return {"role": "user", "content": [{"type": "text", "text": text}]}


def assistant_turn(text: str, **further: Any) -> Message:
    """An assistant turn in the same form."""
    return {"role": "assistant", "content": [{"type": "text", "text": text}], **further}


class TurnTemplate:
    """Reads the assistant's turn from the chat template of a processor.

    Args:
        processor: renders chats and has the tokenizer.
        variables: template variables.
        stops: ids at which the checkpoint ends an answer, in its order.
        name: name of the model, for messages.
        answer_tokens: special tokens that belong to answers; None means those that the template writes into answers,
            and thought markup.
    """

    def __init__(
        self,
        processor: Any,
        variables: Mapping[str, Any],
        stops: Sequence[int],
        name: str,
        answer_tokens: Sequence[str] | None = None,
    ) -> None:
        self._processor = processor
        self._variables = variables
        self._name = name
        self.stops = [str(token) for token in processor.tokenizer.convert_ids_to_tokens(list(stops))]
        self._declared = answer_tokens
        self._read: tuple[str, _Parts] | None = None
        self._warned = set[str]()
        self._shown = set[tuple[str, ...]]()

    @property
    def parts(self) -> _Parts:
        """Text that the template writes around an answer, cached until the template changes."""
        # by the template's text: a processor's template can be replaced after the policy was made
        source = str(self._processor.chat_template or self._processor.tokenizer.chat_template)
        if self._read is None or self._read[0] != source:
            self._read = source, _Parts(self)
        return self._read[1]

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the processor."""
        return self._processor.tokenizer

    @property
    def ends(self) -> list[str]:
        """Tokens that end a sampled answer; see `end_ids`."""
        ids = self.end_ids(self.tokenizer.convert_tokens_to_ids(self.stops))
        return [str(token) for token in self.tokenizer.convert_ids_to_tokens(list(ids))]

    def end_ids(self, stops: Sequence[int]) -> tuple[int, ...]:
        """Ids that end a sampled answer: first the end token of the template, then those of the checkpoint."""
        parts = self.parts
        # the last special token: some templates write text or another token before the one that ends the turn
        found = [*control_pattern(self.tokenizer, NOTHING).finditer(parts.close)][-1:]
        # no special token at the end: sampling can only stop where the checkpoint does
        if parts.problem or not found:
            return tuple(stops)
        end = int(self.tokenizer.convert_tokens_to_ids(found[0][0]))
        if end not in stops:
            self.warn_once(
                "end",
                "%s ends the assistant's turn with %s, but the checkpoint does not stop there (%s); sampling, given "
                "answers and exports stop at it",
                self.blame,
                found[0][0],
                ", ".join(self.stops),
            )
        elif not parts.ends_itself:
            message = "%s does not end the assistant's turn with a special token, so given answers end with %s"
            LOGGER.info(message, self.blame, found[0][0])
        return tuple(dict.fromkeys([end, *stops]))

    @functools.cached_property
    def kept_tokens(self) -> tuple[str, ...]:
        """Special tokens that belong to answers: kept in decoded samples and encoded in given answers."""
        special = special_tokens(self.tokenizer)
        if self._declared is not None:
            unknown = sorted(set(self._declared) - set(special))
            if unknown:
                raise UserError(
                    f"model.answer_tokens contains {', '.join(unknown)}, which are not special tokens of the "
                    f"tokenizer of {self._name}; it has: {', '.join(special[:40])}"
                )
            return tuple(self._declared)
        # in the order of the tokenizer, so that messages and patterns do not change from run to run
        written = self.parts.written
        return tuple(token for token in special if token in written or THINKING_MARKS.fullmatch(token))

    @functools.cached_property
    def _kept_pattern(self) -> re.Pattern[str]:
        own = "|".join(map(re.escape, self.kept_tokens))
        return re.compile(f"{MARKUP_OR_MEDIA.pattern}|{own}") if own else MARKUP_OR_MEDIA

    def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Decode answers, dropping all special tokens except those that belong to answers."""
        tokenizer = self.tokenizer
        kept = set(tokenizer.convert_tokens_to_ids(list(self.kept_tokens)))
        # the tokenizer drops all special tokens or none, so with kept ones the others are removed by hand
        if not any(kept.intersection(row) for row in rows):
            return tokenizer.batch_decode(rows, skip_special_tokens=True)
        left_out = set(tokenizer.convert_tokens_to_ids(special_tokens(tokenizer))) - kept
        shown = [[token for token in row if token not in left_out] for row in rows]
        return tokenizer.batch_decode(shown, skip_special_tokens=False)

    def encode_answer(self, prompt_text: str, text: str, *, ends: bool = True) -> list[int]:
        """Tokens of a given answer after a prompt, as the template writes them.

        Args:
            prompt_text: the rendered prompt.
            text: the answer; a leading `<think>` block is written in the template's form of a thought.
            ends: whether the answer is complete; if not, the end of the turn is left out.
        """
        self._warn_of_characters(text)
        # a control token in a given answer must stay text, or it would end the turn
        hidden, (given,) = hide_control_tokens([{"content": text}], self.tokenizer, self._kept_pattern)
        return encode_rendered(self.write(prompt_text, given["content"], ends=ends), hidden, self.tokenizer)

    def encode_past(self, text: str) -> list[int]:
        """Tokens of an earlier answer (no thought, no end of turn), as the template writes it before further turns."""
        hidden, (given,) = hide_control_tokens([{"content": text}], self.tokenizer)
        return encode_rendered(self.parts.past_head + given["content"], hidden, self.tokenizer)

    def write(self, prompt_text: str, content: str, *, ends: bool) -> str:
        """A given answer after a prompt as text, with its control tokens hidden."""
        parts = self.parts
        if parts.problem:
            raise UserError(f"{self.blame} cannot write a given answer: {parts.problem}")
        body = None
        # the head of the template only fits a prompt that ends in it
        if prompt_text.endswith(parts.begin) and not self._is_native(content):
            body = self._whole(content) if ends else self._started(content)
        if body is None:
            body = self._behind_prompt(prompt_text, content)
        return body + (parts.close if ends else "")

    def check_readers(self, sources: Mapping[str, str]) -> None:
        """Warn about code that looks for a special token absent from decoded responses; `sources` are by name."""
        hidden = control_pattern(self.tokenizer, self._kept_pattern)
        for name, source in sources.items():
            for token in sorted({match[0] for match in hidden.finditer(source.replace("\\", ""))}):
                self.warn_once(
                    f"{name} {token}",
                    "%s contains %s, a special token of %s that is removed from the text of responses; add it to "
                    "model.answer_tokens if responses use it",
                    name,
                    token,
                    self._name,
                )

    def render(self, messages: Sequence[Message], *, asks: bool = False, tools: Sequence[Any] = ()) -> str:
        """Render the chat as text; contents become plain strings if the template does not support lists of parts."""
        options: dict[str, Any] = {**self._variables, **({"tools": list(tools)} if tools else {})}
        options |= {"tokenize": False, "add_generation_prompt": asks}
        rendered, problem = None, ""
        # lists first: templates of image models need them, and those of text models may print them verbatim
        for plain in (False, True):
            turns = [_as_text(turn) if plain else turn for turn in messages]
            try:
                rendered = str(self._processor.apply_chat_template(turns, **options))
            except Exception as error:  # templates raise their own errors
                problem = str(error)
                continue
            if not PARTS_AS_TEXT.search(rendered) and all(_shows(rendered, text) for text in _texts(messages)):
                return rendered
        # a rendering that lacks some texts is still returned: callers check what they need
        if rendered is None:
            raise TemplateError(problem)
        return rendered

    def write_calls(self, calls: Sequence[Message], tools: Sequence[Any]) -> tuple[str, str]:
        """The prompt before a turn with calls as far as the template keeps it, and the turn; raises TemplateError."""
        whole = self.render([user_turn(QUESTION), assistant_turn("", tool_calls=list(calls))], tools=tools)
        asked = self.render([user_turn(QUESTION)], asks=True, tools=tools)
        # some templates leave out the thought that the prompt has opened
        for start in (asked, OPEN_THINK.sub("", asked), whole.rpartition(QUESTION)[0] + QUESTION):
            if whole.startswith(start):
                return start, whole[len(start) :]
        return "", whole

    def follow(
        self,
        messages: Sequence[Message],
        *,
        end: int | None,
        tools: Sequence[Any] = (),
        calls: Sequence[str] = (),
    ) -> str:
        """Text that the template writes after an answer: further messages and the head of the next answer.

        Args:
            messages: user messages, or results of the answer's calls, without control tokens.
            end: the token that ended the answer; None if the answer was cut off, so that its turn is closed here.
            tools: tools that the template describes.
            calls: names of the called functions, one for each result.

        Raises:
            UserError: the template does not show the earlier answer or the results.
            TemplateError: the template rejects the messages.
        """
        ended = None if end is None else str(self.tokenizer.convert_ids_to_tokens(end))
        # results of calls need the call in the turn before, which some templates check
        if calls:
            return self._results(messages, ended, tools, calls)
        # a marker instead of the answer: templates may strip or rewrite an earlier answer, but only the text
        # behind it is wanted
        before = [user_turn(QUESTION), assistant_turn(EARLIER)]
        whole = self.render([*before, *messages], asks=True, tools=tools)
        if whole.count(EARLIER) != 1:
            raise UserError(f"{self.blame} shows the assistant's turn {whole.count(EARLIER)} times instead of once")
        rest, close = whole.rpartition(EARLIER)[2], self.parts.written_close
        closed = self._length_of_close(rest) if close else 0
        return self._behind(ended, rest[:closed], rest[closed:])

    def render_history(self, messages: Sequence[Message], tools: Sequence[Any]) -> tuple[list[str], list[str]]:
        """Render a conversation with earlier answers, up to where the next one begins.

        Returns:
            The control tokens that placeholders stand for, and the text in pieces that are tokenised independently:
            each but the first begins with the special token behind a question.

        Raises:
            TemplateError: the template rejects the messages.
        """
        hidden, shown = hide_in_turns(messages, self.tokenizer, self.kept_tokens)
        text = self.render(shown, asks=True, tools=tools)
        special = control_pattern(self.tokenizer, NOTHING)
        first, added = special.search(self.parts.begin), self.tokenizer.added_tokens_decoder.values()
        # a token that takes the white space before it does not part the text there
        if first is None or any(t.lstrip and t.content == first[0] for t in added):
            return hidden, [text]
        return hidden, [piece for piece in re.split(f"(?={re.escape(first[0])})", text) if piece]

    @property
    def blame(self) -> str:
        """Name of the template in messages."""
        return f"the chat template of {self._name}"

    def _whole(self, content: str) -> str | None:
        """A complete answer after the head of the turn, without its end; None if the template does not show it."""
        begin = self.parts.begin
        # the answer as given, thought included; whether the template shows it unchanged is checked next
        verbatim = self._body(assistant_turn(content))
        if verbatim is not None and not _shows(begin + verbatim, content):
            verbatim = None
        thought = WHOLE_THOUGHT.match(content)
        if thought is None:
            return verbatim
        # an empty thought that the template has added would be learned
        if verbatim is not None and (begin + verbatim).count("<think>") > content.count("<think>"):
            verbatim = None  # the template has put an empty thought before the given one
        mark = self.parts.thought_mark
        if mark is not None and (verbatim is None or "<think>" not in mark):
            inner, rest = thought[1].strip(), thought[2]
            # under all three names, since templates differ in the one that they read
            own = self._body(assistant_turn(rest, reasoning_content=inner, thinking=inner, reasoning=inner))
            if own is not None and _shows(own, inner) and _shows(own.rpartition(inner)[2], rest):
                return own
        return verbatim

    def _behind_prompt(self, prompt_text: str, content: str) -> str:
        """An answer that the template cannot write after its own head, such as the rest of one already begun."""
        closed = prompt_text.rstrip().endswith("</think>")
        if closed and content.lstrip().startswith("<think>"):
            self.warn_once(
                "thought",
                "a given answer begins with a thought, but %s has already closed the thought in the prompt; set "
                "model.thinking=true, or remove the thoughts from the answers",
                self.blame,
            )
        return behind_open_thought(prompt_text, content)

    def _body(self, turn: Message) -> str | None:
        """The rendered turn without head and end; None if the template writes a different head or end."""
        parts = self.parts
        try:
            whole = self.render([user_turn(QUESTION), turn])
        except TemplateError:
            return None
        if not whole.startswith(parts.asked) or not whole.endswith(parts.tail):
            return None
        return whole[len(parts.asked) : len(whole) - len(parts.tail)]

    def _started(self, content: str) -> str | None:
        """The start of an answer after the head of the turn; None if it begins with a thought."""
        parts = self.parts
        if OPEN_THINK.search(parts.begin) or content.lstrip().startswith("<think>"):
            return None
        return parts.head + content

    def _is_native(self, content: str) -> bool:
        """Whether a given answer already begins with the special token of the template's head."""
        first = control_pattern(self.tokenizer, NOTHING).search(self.parts.head)
        return first is not None and content.lstrip().startswith(first[0]) and first[0] in self.kept_tokens

    def _results(
        self, messages: Sequence[Message], ended: str | None, tools: Sequence[Any], calls: Sequence[str]
    ) -> str:
        """Text for the results of calls, after a turn with these calls."""
        # checked once for each combination of calls, with marks that no template can lose unnoticed
        if tuple(calls) in self._shown:
            return self._behind_calls(messages, ended, tools, calls)
        marks = [{**turn, "content": [{"type": "text", "text": f"result{n}of"}]} for n, turn in enumerate(messages)]
        shown = self._behind_calls(marks, ended, tools, calls)
        lost = [n for n in range(len(marks)) if shown.count(f"result{n}of") != 1]
        if lost:
            raise UserError(
                f"{self.blame} drops tool results: of {len(marks)} results after a turn with calls of "
                f"{', '.join(calls)}, it does not show {len(lost)}; remove conversation.tools so that results come in "
                "user turns, or fix the template"
            )
        self._shown.add(tuple(calls))
        return self._behind_calls(messages, ended, tools, calls)

    def _behind_calls(
        self, messages: Sequence[Message], ended: str | None, tools: Sequence[Any], calls: Sequence[str]
    ) -> str:
        ids = [str(turn.get("tool_call_id") or call_id(number)) for number, turn in enumerate(messages)]
        named = [*zip(calls, ids, strict=True)]
        results = [
            turn | {"name": name, "tool_call_id": own} for turn, (name, own) in zip(messages, named, strict=True)
        ]
        called = [as_call(name, {}, own) for name, own in named]
        problems = list[TemplateError]()
        for asked in call_forms(called):
            try:
                return self._tail(results, asked, ended, tools)
            except TemplateError as error:
                problems.append(error)
        raise problems[0]

    def _tail(self, results: Sequence[Message], called: Sequence[Any], ended: str | None, tools: Sequence[Any]) -> str:
        # with a thought: Qwen3 leaves out the empty one of a turn once results follow it
        before = [user_turn(QUESTION), assistant_turn("", reasoning_content=THOUGHT, tool_calls=list(called))]
        earlier = self.render(before, tools=tools)
        whole = self.render([*before, *results], asks=True, tools=tools)
        last = [*control_pattern(self.tokenizer, NOTHING).finditer(earlier)][-1:]
        close = last[0][0] if last and not earlier[last[0].end() :].strip() else ""
        if close not in (*self.stops, self.parts.close, ended):  # a token that ends the call, not the turn
            close = ""
        cut = earlier.rpartition(close)[0] if close else earlier
        if not whole.startswith(cut):
            raise UserError(
                f"{self.blame} rewrites a turn with tool calls when results follow it; remove conversation.tools so "
                "that results come in user turns"
            )
        rest = whole[len(cut) :]
        close = close if rest.startswith(close) else ""
        return self._behind(ended, close, rest[len(close) :])

    def _behind(self, ended: str | None, close: str, rest: str) -> str:
        """Text after an answer, without the end token if the answer already has one."""
        if ended is None:
            return close + rest
        return rest if close else rest.removeprefix(ended)

    def _length_of_close(self, rest: str) -> int:
        """Number of characters after an answer that belong to the end of its turn."""
        if rest.startswith(self.parts.written_close):
            return len(self.parts.written_close)
        first = control_pattern(self.tokenizer, NOTHING).search(rest)  # gpt-oss ends earlier turns with another token
        return 0 if first is None else first.end()

    def _warn_of_characters(self, text: str) -> None:
        """Warn about special tokens in a given answer that are encoded as plain characters."""
        for match in control_pattern(self.tokenizer, self._kept_pattern).finditer(text):
            self.warn_once(
                match[0],
                "a given answer contains the special token %s, which does not belong to answers of %s, so its "
                "characters are learned instead of the token; add it to model.answer_tokens if it does belong to "
                "answers",
                match[0],
                self._name,
            )

    def warn_once(self, key: str, message: str, *values: str) -> None:
        """Warn about something, by its key, the first time that it is seen."""
        if key not in self._warned:
            self._warned.add(key)
            LOGGER.warning(message, *values)


class _Parts:
    """Text that a template writes around an answer."""

    def __init__(self, template: TurnTemplate) -> None:
        special = control_pattern(template.tokenizer, NOTHING)
        # empty in case the template rejects the probes: `problem` then says why answers cannot be written
        self.asked = self.begin = self.head = self.tail = self.close = self.written_close = self.past_head = ""
        self.thought_mark: str | None = None
        """Text from the head of the turn up to its thought; None if the template shows no thoughts."""
        self.written = set[str]()
        """Special tokens that the template writes into an answer."""
        self.ends_itself = True
        self.problem = ""
        try:
            self.asked = template.render([user_turn(QUESTION)], asks=True)
            whole = template.render([user_turn(QUESTION), assistant_turn(EARLIER)])
        except TemplateError as error:
            self.problem = str(error)
            return
        self.begin = self.asked.rpartition(QUESTION)[2]
        if whole.count(EARLIER) != 1:
            self.problem = "it does not show the assistant's turn"
            return
        before, _, self.tail = whole.partition(EARLIER)
        # empty if the template writes a question differently once an answer follows
        self.head = before.removeprefix(self.asked) if before.startswith(self.asked) else ""
        ends = [*special.finditer(self.tail)]
        # prefer a token at which the checkpoint stops; later tokens may already belong to the next turn
        end = next((match for match in ends if match[0] in template.stops), ends[0] if ends else None)
        self.close = self.written_close = self.tail.rstrip() if end is None else self.tail[: end.end()]
        self.ends_itself = end is not None  # with a special token, at which sampling can stop
        self._read_past(template, special)
        self._read_marks(template, special)

    def _read_past(self, template: TurnTemplate, special: re.Pattern[str]) -> None:
        """Read how a turn is written before another turn; GLM ends it only with the next role marker."""
        try:
            whole = template.render([user_turn(QUESTION), assistant_turn(EARLIER), user_turn(QUESTION)])
        except TemplateError:
            whole = ""
        before, _, after = whole.partition(EARLIER)
        # an earlier turn has no open thought, even if the template opens one for the next answer
        asked = OPEN_THINK.sub("", self.asked)
        self.past_head = before[len(asked) :] if before.startswith(asked) else ""
        first = special.search(after.partition(QUESTION)[0])
        if not self.ends_itself:
            self.close += first[0] if first is not None and first[0] in template.stops else template.stops[0]

    def _read_marks(self, template: TurnTemplate, special: re.Pattern[str]) -> None:
        """Collect the special tokens in heads, thoughts and calls."""
        # every name that templates use for a thought, each with the same text, so that one of them is shown
        fields = dict.fromkeys(("reasoning_content", "thinking", "reasoning"), THOUGHT)
        call = as_call("f", {"a": 1}, call_id(0))
        bodies = [self.head]
        for turn in (assistant_turn(EARLIER, **fields), assistant_turn("", tool_calls=[call])):
            try:
                whole = template.render([user_turn(QUESTION), turn])
            except TemplateError:
                continue
            if not whole.startswith(self.asked):
                continue
            body = whole[len(self.asked) :]
            if THOUGHT in body:
                self.thought_mark = self.begin + body.partition(THOUGHT)[0]
            bodies.append(body.rpartition(EARLIER)[0] if EARLIER in body else body)
        # ends of turns are no part of an answer, although every rendered answer has one
        stops = {*template.stops, *special.findall(self.tail), *special.findall(self.close)}
        self.written = {token for body in bodies for token in special.findall(body)} - stops


class TemplateError(Exception):
    """A chat template rejected a chat."""


def call_id(number: int) -> str:
    """Id of a call: nine letters and digits, as Mistral's templates require."""
    return f"call{number:05d}"


def as_call(name: str, arguments: Mapping[str, Any], id: str) -> Message:
    """A call as chat templates take it."""
    return {"type": "function", "id": id, "function": {"name": name, "arguments": dict(arguments)}}


def call_forms(calls: Sequence[Message]) -> Iterator[list[Message]]:
    """The calls of a turn in the forms that templates accept: all or one, with arguments as a mapping or as JSON."""
    # Llama 3.1 writes one call a turn
    for number in dict.fromkeys((len(calls), 1)):
        yield [*calls[:number]]
        # DeepSeek V3.1 appends the arguments to a text
        yield [with_json_arguments(call) for call in calls[:number]]


def with_json_arguments(call: Message) -> Message:
    """A call whose arguments are JSON text."""
    written = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return call | {"function": call["function"] | {"arguments": written}}


def with_json_calls(turn: Message) -> Message:
    """A turn whose calls, if it has any, have their arguments as JSON text."""
    calls = [with_json_arguments(call) for call in turn.get("tool_calls", ())]
    return turn | ({"tool_calls": calls} if calls else {})


def behind_open_thought(prompt_text: str, text: str) -> str:
    """Adapt a given answer to a prompt that opened a thought: drop its `<think>` tag, or close the thought first."""
    if OPEN_THINK.search(prompt_text) is None:
        return text
    if text.startswith("<think>"):
        return text.removeprefix("<think>").lstrip("\n")
    return text if "</think>" in text else f"\n</think>\n\n{text}"


def _as_text(turn: Message) -> Message:
    texts = turn["content"]
    if isinstance(texts, str) or any(part.get("type") != "text" for part in texts):
        return turn
    return turn | {"content": "".join(part["text"] for part in texts)}


def _texts(messages: Sequence[Message]) -> list[str]:
    contents = [[turn["content"]] if isinstance(turn["content"], str) else turn["content"] for turn in messages]
    return [item if isinstance(item, str) else item.get("text", "") for parts in contents for item in parts]


def _shows(rendered: str, text: str) -> bool:
    """Whether a rendering contains a text, ignoring white space."""
    return "".join(text.split()) in "".join(rendered.split())


def hide_control_tokens(
    messages: Sequence[Mapping[str, Any]], tokenizer: Any, kept: re.Pattern[str] = MARKUP
) -> tuple[list[str], list[dict[str, Any]]]:
    """Replace control tokens, and texts that look like placeholders, in messages with placeholders."""
    found = list[str]()
    hide = _hider(tokenizer, kept, found)
    return found, [{**turn, "content": hide(turn["content"])} for turn in messages]


def hide_in_turns(
    messages: Sequence[Message], tokenizer: Any, own: Sequence[str]
) -> tuple[list[str], list[dict[str, Any]]]:
    """`hide_control_tokens` for whole turns, thoughts and calls included; the assistant's keep their `own` tokens."""
    found = list[str]()
    answers = re.compile("|".join((MARKUP.pattern, *map(re.escape, own))))
    hide, hide_in_answers = _hider(tokenizer, MARKUP, found), _hider(tokenizer, answers, found)
    return found, [(hide_in_answers if turn["role"] == "assistant" else hide)(turn) for turn in messages]


def _hider(tokenizer: Any, kept: re.Pattern[str], found: list[str]) -> Callable[[Any], Any]:
    """A function that hides control tokens in texts, also inside lists and mappings, and appends them to `found`."""
    # a text could contain a placeholder: it is hidden as well, and so comes back unchanged
    control = control_pattern(tokenizer, kept).pattern
    # the marks of placeholders are hidden too: a text that contains one could otherwise pass for a control token
    pattern = re.compile(f"{control}|{EARLIER}|{HIDDEN}")

    def placeholder(match: re.Match[str]) -> str:
        found.append(match[0])
        return f"{HIDDEN}{len(found) - 1}{HIDDEN}"

    def hide(value: Any) -> Any:
        if isinstance(value, str):
            return pattern.sub(placeholder, value)
        if isinstance(value, Mapping):
            return {hide(name): hide(part) for name, part in value.items()}
        return [hide(part) for part in value] if isinstance(value, list) else value

    return hide


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
