"""Agent programs as environments: a function that talks to an OpenAI-compatible endpoint, sampled by the policy.

    # my_agent.py
    from openai import OpenAI


    def run(task, endpoint):
        client = OpenAI(**endpoint)
        messages = [{"role": "user", "content": task["question"]}]
        reply = client.chat.completions.create(model="policy", messages=messages)
        return float(task["answer"] in reply.choices[0].message.content)

    environment: {factory: "my_agent.py:run"}

Requests of the program are the observations of the episode, and replies of the policy its actions. What the program
returns is the reward of the last turn.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mmrl.agents.environments.action_formats import SAY
from mmrl.agents.environments.chat_endpoint import ChatEndpoint, Exchange, Session
from mmrl.agents.environments.environment import Action, Observation
from mmrl.hub.foreign import MalformedError

PARAMETERS = ("task", "endpoint")
"""First parameters of a program, by which it is told from a function that makes an environment."""
REPLY = "chat.completion"
"""Name of the action that replies to a request."""
ENDING_SECONDS = 5.0
"""Seconds that a program whose episode is over has to end, before its process is replaced."""
LOCAL = "127.0.0.1"


def is_program(function: Callable[..., Any]) -> bool:
    """Whether a function of a configuration is an agent program."""
    try:
        return tuple(inspect.signature(function).parameters)[: len(PARAMETERS)] == PARAMETERS
    except (TypeError, ValueError):
        return False


def count_calls(action: Action) -> int:
    """Number of tool calls in an action: what is said has none, a reply to a program any number."""
    return len(action.arguments["tool_calls"]) if action.name == REPLY else int(action.name != SAY)


@dataclass(frozen=True)
class _Ended:
    """The end of a program."""

    value: Any = None
    error: BaseException | None = None


class ProgramEnvironment:
    """An agent program, one run an episode.

    Args:
        program: function of (task, endpoint) and keyword arguments. The task is a dict with the entries of the task and
            its `seed`. `endpoint` has `base_url` and `api_key`, the arguments of `openai.OpenAI`, which are also in the
            variables OPENAI_BASE_URL and OPENAI_API_KEY. It returns the reward, or a dict with `reward` and
            optionally `success`. It may be a coroutine function.
        kwargs: keyword arguments of the program.
    """

    chat = True
    """Its observations are requests, and its actions replies to them."""

    def __init__(self, program: Callable[..., Any], kwargs: Mapping[str, Any] | None = None) -> None:
        self._program = program
        self._kwargs = dict(kwargs or {})
        self._endpoint = ChatEndpoint()
        self._thread: threading.Thread | None = None
        self._exchange: Exchange | None = None

    def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        """Start the program; returns its first request."""
        session = self._endpoint.begin()
        if self._thread is not None:
            self._thread.join(ENDING_SECONDS)
            if self._thread.is_alive():
                # the process is then replaced, since a thread cannot be ended
                raise RuntimeError(f"the program of the episode before goes on {ENDING_SECONDS:g} s after its end")
        endpoint = {"base_url": self._endpoint.base_url, "api_key": session.key}
        # programs that this one starts find the endpoint, too, and reach it without a proxy
        os.environ.update(OPENAI_BASE_URL=endpoint["base_url"], OPENAI_API_KEY=session.key)
        for name in ("NO_PROXY", "no_proxy"):
            known = os.environ.get(name, "")
            os.environ[name] = known if LOCAL in known else ",".join(filter(None, (known, LOCAL)))
        given = {"seed": seed, **task}
        self._thread = threading.Thread(target=self._run, args=(given, endpoint, session), daemon=True)
        self._thread.start()
        found = session.events.get()
        if isinstance(found, _Ended):
            if found.error is not None:
                raise found.error
            raise MalformedError(f"the program returned {found.value!r:.80} without a request to the model")
        return self._shown(found)

    def step(self, action: Action) -> tuple[Observation, float, bool, Mapping[str, Any]]:
        """Reply to the last request; returns the next one, or the program's reward."""
        assert self._exchange is not None
        self._exchange.answer(action.arguments)
        found = self._endpoint.session.events.get()
        if isinstance(found, Exchange):
            return self._shown(found), 0.0, False, {}
        if found.error is not None:
            raise found.error
        value = found.value if isinstance(found.value, Mapping) else {"reward": found.value}
        if value.get("reward") is None:
            raise MalformedError(f"the program returned {found.value!r:.80}; expected a reward, or a dict with one")
        return Observation(), value["reward"], True, {name: own for name, own in value.items() if name != "reward"}

    def close(self) -> None:
        """Stop the endpoint."""
        self._endpoint.close()

    def _shown(self, exchange: Exchange) -> Observation:
        self._exchange = exchange
        return exchange.observation

    def _run(self, task: dict[str, Any], endpoint: dict[str, str], session: Session) -> None:
        """Run the program in its own thread and report its end to the session."""
        try:
            value = self._program(task, endpoint, **self._kwargs)
            if inspect.iscoroutine(value):
                value = asyncio.run(value)
        except BaseException as error:  # SystemExit, too: the main thread waits for the end
            session.events.put(_Ended(error=error))
        else:
            session.events.put(_Ended(value))
