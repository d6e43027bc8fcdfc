"""The conversation of an episode, as the prompts that the model reads turn by turn.

The `Writer` turns observations into prompts: the system turn, the first observation with the instruction, and then an
observation per turn. What the model reads before a turn is a context. Usually each turn extends the context of the turn
before; it begins again if the window of turns or images moves on, or if the chat template rewrites earlier turns:

    history: append                      question answer result answer result answer ...      one context
    history_turns: 1                     question                answer result answer         a context per turn
    history: template, thoughts dropped  question rewritten answer  result answer             a context per rewriting
"""

from __future__ import annotations

import bisect
import copy
import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from mmrl.agents.environments.agent_tasks import AgentTask
from mmrl.agents.environments.environment import Action, ActionConfig, Observation, ParsedAnswer
from mmrl.agents.environments.native_calls import NativeAnswer, read_native
from mmrl.agents.rollout.contexts import ResultClipper, as_message, settle_notice
from mmrl.agents.rollout.tool_template import ToolTemplate, write_call
from mmrl.errors import UserError
from mmrl.fields import bounded, choice
from mmrl.rewards.answers import final_part, with_think_tags
from mmrl.vlm.data.prompt import Prompt, join_prompts, leaves
from mmrl.vlm.data.task import ImageSource, VlmTask
from mmrl.vlm.data.turn_template import Message, TemplateError, call_id, with_json_calls
from mmrl.vlm.engine.rows import text_prompt
from mmrl.vlm.engine.vlm_policy import VlmPolicy

PROMPT_END = 100
"""Characters of a prompt in which an opened thought is looked for."""
OMITTED = "[picture left out]"
"""Replaces an image that has left the history."""


HISTORIES = ("append", "template")


@dataclass
class ConversationConfig:
    """How an episode is written as a conversation."""

    system: str = "You act in an environment. {manual}\nActions:\n{actions}"
    """System turn. {manual} is replaced by the manual of the action format and {actions} by the environment's actions,
    one per line. Empty: no system turn."""
    history_images: int = bounded(0, at_least=0)
    """Number of images to keep; older images are omitted, their text stays. 0 = all. A limit costs time: once it is
    reached, every turn re-reads the conversation from the beginning."""
    history_turns: int = bounded(0, at_least=0)
    """Number of earlier turns to keep, each a response and what followed it, besides the first observation with the
    task; older turns are omitted. 0 = all. A limit costs time, as that of images does."""
    max_result_tokens: int = bounded(0, at_least=0)
    """Maximum number of tokens of a tool's result, or of the text of an observation after the first. Longer ones lose
    their middle, and a mark says how many tokens were left out. 0 = no limit."""
    budget_notice: bool = False
    """Whether every observation after the first ends with the turns left in the episode and the tokens left in the
    model's context: `[3 turns, 1250 tokens left]`."""
    history: str = choice("append", HISTORIES)
    """append: a conversation keeps its tokens as they were sampled, and each turn adds to them; template: the model's
    chat template renders the conversation before every turn, as in deployment. If that changes earlier tokens, such as
    those of thoughts, the turn re-reads the conversation from the beginning."""
    drop_thoughts: bool = False
    """Whether to remove the thoughts of earlier responses, as the chat templates of thinking models do. Every turn then
    re-reads the conversation from the beginning."""
    tools: bool = False
    """Whether the chat template describes the environment's `tools` to the model and their results are returned with
    role `tool`, all results of one response together."""

    def check(self) -> None:
        """Reject options that exclude each other; raises ValueError."""
        if self.history == "template" and self.drop_thoughts:
            raise ValueError(
                "with conversation.history: template, the chat template decides which thoughts stay; remove "
                "conversation.drop_thoughts"
            )

    def contexts(self) -> str:
        """The options that shorten or rewrite contexts, as text; empty if none does."""
        names = ("history_turns", "history_images", "max_result_tokens", "budget_notice", "drop_thoughts")
        given = {name: getattr(self, name) for name in names if getattr(self, name)}
        given |= {"history": self.history} if self.history == "template" else {}
        return ", ".join(f"conversation.{name}: {value}" for name, value in given.items())

    @property
    def restarts(self) -> str:
        """The first option by which contexts may begin again; empty if every turn extends the one before."""
        given = {"history": self.history == "template"}
        given |= {name: getattr(self, name) for name in ("history_turns", "history_images", "drop_thoughts")}
        return next((name for name, value in given.items() if value), "")

    def system_text(self, actions: ActionConfig, known: Mapping[str, str]) -> str:
        """The system turn."""
        listed = "\n".join(f"- {name}: {about}" if about else f"- {name}" for name, about in known.items())
        return self.system.replace("{manual}", actions.manual).replace("{actions}", listed).strip()


@dataclass
class ConversationPart:
    """An observation or an answer."""

    prompt: Prompt
    """Its tokens, with all images."""
    observation: Observation | None = None
    """None for an answer."""
    note: str = ""
    """Text before the observation's text: the instruction, or why an answer could not be read."""
    end: int | None = None
    """For an observation, the token that ended the previous answer; None if that was cut."""
    spoken: Prompt | None = None
    """An answer without its thoughts, if it has any and they are dropped."""
    notice: str = ""
    """Text after the observation's text: the budget that is left."""
    said: Message | None = None
    """An answer as a turn of the assistant, once it was read."""

    @functools.cached_property
    def image_keys(self) -> list[tuple[Any, ...]]:
        """A key of each image of an observation."""
        return _image_keys(() if self.observation is None else self.observation.images)


@dataclass(frozen=True)
class Transcript:
    """A finished episode as chat turns, for reward functions."""

    prompt: list[dict[str, Any]]
    """The system turn and the first observation."""
    completion: list[dict[str, Any]]
    """Responses and later observations alternately, up to the observation after the last action."""
    images: list[NDArray[np.uint8]]
    """(H, W, 3) RGB of all turns, in order."""


@dataclass
class Conversation:
    """One episode's conversation so far."""

    task: AgentTask
    parts: list[ConversationPart] = field(default_factory=list)
    num_omitted: int = 0
    """Images that the window has omitted so far."""
    first_kept: int = 1
    """Index of the first part after the task that the window of turns has left."""
    read: list[Prompt] = field(default_factory=list)
    """The current context in pieces."""
    restart: Prompt | None = None
    """The current context, if the last observation began it again."""

    @property
    def num_images(self) -> int:
        """Images shown so far."""
        return sum(len(part.observation.images) for part in self.parts if part.observation is not None)

    @property
    def turns(self) -> int:
        """Responses so far."""
        return sum(part.observation is None for part in self.parts)

    @property
    def length(self) -> int:
        """Tokens of the current context."""
        return sum(map(len, self.read))


class Writer:
    """Writes conversations for a policy; an observation that occurs in several of them is encoded once.

    Args:
        policy: its processor and chat template encode the turns.
        config: options of the conversation.
        system: text of the system turn; empty for none.
        tools: JSON schemas of the tools.
        native: format of the model's own tool calls, key of `CALL_FORMATS`; empty if they are not read.
        template: how the chat template handles tools, for `history: template`.
        max_turns: turns of an episode, for `budget_notice`.
        known: JSON schemas of the environment's actions, which name arguments that a response gives without names.

    Raises:
        UserError: `max_result_tokens` is too small for the mark.
    """

    def __init__(
        self,
        policy: VlmPolicy,
        config: ConversationConfig,
        system: str,
        tools: Sequence[dict[str, Any]] = (),
        native: str = "",
        *,
        template: ToolTemplate | None = None,
        max_turns: int = 0,
        known: Sequence[dict[str, Any]] = (),
    ) -> None:
        self._policy = policy
        self._config = config
        self._system = system
        self.tools = list(tools)
        self._known = [*known]
        self.native = native
        """Format of the model's own tool calls, key of `CALL_FORMATS`; empty if they are not read."""
        self._template = template
        self._max_turns = max_turns
        if config.budget_notice and not max_turns:
            raise ValueError("conversation.budget_notice needs the maximum number of turns")
        limit = config.max_result_tokens
        self._clip = ResultClipper(policy.processor.tokenizer, limit) if limit else str
        self._turns: dict[tuple[object, ...], Prompt] = {}
        self._pieces: dict[Any, Prompt] = {}
        self._noticed: dict[tuple[object, ...], Prompt] = {}
        """Observations with a budget notice, until one notice has the right number."""

    def fresh(self) -> Self:
        """A copy that has not encoded anything yet."""
        copied = copy.copy(self)
        copied._turns, copied._pieces, copied._noticed = {}, {}, {}
        return copied

    def begin(self, task: AgentTask, observation: Observation, prompt: Prompt | None = None) -> Conversation:
        """Start a conversation."""
        first = self._first(task, observation, observation.images) if prompt is None else prompt
        return Conversation(task, [ConversationPart(first, observation, task.instruction)], read=[first])

    def answer(self, conversation: Conversation, ids: list[int]) -> None:
        """Append the tokens of a response."""
        # the sampled tokens stay in the trajectory; only the history for later turns loses its thoughts
        spoken = self._spoken(conversation.parts[-1].prompt, ids) if self._config.drop_thoughts else None
        said = text_prompt(torch.tensor(ids, dtype=torch.int64))
        conversation.parts.append(ConversationPart(said, spoken=spoken))
        conversation.read.append(said)

    def parse(
        self, conversation: Conversation, actions: ActionConfig, ids: list[int], text: str, finish: str
    ) -> ParsedAnswer:
        """The actions of the last response."""
        if self.native:
            return actions.accept(self.read(conversation, ids, finish, self.tools), text, finish == "length")
        return actions.parse(text, cut=finish == "length", tools=self._known)

    def read(
        self, conversation: Conversation, ids: list[int], finish: str, tools: Sequence[dict[str, Any]]
    ) -> NativeAnswer:
        """The calls in the tokens of the last response, which have control tokens that its text lacks."""
        return self._read(ids, conversation.parts[-2].prompt, self.native, tools, finish)

    def write(self, action: Action) -> str:
        """The response in which an expert's action is learned; raises UserError if the template cannot write it."""
        return write_call(self._policy.turns, self.tools, self.native, action) if self.native else action.text

    def follow(self, conversation: Conversation, observation: Observation, note: str = "") -> Prompt:
        """Append the next observation."""
        # An answer that was cut has no end token; the observation's turn then has to supply one.
        last = int(conversation.parts[-1].prompt.input_ids[-1])
        end = last if last in self._policy.eos_ids else None

        def append(notice: str) -> int:
            """Append the observation with a notice; returns the tokens left behind it."""
            prompt = self._turn(conversation.task, observation, observation.images, note, end, notice)
            conversation.parts.append(ConversationPart(prompt, observation, note, end, notice=notice))
            conversation.restart = self._restart(conversation)
            read = conversation.length + len(prompt) if conversation.restart is None else len(conversation.restart)
            return self._policy.positions - read

        def try_notice(notice: str) -> int:
            left = append(notice)
            conversation.parts.pop()
            return left

        notice = ""
        if self._config.budget_notice:
            room = self._policy.positions - conversation.length
            notice = settle_notice(self._max_turns - conversation.turns, room, try_notice)
        append(notice)
        self._noticed.clear()
        conversation.first_kept, conversation.num_omitted = self._window(conversation)
        part, restart = conversation.parts[-1].prompt, conversation.restart
        conversation.read = [*conversation.read, part] if restart is None else [restart]
        return part

    def cut(self, conversation: Conversation) -> Prompt | None:
        """The conversation as one prompt if the last observation began it again, shortened or rewritten; else None."""
        return conversation.restart

    def _window(self, conversation: Conversation) -> tuple[int, int]:
        """Index of the first part that stays after the task, and the number of images that are omitted."""
        turns, images, count = self._config.history_turns, self._config.history_images, len(conversation.parts)
        # 0 to keep means all of them; a turn is an answer and what followed it
        first = max(count - 2 * turns, 1) if turns else 1
        return first, max(conversation.num_images - images, 0) if images else 0

    def _restart(self, conversation: Conversation) -> Prompt | None:
        """The conversation as one prompt, with the window moved on or as the template writes it; None if it extends."""
        first, excess = self._window(conversation)
        numbers = [0, *range(first, len(conversation.parts))]
        if self._config.history == "template":
            try:
                return self._rewritten(conversation, numbers, excess)
            except TemplateError as error:
                self._policy.turns.warn_once(
                    "rejected conversation",
                    "%s rejects a conversation, which keeps its tokens as with conversation.history: append: %s",
                    self._policy.turns.blame,
                    str(error),
                )
        moved = first > conversation.first_kept or excess > conversation.num_omitted
        # parts[-2] is the answer before the new observation: only its thoughts can be new to drop.
        if not moved and conversation.parts[-2].spoken is None:
            return None
        return join_prompts(
            [
                self._kept(conversation, number, following, excess)
                for number, following in itertools.zip_longest(numbers, numbers[1:])
            ]
        )

    def _rewritten(self, conversation: Conversation, numbers: Sequence[int], excess: int) -> Prompt | None:
        """The parts of these numbers as the template writes them; None if that continues the current context."""
        messages: list[Message] = [{"role": "system", "content": self._system}] if self._system else []
        images: list[NDArray[np.uint8]] = []
        keys: list[Any] = []
        for number in numbers:
            part = conversation.parts[number]
            if part.observation is None:
                # once: a long conversation is written again in each of its turns
                part.said = part.said or self._said(conversation, number)
                messages.append(part.said)
                continue
            gone = self._omitted(conversation, number, excess)
            kept = part.observation.images[gone:]
            images += kept
            keys += part.image_keys[gone:]
            if number:
                messages += self._messages(part.observation, len(kept), part.note, part.notice)
            else:
                messages.append(_user_turn(part.observation, len(kept), part.note))
        task = VlmTask(conversation.task.id, messages, self._sources(tuple(images)), tools=self.tools)
        whole = self._encode_history(task, keys)
        own = torch.cat([piece.input_ids for piece in (*conversation.read, conversation.parts[-1].prompt)])
        return None if torch.equal(whole.input_ids, own) else whole

    def _encode_history(self, task: VlmTask, keys: Sequence[Any]) -> Prompt:
        try:
            return self._policy.encode_history(task, self._pieces, keys)
        except TemplateError:
            # some templates take the arguments of calls only as JSON text
            written = [with_json_calls(turn) for turn in task.messages]
            if written == task.messages:
                raise
            return self._policy.encode_history(dataclasses.replace(task, messages=written), self._pieces, keys)

    def _said(self, conversation: Conversation, number: int) -> Message:
        """An earlier answer as a turn of the assistant."""
        before, ids = conversation.parts[number - 1].prompt, conversation.parts[number].prompt.input_ids.tolist()
        seen, turns, template = conversation.parts[number + 1].observation, self._policy.turns, self._template
        assert seen is not None
        # without their schemas: arguments stay as they were written
        names = [{"function": {"name": tool["function"]["name"]}} for tool in self.tools]
        return as_message(
            before.answer_start + turns.decode([ids])[0],
            self._read(ids, before, template.format, names) if template is not None and template.format else None,
            seen,
            has_thoughts=turns.parts.thought_mark is not None,
            most=len(seen.results) if template is not None and template.parallel else 1,
        )

    def _read(
        self, ids: list[int], before: Prompt, format: str, tools: Sequence[dict[str, Any]], finish: str = "eos"
    ) -> NativeAnswer:
        tokenizer = self._policy.processor.tokenizer
        return read_native(
            tokenizer.decode(ids, skip_special_tokens=False),
            format,
            tools,
            prompt_end=before.text[-PROMPT_END:],
            finish=finish,
            ends=tokenizer.convert_ids_to_tokens(list(self._policy.eos_ids)),
        )

    def transcript(self, conversation: Conversation, answers: Sequence[str], last: Observation | None) -> Transcript:
        """The whole conversation, with the observation after its last action, which the agent has not read."""
        seen = [(part.observation, part.note) for part in conversation.parts if part.observation is not None]
        # If the last part is an observation, it is `last` itself, appended for the critic.
        if last is not None and (last.text or last.images) and conversation.parts[-1].observation is None:
            # the agent never read it, but a reward function judges the state that the last action led to
            seen.append((last, ""))
        images = [image for observation, _ in seen for image in observation.images]
        observed = [
            _user_turn(observation, len(observation.images), note)
            | {"role": "tool" if number and self.tools and observation.results else "user"}
            for number, (observation, note) in enumerate(seen)
        ]
        if not images:  # as in TRL
            observed = [turn | {"content": turn["content"][-1]["text"]} for turn in observed]
        said = [{"role": "assistant", "content": answer} for answer in answers]
        # the last answer has no observation after it, or an observation no answer, hence `zip_longest`
        turns = list(filter(None, itertools.chain(*itertools.zip_longest(observed, said))))
        system = [{"role": "system", "content": self._system}] if self._system else []
        return Transcript([*system, turns[0]], turns[1:], images)

    def _messages(self, observation: Observation, kept: int, note: str, notice: str) -> list[Message]:
        """A further observation with its last `kept` images: a turn of the user, or one for each result of a tool."""
        if not self.tools or note or not observation.results:
            text = "\n".join(filter(None, (self._clip(observation.text), notice)))
            return [_user_turn(dataclasses.replace(observation, text=text), kept, note)]
        omitted, turns = len(observation.images) - kept, []
        for number, result in enumerate(observation.results):
            # the oldest images go first, also among the results of one turn
            omitted -= (gone := min(omitted, result.images))
            behind = notice if number + 1 == len(observation.results) else ""
            text = "\n".join(filter(None, (self._clip(result.text), behind)))
            own = {"role": "tool", "name": result.name, "tool_call_id": result.call_id or call_id(number)}
            turns.append(_turn_of(text, gone, result.images - gone) | own)
        return turns

    def _kept(self, conversation: Conversation, number: int, following: int | None, excess: int) -> Prompt:
        """A part as it stays in the history, before the part with the number `following`."""
        part = conversation.parts[number]
        if part.observation is None:
            return part.prompt if part.spoken is None else part.spoken
        shown = self._without(conversation, number, excess)
        followed = following is not None and conversation.parts[following].spoken is not None
        return self._without_open_thought(shown) if followed else shown

    def _spoken(self, prompt: Prompt, ids: list[int]) -> Prompt | None:
        """An answer without its thoughts; None if it has no thoughts."""
        text = with_think_tags(prompt.answer_start + self._policy.turns.decode([ids])[0])
        spoken = final_part(text)
        if spoken == text:
            return None
        return text_prompt(torch.tensor(self._past_answer(ids, (spoken or "").lstrip("\n")), dtype=torch.int64))

    def _past_answer(self, ids: list[int], text: str) -> list[int]:
        """Tokens of an earlier answer of which only `text`, its end, stays; as far as possible, the sampled ones.

        Encoded again, control tokens would become characters, and characters that look like them control tokens.
        """
        turns = self._policy.turns
        # the first of the tokens whose text is no longer than what stays
        first = bisect.bisect_left(range(len(ids)), -len(text), key=lambda at: -len(turns.decode([ids[at:]])[0]))
        shown = turns.decode([ids[first:]])[0]
        if text.endswith(shown):
            before = text.removesuffix(shown)
            # a space that decoding leaves out before the first word is part of its token
            word = "".join(turns.tokenizer.convert_ids_to_tokens(ids[first : first + 1]))
            return [*turns.encode_past("" if before == " " and word.startswith("\u2581") else before), *ids[first:]]
        # The end token is copied from the sampled ids: the turn after it was encoded to follow exactly this token.
        return [*turns.encode_past(text), *(token for token in ids[-1:] if token in self._policy.eos_ids)]

    def _without_open_thought(self, prompt: Prompt) -> Prompt:
        """A prompt without the `<think>` that it ends with; it shares its images' features with the whole one."""
        start = prompt.answer_start
        ids = self._policy.processor.tokenizer.encode(start, add_special_tokens=False)
        # Tokens are cut off, not encoded again; that is exact only if the tokenizer did not merge across the boundary.
        kept = len(prompt) - len(ids)
        if prompt.input_ids[kept:].tolist() != ids:
            raise UserError(f"conversation.drop_thoughts: the tokenizer merges {start!r} with the text before it")
        return dataclasses.replace(
            prompt,
            input_ids=prompt.input_ids[:kept],
            mm_token_type_ids=prompt.mm_token_type_ids[:kept],
            position_ids=prompt.position_ids[:, :kept],
            next_position=prompt.next_position - len(ids),
            media={},
            text=prompt.text.removesuffix(start),
            # the images' features are computed per leaf prompt: new objects would be encoded again
            parts=leaves(prompt),
        )

    def _without(self, conversation: Conversation, number: int, excess: int) -> Prompt:
        """An observation without its images that are among the first `excess` images of the conversation."""
        part, gone = conversation.parts[number], self._omitted(conversation, number, excess)
        assert part.observation is not None
        # the very object, whose features are already known
        if not gone:
            return part.prompt
        kept = part.observation.images[gone:]
        if number == 0:
            return self._first(conversation.task, part.observation, kept)
        return self._turn(conversation.task, part.observation, kept, part.note, part.end, part.notice)

    def _omitted(self, conversation: Conversation, number: int, excess: int) -> int:
        """Images of an observation among the first `excess` images of the conversation."""
        counts = [len(part.observation.images) if part.observation else 0 for part in conversation.parts[: number + 1]]
        return min(max(excess - sum(counts[:-1]), 0), counts[-1])

    def _first(self, task: AgentTask, observation: Observation, images: tuple) -> Prompt:
        messages = [{"role": "system", "content": self._system}] if self._system else []
        turn = _user_turn(observation, len(images), task.instruction)
        return self._policy.encode(VlmTask(task.id, [*messages, turn], self._sources(images), tools=self.tools))

    def _turn(
        self, task: AgentTask, observation: Observation, images: tuple, note: str, end: int | None, notice: str
    ) -> Prompt:
        seen = tuple(_image_keys(images))
        key = (note, observation.text, observation.results, len(observation.images), end, seen, notice)
        known = self._noticed if notice else self._turns
        if key not in known:  # one object, so that its images pass the vision tower once, too
            messages = self._messages(observation, len(images), note, notice)
            turn = VlmTask(task.id, messages, self._sources(images), tools=self.tools)
            known[key] = self._policy.encode_turn(turn, answered=end is not None, end=end)
        return known[key]

    def _sources(self, images: tuple) -> list[ImageSource]:
        if images:
            self._policy.check_reads_media("an observation of the environment has an image")
        return [Image.fromarray(image) for image in images]


def _image_keys(images: Sequence[NDArray[np.uint8]]) -> list[tuple[Any, ...]]:
    # The shape belongs to the key: two images of different shapes can have the same bytes.
    return [(image.shape, blake2b(image.tobytes()).digest()) for image in images]


def _user_turn(observation: Observation, kept: int, front: str) -> dict[str, Any]:
    text = "\n".join(filter(None, (front, observation.text)))
    return _turn_of(text, len(observation.images) - kept, kept)


def _turn_of(text: str, omitted: int, shown: int) -> dict[str, Any]:
    left_out = [{"type": "text", "text": f"{OMITTED}\n"}] * omitted
    return {"role": "user", "content": [*left_out, *[{"type": "image"}] * shown, {"type": "text", "text": text}]}
