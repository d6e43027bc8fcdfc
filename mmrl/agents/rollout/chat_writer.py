"""Conversations that an agent program writes: its requests as prompts, and the policy's answers as replies.

The sampled tokens of every answer are kept. A request whose messages continue those of an answer, the latest or an
earlier one, is read behind these very tokens. The messages of any other request, such as one with a shortened history,
are rendered as a prompt of their own. Either way, a sampled token belongs to one turn and is trained once:

    question, answer 1, results, answer 2    each is read behind the other
    question, answer 1, remark, answer 3     a branch: reads answer 1 again and trains answer 3
    other messages, answer 4                 a new prompt

A branch restarts the trajectory with `Context`: it is scored as a separate row and gets the advantage of its episode.

Source: PrimeIntellect-ai/verifiers and NovaSky-AI/SkyRL, which also keep sampled tokens and make a row of each branch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mmrl.agents.environments.agent_tasks import AgentTask
from mmrl.agents.environments.environment import NATIVE, Action, ActionConfig, Observation, ParsedAnswer
from mmrl.agents.environments.native_calls import NativeAnswer, ToolCall
from mmrl.agents.environments.programs import REPLY
from mmrl.agents.rollout.conversation import Conversation, ConversationConfig, ConversationPart, Transcript, Writer
from mmrl.errors import UserError
from mmrl.rewards.answers import final_part, with_think_tags
from mmrl.vlm.data.prompt import Prompt, join_prompts
from mmrl.vlm.data.task import TaskError, VlmTask
from mmrl.vlm.data.turn_template import call_id, with_json_calls
from mmrl.vlm.engine.vlm_policy import VlmPolicy
from mmrl.vlm.engine.vlm_sampler import SamplerConfig

Message = dict[str, Any]


def settle_chat(conversation: ConversationConfig, actions: ActionConfig) -> None:
    """Set how answers to a program are read, and reject options that have no effect; raises UserError."""
    format = NATIVE if conversation.tools else "text"
    settled = ActionConfig(format=format, on_parse_error="noop")
    for name, own, usual in (
        ("conversation", conversation, [ConversationConfig(tools=conversation.tools)]),
        ("actions", actions, [ActionConfig(), ActionConfig(format=format), settled]),
    ):
        if own not in usual:
            changed = [item.name for item in fields(own) if getattr(own, item.name) != getattr(usual[0], item.name)]
            listed = ", ".join(f"{name}.{key}" for key in changed)
            raise UserError(
                f"an agent program writes its messages and reads the answers itself, so {listed} has no effect; "
                "remove it"
            )
    # the program decides what follows an answer that was cut or has an invalid call
    actions.format, actions.on_parse_error = settled.format, settled.on_parse_error


class _Request(NamedTuple):
    """A request of the program."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    settings: Mapping[str, Any]


@dataclass
class _Turn:
    """A request and its answer."""

    request: _Request
    parent: int
    """Turn whose answer it continues; -1 if its messages are a prompt of their own."""
    given: Prompt
    """Its messages behind the parent's answer, or all of them."""
    shown: int
    """Number of its last messages that are in `given`."""
    image_start: int = 0
    """Number of its images that are not in `given`."""
    keys: list[object] = field(default_factory=list)
    """Its messages, and the reply once there is one, in a form that is equal if they say the same."""
    answer: Prompt | None = None
    """The sampled tokens."""


@dataclass
class ChatConversation(Conversation):
    """An episode's requests and answers so far."""

    exchanges: list[_Turn] = field(default_factory=list)
    calls: int = 0
    """Calls so far, by which those without an id are numbered."""


class ChatWriter(Writer):
    """Writes the conversations of agent programs.

    Args:
        policy: samples the answers.
        config: conversation; only `tools` has an effect.
        sampler: sampling of training, which requests must not contradict.
        native: format of the model's own tool calls; empty without tools.
    """

    def __init__(self, policy: VlmPolicy, config: ConversationConfig, sampler: SamplerConfig, native: str = "") -> None:
        super().__init__(policy, config, "", native=native)
        self._sampler = sampler

    def begin(self, task: AgentTask, observation: Observation, prompt: Prompt | None = None) -> ChatConversation:
        """Start a conversation with the first request."""
        if task.instruction:
            raise UserError(f"{task.id} has an instruction, which an agent program does not get; make it a task entry")
        request = self._read_request(observation)
        whole = self._whole(task, request, observation) if prompt is None else prompt
        conversation = ChatConversation(task, [ConversationPart(whole, observation)])
        conversation.exchanges.append(_Turn(request, -1, whole, len(request.messages), keys=_keys(request.messages)))
        return conversation

    def answer(self, conversation: Conversation, ids: list[int]) -> None:
        """Keep the tokens of an answer."""
        super().answer(conversation, ids)
        _chat(conversation).exchanges[-1].answer = conversation.parts[-1].prompt

    def parse(
        self, conversation: Conversation, actions: ActionConfig, ids: list[int], text: str, finish: str
    ) -> ParsedAnswer:
        """The last answer as a reply to the program; it has an error if a call in it cannot be executed."""
        own, cut = _chat(conversation), finish == "length"
        turn, calls = own.exchanges[-1], list[ToolCall]()
        rest = final_part(text)
        thought, content = (with_think_tags(text), "") if rest is None else (text.removesuffix(rest), rest.strip())
        if self.native:
            found = self.read(conversation, ids, finish, turn.request.tools)
            parsed = actions.accept(found, text, cut)
            # what is cut off may be part of another call
            calls = [] if cut else _readable(found)
            # a program reads calls that nobody can read as text
            if calls or not found.calls:
                thought, content = found.thought, found.text
        else:
            parsed = actions.parse(text, cut=cut)
        if finish == "stop":
            # as in the API, a text ends before its stop string
            content = content.removesuffix(next(filter(content.endswith, self._sampler.stop), ""))
        listed = [_listed(call, own.calls + number) for number, call in enumerate(calls)]
        own.calls += len(calls)
        reply = {
            "content": content,
            "reasoning": thought.strip().removeprefix("<think>").removesuffix("</think>").strip(),
            "tool_calls": listed,
            "finish_reason": "length" if cut else "tool_calls" if calls else "stop",
            "prompt_tokens": sum(map(len, self._path(own, len(own.exchanges) - 1))) - len(ids),
            "completion_tokens": len(ids),
        }
        functions = [(call.name, dict(call.arguments)) for call in calls]
        turn.keys.append(("assistant", content.strip(), _call_keys(functions)))
        return ParsedAnswer((Action(REPLY, reply, text),), parsed.thought, parsed.error, parsed.detail)

    def follow(self, conversation: Conversation, observation: Observation, note: str = "") -> Prompt:
        """Append the next request."""
        own, request = _chat(conversation), self._read_request(observation)
        keys = _keys(request.messages)
        parent = _parent(own.exchanges, request, keys)
        new = request.messages[len(own.exchanges[parent].keys) :] if parent >= 0 else request.messages
        kinds = {message["role"] for message in new}
        # other messages have no place behind an answer whose turn is still open
        if parent >= 0 and kinds in ({"tool"}, {"user"}):
            given = self._behind(own, parent, request, new, observation)
            latest = parent == len(own.exchanges) - 1
            own.restart = None if latest else join_prompts([*self._path(own, parent), given])
        else:
            parent, new = -1, request.messages
            given = own.restart = self._whole(conversation.task, request, observation)
        start = len(observation.images) - _count_images(new)
        own.exchanges.append(_Turn(request, parent, given, len(new), start, keys))
        conversation.parts.append(ConversationPart(given, observation))
        return given

    def transcript(self, conversation: Conversation, answers: Sequence[str], last: Observation | None) -> Transcript:
        """First request, answers, and what each further request added; a branch adds all messages behind its start."""
        turns, images = _chat(conversation).exchanges, list[NDArray[np.uint8]]()
        shown = list[list[Message]]()
        for turn, part in zip(turns, conversation.parts[::2], strict=True):
            assert part.observation is not None
            images += part.observation.images[turn.image_start :]
            shown.append(turn.request.messages[-turn.shown :])
        written = [[_plain(message) for message in new] if not images else new for new in shown]
        said = [{"role": "assistant", "content": answer} for answer in answers]
        rest = [[answer, *new] for answer, new in zip(said, [*written[1:], []], strict=False)]
        return Transcript(written[0], [message for part in rest for message in part], images)

    def _read_request(self, observation: Observation) -> _Request:
        request = _Request(**json.loads(observation.request))
        check_settings(request.settings, self._sampler)
        if request.tools and not self.native:
            raise UserError("the program's request has tools; set conversation.tools: true")
        return request

    def _whole(self, task: AgentTask, request: _Request, observation: Observation) -> Prompt:
        """All messages as a prompt."""
        # some templates take the arguments of calls as a mapping, others as JSON text
        forms: list[Callable[[Message], Message]] = [lambda message: message, with_json_calls]
        problem: TaskError | None = None
        for form in forms if any("tool_calls" in message for message in request.messages) else forms[:1]:
            messages = [form(_plain(turn) if turn["role"] == "system" else turn) for turn in request.messages]
            try:
                images = self._sources(observation.images)
                return self._policy.encode(VlmTask(task.id, messages, images, tools=request.tools))
            except TaskError as error:
                problem = problem or error
                if error.kind == "prompt_too_long":
                    break
        assert problem is not None
        raise problem

    def _behind(
        self, own: ChatConversation, parent: int, request: _Request, new: list[Message], observation: Observation
    ) -> Prompt:
        """Messages behind the answer of a turn."""
        answer = own.exchanges[parent].answer
        assert answer is not None
        # an answer that was cut has no end token, and the message then supplies one
        last = int(answer.input_ids[-1])
        end = last if last in self._policy.eos_ids else None
        images = observation.images[len(observation.images) - _count_images(new) :]
        turn = VlmTask(own.task.id, new, self._sources(images), tools=request.tools)
        return self._policy.encode_turn(turn, answered=end is not None, end=end)

    def _path(self, own: ChatConversation, number: int) -> list[Prompt]:
        """Everything that the model has read and written up to the answer of a turn."""
        turn = own.exchanges[number]
        before = self._path(own, turn.parent) if turn.parent >= 0 else []
        return [*before, turn.given, *([] if turn.answer is None else [turn.answer])]


def check_settings(settings: Mapping[str, Any], sampler: SamplerConfig) -> None:
    """Reject a request that would be sampled in another way than the run samples; raises UserError."""
    for name, value in settings.items():
        if name in ("max_tokens", "max_completion_tokens"):
            # more is fine: the finish reason says where the run's limit has cut an answer
            if not isinstance(value, int) or value < sampler.max_new_tokens:
                raise UserError(
                    f"the program's request has {name}={value!r}, but the run samples up to {sampler.max_new_tokens} "
                    "tokens; leave it out or set sampler.max_new_tokens"
                )
        elif name not in SETTINGS:
            raise UserError(
                f"the program's request has {name}={value!r:.80}, which the policy does not take; remove it"
            )
        elif value != (own := SETTINGS[name](sampler)) and [value] != own:
            there = f"; leave it out or set sampler.{name}" if hasattr(sampler, name) else "; leave it out"
            raise UserError(f"the program's request has {name}={value!r:.80}, but the run samples with {own!r}{there}")


SETTINGS: dict[str, Callable[[SamplerConfig], Any]] = {
    "temperature": lambda sampler: sampler.temperature,
    "top_p": lambda sampler: sampler.top_p,
    "top_k": lambda sampler: sampler.top_k,
    "stop": lambda sampler: sampler.stop,
    "n": lambda _: 1,
    "presence_penalty": lambda _: 0,
    "frequency_penalty": lambda _: 0,
    "logit_bias": lambda _: {},
    "logprobs": lambda _: False,
    "tool_choice": lambda _: "auto",
    "parallel_tool_calls": lambda _: True,
    "response_format": lambda _: {"type": "text"},
}
"""Settings of a request that may be given, and what they must be."""


def _chat(conversation: Conversation) -> ChatConversation:
    assert isinstance(conversation, ChatConversation)
    return conversation


def _parent(turns: Sequence[_Turn], request: _Request, keys: list[object]) -> int:
    """The latest turn with the longest conversation that a request continues; -1 if there is none."""
    fitting = [
        (len(turn.keys), number)
        for number, turn in enumerate(turns)
        if len(turn.keys) < len(keys) and turn.keys == keys[: len(turn.keys)] and turn.request.tools == request.tools
    ]
    return max(fitting, default=(0, -1))[1]


def _keys(messages: Sequence[Message]) -> list[object]:
    """Messages in a form that is equal if they say the same: without ids and thoughts, which clients change or drop."""
    found = list[object]()
    for message in messages:
        content = "".join(part.get("text", part.get("digest", "")) for part in message["content"])
        functions = [call["function"] for call in message.get("tool_calls", ())]
        calls = _call_keys([(function["name"], function["arguments"]) for function in functions])
        found.append((message["role"], content.strip(), calls))
    return found


def _call_keys(calls: Sequence[tuple[str, Any]]) -> tuple[tuple[str, str], ...]:
    return tuple((name, json.dumps(arguments, sort_keys=True)) for name, arguments in calls)


def _readable(found: NativeAnswer) -> list[ToolCall]:
    """Calls that a program can be given; as with any model, it checks their names and arguments itself."""
    return [call for call in found.calls if call.status in ("ok", "unknown_tool", "bad_arguments") and call.name]


def _listed(call: ToolCall, number: int) -> dict[str, str]:
    arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
    return {"id": call.id or call_id(number), "name": call.name, "arguments": arguments}


def _count_images(messages: Sequence[Message]) -> int:
    return sum(part["type"] == "image" for message in messages for part in message["content"])


def _plain(message: Message) -> Message:
    """A message whose text parts are one text, if it has no image."""
    if any(part["type"] == "image" for part in message["content"]):
        return message
    return message | {"content": "".join(part["text"] for part in message["content"])}
