"""Questions that an agent answers with plain Python functions as tools.

    environment:
      factory: mmrl.agents.environments.tools:ToolEnvironment
      kwargs: {functions: ["my_tools.py:search"], reward: "my_tools.py:reward"}
    conversation: {tools: true}

A task is {"question": ...} with any other entries, which the reward gets. An answer without a call ends the episode.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mmrl.agents.environments.action_formats import SAY
from mmrl.agents.environments.environment import ACTION_ERROR, TOOL_ERROR, Action, as_observation
from mmrl.errors import UserError
from mmrl.rewards.reward_loading import load_function

MAX_RESULT_CHARS = 20_000


class ToolEnvironment:
    """One question an episode.

    Args:
        functions: tools as `module:function`, with type hints and a docstring that describes each argument under Args.
        reward: `module:function` of (task, answer) that returns the reward of the final answer.

    Raises:
        UserError: a function cannot be loaded or described, or two have one name.
    """

    def __init__(self, functions: Sequence[str], reward: str) -> None:
        from transformers.utils import get_json_schema

        self._reward = load_function(reward, what="reward")
        self._functions: dict[str, Any] = {}
        self.tools: list[dict[str, Any]] = []
        """JSON schemas, as chat templates take them."""
        for spec in functions:
            function = load_function(spec, what="functions")
            if (name := function.__name__) in (SAY, *self._functions):
                other = "the action of a plain answer" if name == SAY else "another tool"
                raise UserError(f"functions: {spec} has the name of {other}, {name!r}; rename it")
            try:
                self.tools.append(get_json_schema(function))
            except Exception as error:  # transformers has an exception for each part that is missing
                raise UserError(f"functions: {spec} cannot be described as a tool: {error}") from None
            self._functions[function.__name__] = function
        self.actions: Mapping[str, str] = {
            tool["function"]["name"]: tool["function"]["description"] for tool in self.tools
        }
        self._task: Mapping[str, Any] = {}
        self.show_images = True
        """Whether images in results are shown; otherwise a note takes their place."""

    def reset(self, task: Mapping[str, Any], seed: int) -> str:
        """Ask the question."""
        if not isinstance(task.get("question"), str):
            raise UserError(f"a tool task needs a text as its question; found {', '.join(task) or 'nothing'}")
        self._task = task
        return str(task["question"])

    def step(self, action: Action) -> tuple[Any, float, bool, dict[str, Any]]:
        """Call a tool; if it raises, the agent sees the error as text. A plain answer ends the episode."""
        if action.name == SAY:
            return "", float(self._reward(self._task, action.arguments["text"])), True, {}
        function = self._functions.get(action.name)
        if function is None:
            return unknown_tool(action.name, self._functions)
        try:
            inspect.signature(function).bind(**action.arguments)
        except TypeError as error:
            return tool_error("bad_arguments", f"TypeError: {error}")
        try:
            found = function(**action.arguments)
            if inspect.iscoroutine(found):
                found = asyncio.run(found)
            parts = [found] if not isinstance(found, (list, tuple)) or not any(map(_is_image, found)) else found
            images = [part for part in parts if _is_image(part)]
            texts = [_written(part) for part in parts if not _is_image(part)]
            if not self.show_images:
                texts, images = [*texts, *["[an image, which cannot be shown]"] * len(images)], []
            text = shortened("\n".join(texts))
            seen = {"text": text, "images": images} if images else text
            # an image that cannot be shown is an error of the tool
            as_observation(seen)
        # a command-line program exits if its arguments are wrong
        except (Exception, SystemExit) as error:
            return tool_error(type(error).__name__, f"{type(error).__name__}: {error}")
        return seen, 0.0, False, {}

    def close(self) -> None:
        """Do nothing: there is nothing to free."""


def _is_image(value: Any) -> bool:
    # any other array is a table of numbers
    is_array = type(value).__name__ == "ndarray"
    return hasattr(value, "convert") or (is_array and value.ndim > 1 and value.dtype == "uint8")


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=_as_plain)


def _as_plain(value: Any) -> Any:
    """Numbers of an array, or the text of a date or a set; refuses what Python shows by its address."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if " at 0x" in (text := str(value)):
        raise TypeError(f"the tool returned a {type(value).__name__}, which is no text, JSON or image")
    return text


def tool_error(kind: str, message: str) -> tuple[str, float, bool, dict[str, str]]:
    """Outcome of a call that failed: the agent reads the message, and the run counts the kind."""
    message = message[:MAX_RESULT_CHARS]
    return message, 0.0, False, {ACTION_ERROR: message, TOOL_ERROR: kind}


def unknown_tool(name: str, known: Iterable[str]) -> tuple[str, float, bool, dict[str, str]]:
    """Outcome of a call of a tool that does not exist."""
    return tool_error("unknown_tool", f"There is no tool {name[:60]!r}; the tools are: {', '.join(known)}.")


def shortened(text: str, limit: int = MAX_RESULT_CHARS) -> str:
    """A result of at most `limit` characters; a longer one loses its middle, and a mark says how long it was."""
    if len(text) <= limit:
        return text
    mark = f" ... ({len(text)} characters) ... "
    kept = limit - len(mark)
    return text[: kept - kept // 2] + mark + text[len(text) - kept // 2 :]
