"""Observations, actions as models write them, and the methods of an environment: `reset`, `step` and `close`.

These may return an `Observation`, a dict with `image`, `images` and `text`, an array, a PIL image or a string;
`as_observation` and `as_outcome` convert all of these, and explain what is wrong with anything else.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mmrl.agents.environments.action_formats import (
    SAY,
    NamedAction,
    UnreadableError,
    parameters_of,
    read_calls,
    read_object,
    read_tags,
    read_text,
    whole_text,
    write_calls,
    write_object,
    write_tags,
    write_text,
)
from mmrl.agents.environments.native_calls import OK, TOO_MANY, NativeAnswer, ToolCall
from mmrl.agents.environments.peer_formats import (
    read_pyautogui,
    read_tool_calls,
    read_ui_tars,
    write_pyautogui,
    write_tool_calls,
    write_ui_tars,
)
from mmrl.errors import UserError, did_you_mean
from mmrl.fields import Unless, bounded, choice, only_with, rare
from mmrl.hub.foreign import MalformedError, as_flag, as_image
from mmrl.rewards.answers import final_part
from mmrl.rewards.reward_loading import load_function
from mmrl.workers.engine import one_line
from mmrl.workers.wire import decode, encode

if TYPE_CHECKING:
    from numpy.typing import NDArray


MAX_CHARS = 1_000_000
ON_PARSE_ERROR = ("terminate", "noop", "reply")
NATIVE = "native"
"""Format of actions: tool calls as the model's own chat template writes them."""
MOST_ACTIONS = 64
CUT = "cut"
"""Error of a response that was truncated at the length limit: what it contains may be part of another action."""


@dataclass(frozen=True)
class Action:
    """An agent's action."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Text, finite numbers, bools, None, and lists and dicts of these."""
    text: str = ""
    """The whole response."""

    def __str__(self) -> str:
        """Name and arguments as a call, for captions."""
        return f"{self.name}({', '.join(f'{name}={value!r}' for name, value in self.arguments.items())})"


@dataclass(frozen=True)
class ParsedAnswer:
    """The actions of a response, or why it has none."""

    actions: tuple[Action, ...] = ()
    """Actions in the order of execution; empty after an error, unless the agent gets an error for each bad call."""
    thought: str = ""
    """Text of the response apart from its actions."""
    error: str | None = None
    """Key of `PARSE_ERRORS`, the status of a native call, or `CUT`."""
    detail: str = ""
    """Details of this response's error, in one line."""
    calls: tuple[ToolCall, ...] = ()
    """Tool calls in order, each of which gets a result; those with the status ok are the actions."""

    @property
    def note(self) -> str:
        """Message to the agent about a response that executed nothing; empty otherwise."""
        if self.error == CUT:
            return f"Nothing was executed: {self.detail}."
        # the results of the calls say it
        if self.calls:
            return ""
        return "" if self.error is None else f"The answer could not be read: {self.detail}."


@dataclass(frozen=True)
class ActionFormat:
    """One way to write actions."""

    read: Callable[..., tuple[str, list[NamedAction]]]
    """(answer, strict) to its thought and actions; with `takes_parameters` also (answer, strict, parameters)."""
    write: Callable[[str, Sequence[NamedAction]], str]
    """(thought, actions) to an answer."""
    example: str
    """A response in this format."""
    manual: str
    """Instruction for prompts."""
    takes_parameters: bool = False
    """Whether arguments without names are read, by the order of the tools' parameters."""


@dataclass
class ActionConfig:
    """How actions are parsed from responses."""

    format: str | None = choice(None, lambda: (*FORMATS, NATIVE), or_function=True)
    """native: tool calls as the model's own chat template writes them, only with `conversation.tools`; json: an object
    with thoughts and action; call: Action: click(x=1); tag: <action>3</action>; text: the whole response is the
    argument `text` of the action `say`; tool_call: <tool_call> blocks; ui_tars and pyautogui: calls in these formats,
    read as the actions of `mmrl.gui`. A `module:function` gets (answer, strict) and returns the thought and a list of
    (name, arguments). It raises ValueError if there is no action, and its docstring is the manual.
    Default: native with `conversation.tools`, json without."""
    strict: bool = rare(only_with(False, format=Unless("text")))
    """Whether the response must follow the format exactly; otherwise the first unambiguous action counts."""
    max_actions: int | None = rare(only_with(bounded(None, at_least=1, at_most=MOST_ACTIONS), format=Unless("text")))
    """Maximum number of actions per response. Additional actions are an error if strict, and ignored otherwise;
    additional native calls are errors. Default: 1, or 64 with native."""
    on_parse_error: str | None = choice(None, ON_PARSE_ERROR)
    """terminate: a response that has no action, or that was truncated at the length limit, ends the episode and
    executes nothing, so only earlier rewards count; noop: the turn is used up and the agent is told the reason; reply:
    as noop, but each malformed native call gets an error as its result while the other calls run. Default: reply with
    native, terminate otherwise."""
    max_invalid: int = rare(bounded(3, at_least=1))
    """With reply, number of turns in a row with an error after which an episode ends. Truncated responses do not
    count."""

    def settle(self, tools: bool) -> None:
        """Set a format that is not set, given `conversation.tools`; raises ValueError for options without effect."""
        if self.format is None and tools:
            self.format = NATIVE
        if self.format == NATIVE and not tools:
            raise ValueError(
                "actions.format native reads calls of tools that the chat template describes; set conversation.tools"
            )
        if self.format == NATIVE and self.strict:
            raise ValueError("actions.strict has no effect with actions.format native; remove it")
        if self.after_error != "reply" and self.max_invalid != ActionConfig.max_invalid:
            raise ValueError("actions.max_invalid has no effect without actions.on_parse_error: reply; remove it")
        if self.after_error == "reply" and self.format != NATIVE:
            raise ValueError(
                f"actions.on_parse_error: reply answers each call of actions.format native, but the format is "
                f"{self.name}; use noop"
            )

    @property
    def name(self) -> str:
        """The format."""
        return self.format or "json"

    @property
    def limit(self) -> int:
        """Maximum number of actions per response."""
        return self.max_actions or (MOST_ACTIONS if self.format == NATIVE else 1)

    @property
    def after_error(self) -> str:
        """Effect of a response without a readable action, a value of `on_parse_error`."""
        return self.on_parse_error or ("reply" if self.format == NATIVE else "terminate")

    @property
    def manual(self) -> str:
        """Instruction for prompts; native has none, since the chat template describes its calls."""
        return "" if self.format == NATIVE else find_format(self.name).manual

    def setting(self) -> dict[str, Any]:
        """The options in effect, on which measured success depends."""
        found = asdict(self) | {"format": self.name, "max_actions": self.limit, "on_parse_error": self.after_error}
        if self.after_error != "reply":
            del found["max_invalid"]
        return found

    def parse(self, text: str, cut: bool = False, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedAnswer:
        """Read a response with `parse_answer`; a response truncated at the length limit has no action."""
        # what can be read of it may be a part of another action
        if cut:
            return ParsedAnswer(error=CUT, detail="the answer was cut at the limit of its length")
        return parse_answer(text, self.name, strict=self.strict, max_actions=self.limit, tools=tools)

    def accept(self, found: NativeAnswer, text: str, cut: bool = False) -> ParsedAnswer:
        """The actions of a response `text` whose native calls have been read; a truncated one has none."""
        if cut:
            return self.parse(text, cut=True)
        if not found.calls:
            return _said(found, text)
        calls = _limited(found.calls, self.limit)
        bad = next((call for call in calls if call.status != OK), None)
        if bad is not None and self.after_error != "reply":
            return ParsedAnswer(error=bad.status, detail=bad.detail)
        return ParsedAnswer(
            tuple(Action(call.name, call.arguments, text) for call in calls if call.status == OK),
            "\n".join(filter(None, (found.thought, found.text))),
            None if bad is None else bad.status,
            "" if bad is None else bad.detail,
            calls,
        )


def _said(found: NativeAnswer, text: str) -> ParsedAnswer:
    """A response without calls: what it says, or why it says nothing."""
    if found.unfinished:
        return ParsedAnswer(error="unfinished_thought", detail="the answer ends inside its thought")
    if not found.text:
        return ParsedAnswer(error="empty", detail="there is no text after the thinking")
    return ParsedAnswer((Action(SAY, {"text": found.text}, text),), found.thought)


def _limited(calls: Sequence[ToolCall], limit: int) -> tuple[ToolCall, ...]:
    """The calls, those beyond the limit marked."""
    kept, seen = list[ToolCall](), 0
    for call in calls:
        seen += call.status == OK
        extra = call.status == OK and seen > limit
        detail = f"at most {limit} calls of a response are executed"
        kept.append(replace(call, status=TOO_MANY, detail=detail) if extra else call)
    return tuple(kept)


def find_format(name: str) -> ActionFormat:
    """The format of a name, or of a `module:function` that reads answers; raises UserError."""
    if name == NATIVE:
        raise UserError("actions.format native depends on a model's chat template; only episodes of a model can use it")
    if ":" not in name:
        if name not in FORMATS:
            hint = did_you_mean(name, FORMATS)
            raise UserError(f"unknown action format '{name}'; {hint}available formats: {', '.join(FORMATS)}")
        return FORMATS[name]
    function = load_function(name, what="actions.format")

    def read(text: str, strict: bool) -> tuple[str, list[NamedAction]]:
        try:
            thought, actions = function(text, strict)
            # users' readers may return other types of text or mappings
            return str(thought), [(str(word), dict(arguments)) for word, arguments in actions]
        except UnreadableError:
            raise
        except ValueError as error:
            raise UnreadableError("no_action", one_line(str(error))) from None

    def write(thought: str, actions: Sequence[NamedAction]) -> str:
        raise ValueError(f"{name} can read answers but not write them")

    return ActionFormat(read, write, "", inspect.getdoc(function) or "")


def parse_answer(
    text: str,
    format: str,
    *,
    strict: bool = False,
    max_actions: int = 1,
    tools: Sequence[Mapping[str, Any]] = (),
) -> ParsedAnswer:
    """Read the actions of a response; a leading thinking block, <think> to </think>, is part of the thought.

    Args:
        text: the answer, of any length.
        format: key of `FORMATS`, or a `module:function`.
        strict: whether the answer must follow the format exactly.
        max_actions: maximum per answer; more are an error if strict, and ignored otherwise.
        tools: JSON schemas of the actions, if known. The order of their parameters names the arguments of calls such
            as click('12') in the formats json, call and tag, if not strict.

    Returns:
        Actions or an error, never both.
    """
    # Longer answers are refused below; the cut bounds the work on a huge one.
    rest = final_part(text[: MAX_CHARS + 1])
    try:
        if len(text) > MAX_CHARS:
            raise UnreadableError("too_long", f"the answer has {len(text)} characters; at most {MAX_CHARS} are read")
        if rest is None:
            raise UnreadableError("unfinished_thought", "the answer ends before </think>")
        if not rest.strip():
            raise UnreadableError("empty", "there is no text after the thinking")
        reader = find_format(format)
        known = [parameters_of(tools)] if reader.takes_parameters else []
        thought, named = reader.read(rest.strip(), strict, *known)
        if not named:
            raise UnreadableError("no_action", "nothing in the answer is an action")
        if strict and len(named) > max_actions:
            raise UnreadableError("too_many", f"{len(named)} actions; at most {max_actions} in an answer")
    except UnreadableError as error:
        return ParsedAnswer(error=error.code, detail=error.detail)
    # the whole answer goes along, for environments that read it themselves
    actions = tuple(Action(name, arguments, text) for name, arguments in named[:max_actions])
    thinking = text.removesuffix(rest).strip().removeprefix("<think>").removesuffix("</think>").strip()
    return ParsedAnswer(actions, "\n".join(filter(None, (thinking, thought))))


def write_answer(actions: Sequence[Action], format: str, thought: str = "") -> str:
    """Write actions as a model should, for demonstrations; raises ValueError if the format cannot, as for NaN."""
    named = [(action.name, dict(action.arguments)) for action in actions]
    text = find_format(format).write(thought, named)
    # Read it back: an expert's demonstration must not teach an answer that the parser reads differently.
    found = parse_answer(text, format, strict=True, max_actions=len(named))
    if [(action.name, action.arguments) for action in found.actions] != named or found.thought != thought.strip():
        raise ValueError(f"the format {format} cannot express {named!r:.200} with the thought {thought!r:.80}")
    return text


PARSE_ERRORS: dict[str, str] = {
    "empty": "The response has no text outside its thinking.",
    "too_long": "The response or an action exceeds the maximum length.",
    "unfinished_thought": "The response ends inside its thinking.",
    "no_action": "Nothing in the response looks like an action in this format.",
    "malformed": "An action was started but cannot be read.",
    "wrong_shape": "The action has no name, or its arguments have the wrong form.",
    "bad_number": "A number is NaN, infinite or larger than 1e15.",
    "duplicate": "A key or an argument is given twice.",
    "too_deep": "Lists and objects nest deeper than 8.",
    "too_many": "The response has more actions than allowed; strict only.",
    "extra_text": "There is extra text where the format allows none; strict only.",
}

FORMATS: dict[str, ActionFormat] = {
    "json": ActionFormat(
        read_object,
        write_object,
        '{"thoughts": "The door is ahead.", "action": "forward"}',
        'Answer with a JSON object that has "thoughts" and "action"; an action with arguments is an object with "name" '
        'and "arguments".',
        takes_parameters=True,
    ),
    "call": ActionFormat(
        read_calls,
        write_calls,
        "Thought: The button is below.\nAction: click(x=10, y=20)",
        "Answer with a line that begins with Thought: and a line that begins with Action:, which calls an action with "
        "named arguments.",
        takes_parameters=True,
    ),
    "tag": ActionFormat(
        read_tags,
        write_tags,
        "The goal is above. <action>up</action>",
        "Think, then give the action between <action> and </action>.",
        takes_parameters=True,
    ),
    "tool_call": ActionFormat(
        read_tool_calls,
        write_tool_calls,
        'The door is ahead.\n<tool_call>\n{"name": "forward", "arguments": {}}\n</tool_call>',
        'Act with JSON objects that have "name" and "arguments", each between <tool_call> and </tool_call>.',
    ),
    "ui_tars": ActionFormat(
        read_ui_tars,
        write_ui_tars,
        "Thought: The button is below.\nAction: click(start_box='(10,20)')",
        "Answer with a line that begins with Thought: and a line that begins with Action:, one of "
        "click(start_box='(x,y)'), left_double, right_single, drag(start_box, end_box), type(content=''), "
        "hotkey(key=''), scroll(start_box, direction), wait() and finished().",
    ),
    "pyautogui": ActionFormat(
        read_pyautogui,
        write_pyautogui,
        "The button is below.\n```python\npyautogui.click(x=10, y=20)\n```",
        "Answer with calls of pyautogui in a ```python block, or with WAIT, DONE or FAIL.",
    ),
    "text": ActionFormat(
        read_text,
        write_text,
        "go north",
        "Answer with the action and nothing else.",
    ),
}


ACTION_ERROR = "action_error"
TOOL_ERROR = "tool_error"
"""Info entry with the kind of error that a tool call ended in, which `episode/tool_errors` counts."""
SUCCESS = "success"
KEYS = ("image", "images", "text")
"""Keys of an observation that is a dict."""
MAX_TEXT_CHARS = 200_000
MAX_IMAGES = 64


@dataclass(frozen=True)
class CallResult:
    """Result of a tool call."""

    name: str
    """The tool."""
    text: str
    images: int
    """Number of images."""
    call_id: str = ""
    """Id that the model gave the call; empty if it gave none."""


@dataclass(frozen=True)
class Observation:
    """Text and images that the agent receives in one turn."""

    text: str = ""
    images: tuple[NDArray[np.uint8], ...] = ()
    """(H, W, 3) RGB each."""
    results: tuple[CallResult, ...] = ()
    """The parts that are results of tool calls, in call order; empty if there are none."""
    request: str = ""
    """The request of an agent program as JSON, which is shown instead of the text; empty in other environments."""


@dataclass(frozen=True)
class StepOutcome:
    """Result of a step."""

    observation: Observation
    reward: float
    terminated: bool
    """Whether the task is over."""
    truncated: bool
    """Whether a time limit of the environment ended the episode."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Anything else. If present, `success` is a bool (whether the episode succeeded) and `action_error` is a str (why
    an action was not executed)."""


class Environment(Protocol):
    """The methods of a custom environment; it runs in a separate process and serves many episodes.

    It may also have `actions`, a mapping from the names of its actions to a sentence each, for prompts. If it has an
    attribute `show_images`, that is set before each episode to whether the model can see images.

    An action that cannot be executed (unknown name, wrong arguments, out of bounds) is the agent's mistake: the
    environment says so in the observation's text and in `info["action_error"]`, and the turn is spent. An exception is
    the environment's own failure: the episode then has no result.
    """

    def reset(self, task: Mapping[str, Any], seed: int) -> Any:
        """Start an episode; equal arguments start the same one. Returns an observation, optionally with a dict."""
        ...

    def step(self, action: Action) -> Any:
        """Execute an action; returns (observation, reward, ended), or the five values of Gymnasium."""
        ...

    def close(self) -> None:
        """Free resources."""
        ...


def as_observation(value: Any) -> Observation:
    """Convert an environment's observation.

    Args:
        value: `Observation`; a dict with `image`, `images` and `text`, each optional; a text; an array (H, W, 3), (H,
            W, 4) over white, (H, W, 1) or (H, W) uint8; a PIL image; or a list of images.
    """
    if isinstance(value, Observation):
        # checked again even if it is an `Observation`: users may construct one with anything
        return replace(_observation(value.text, list(value.images)), request=value.request)
    if isinstance(value, str):
        return _observation(value, [])
    if isinstance(value, Mapping):
        unknown = [str(key) for key in value if key not in KEYS]
        if unknown or not value:
            raise MalformedError(
                f"the observation is a dict with {', '.join(unknown[:10]) or 'no entries'}; its entries may be "
                f"{', '.join(KEYS)}; put anything else into the info dict, which reset and step may also return"
            )
        images = _listed(value.get("images"))
        return _observation(value.get("text", ""), [value["image"], *images] if "image" in value else images)
    return _observation("", value if isinstance(value, list) else [value])


def as_start(value: Any) -> tuple[Observation, Mapping[str, Any]]:
    """Convert the result of `reset` to an observation and info."""
    if not isinstance(value, tuple):
        return as_observation(value), {}
    if len(value) != 2 or not isinstance(value[1], Mapping):
        raise MalformedError(
            f"reset returned a tuple of {_kinds(value)}; expected an observation, or a pair of an observation and a "
            "dict"
        )
    return as_observation(value[0]), value[1]


def as_outcome(value: Any) -> StepOutcome:
    """Convert the result of `step`; raises MalformedError, also for a reward that is not finite."""
    if isinstance(value, StepOutcome):
        value = (value.observation, value.reward, value.terminated, value.truncated, value.info)
    if not isinstance(value, tuple) or not 3 <= len(value) <= 5:
        returned = f"a tuple of {_kinds(value)}" if isinstance(value, tuple) else f"a {type(value).__name__}"
        raise MalformedError(
            f"step returned {returned}; expected (observation, reward, ended), or Gymnasium's (observation, reward, "
            "terminated, truncated, information)"
        )
    observation, reward, terminated = value[:3]
    info = value[-1] if len(value) > 3 else {}
    truncated = value[3] if len(value) == 5 else False
    if len(value) == 4 and isinstance(info, Mapping) and info.get("TimeLimit.truncated"):
        terminated, truncated = False, True  # gym before 0.26 reports a time limit only in info
    if not isinstance(info, Mapping):
        raise MalformedError(f"step returned {_kinds(value)}; the last of {len(value)} values must be a dict")
    # Checked, not converted: bool() would take any value in the wrong position, such as an info, for a flag.
    for name, flag in (("ended", terminated), ("truncated", truncated)):
        if not isinstance(flag, (bool, np.bool_)):
            raise MalformedError(f"{name} is {flag!r:.80}; expected True or False as the third value of step")
    return StepOutcome(as_observation(observation), _reward(reward), bool(terminated), bool(truncated), _verdicts(info))


def _observation(text: Any, images: list[Any]) -> Observation:
    if not isinstance(text, str):
        raise MalformedError(f"the observation's text is a {type(text).__name__}; expected a str")
    if len(text) > MAX_TEXT_CHARS:
        raise MalformedError(f"the observation's text has {len(text)} characters; at most {MAX_TEXT_CHARS} are allowed")
    if len(images) > MAX_IMAGES:
        raise MalformedError(f"the observation has {len(images)} images; at most {MAX_IMAGES} are allowed")
    return Observation(whole_text(text), tuple(as_image(image) for image in images))


def _listed(images: Any) -> list[Any]:
    if images is None:
        return []
    # an array of four dimensions is a list of images, too
    if isinstance(images, (list, tuple)) or (isinstance(images, np.ndarray) and images.ndim == 4):
        return list(images)
    raise MalformedError(f"images is a {type(images).__name__}; expected a list of images, or (T, H, W, 3) uint8")


def _reward(value: Any) -> float:
    try:
        # item() also takes numpy scalars and arrays with one element, and rejects larger ones
        number = float(np.asarray(value, np.float64).item())
    except (TypeError, ValueError, OverflowError):
        raise MalformedError(f"the reward is {value!r:.80}; expected a number") from None
    if not math.isfinite(number):
        raise MalformedError(f"the reward is {number}; expected a finite number")
    return number


def _verdicts(info: Mapping[str, Any]) -> Mapping[str, Any]:
    """Info with `success` as a bool and `action_error` as a str, each dropped if it is empty."""
    # a copy: the environment may keep its info and read it later
    found = dict(info)
    success, error = found.pop(SUCCESS, None), found.pop(ACTION_ERROR, None)
    if success is not None:
        found[SUCCESS] = as_flag(success, f"info[{SUCCESS!r}]")
    # some environments report a flag instead of a reason
    if isinstance(error, (bool, np.bool_)):
        error = "the environment refused the action" if error else ""
    if error is not None and str(error):
        found[ACTION_ERROR] = str(error)
    return found


def _kinds(values: tuple[Any, ...]) -> str:
    return ", ".join(type(value).__name__ for value in values[:8]) or "nothing"


Fields = tuple[dict[str, Any], "dict[str, np.ndarray]"]

NOT_SENT = "not_sent"
"""Info entry that lists the names of entries that cannot be sent out of the environment's process."""


def pack_outcome(outcome: StepOutcome) -> Fields:
    """Encode an outcome; info entries that are not plain data are only listed by name."""
    info, not_sent = {}, []
    for key, value in outcome.info.items():
        # Entry by entry: an environment may return objects for its own use, which must not fail the step.
        try:
            encode(value)
        except (TypeError, RecursionError):
            not_sent.append(str(key))
        else:
            info[str(key)] = value
    if not_sent:
        info[NOT_SENT] = not_sent
    parts = (outcome.observation.text, list(outcome.observation.images), outcome.reward)
    tree, arrays = encode([*parts, outcome.terminated, outcome.truncated, info, outcome.observation.request])
    return {"outcome": tree}, arrays


def unpack_outcome(fields: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> StepOutcome:
    """Decode `pack_outcome`, checked again because the other side runs users' code; raises MalformedError."""
    try:
        text, images, reward, terminated, truncated, info, request = decode(fields["outcome"], arrays)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise MalformedError(f"the process sent something other than an outcome: {error!r:.200}") from None
    return as_outcome((Observation(text, tuple(images), request=request), reward, terminated, truncated, info))
