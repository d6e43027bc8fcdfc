"""Questions that an agent answers with plain Python functions as tools.

    environment:
      factory: mmrl.agents.environments.tools:ToolEnvironment
      kwargs: {functions: ["my_tools.py:search"], reward: "my_tools.py:reward"}
    conversation: {tools: true}

A task is {"question": ...} with any other entries, which the reward gets. An answer without a call ends the episode.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mmrl.agents.environments.action_formats import SAY
from mmrl.agents.environments.environment import ACTION_ERROR, TOOL_ERROR, Action
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
            if function.__name__ in (SAY, *self._functions):
                raise UserError(f"functions: two tools are named {function.__name__!r}")
            try:
                self.tools.append(get_json_schema(function))
            except Exception as error:  # transformers has an exception for each part that is missing
                raise UserError(f"functions: {spec} cannot be described as a tool: {error}") from None
            self._functions[function.__name__] = function
        self.actions: Mapping[str, str] = {
            tool["function"]["name"]: tool["function"]["description"] for tool in self.tools
        }
        self._task: Mapping[str, Any] = {}

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
        except Exception as error:
            return tool_error(type(error).__name__, f"{type(error).__name__}: {error}")
        if hasattr(found, "convert") or type(found).__name__ == "ndarray":
            return {"image": found}, 0.0, False, {}
        text = found if isinstance(found, str) else json.dumps(found, ensure_ascii=False, default=str)
        return shortened(text), 0.0, False, {}

    def close(self) -> None:
        """Do nothing: there is nothing to free."""


def tool_error(kind: str, message: str) -> tuple[str, float, bool, dict[str, str]]:
    """Outcome of a call that failed: the agent reads the message, and the run counts the kind."""
    message = message[:MAX_RESULT_CHARS]
    return message, 0.0, False, {ACTION_ERROR: message, TOOL_ERROR: kind}


def unknown_tool(name: str, known: Iterable[str]) -> tuple[str, float, bool, dict[str, str]]:
    """Outcome of a call of a tool that does not exist."""
    return tool_error("unknown_tool", f"There is no tool {name[:60]!r}; the tools are: {', '.join(known)}.")


def shortened(text: str) -> str:
    """A result of at most `MAX_RESULT_CHARS` characters, with its length if it is longer."""
    cut = f" ... ({len(text)} characters)" if len(text) > MAX_RESULT_CHARS else ""
    return text[:MAX_RESULT_CHARS] + cut
