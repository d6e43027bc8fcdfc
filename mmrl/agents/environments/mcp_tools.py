"""Questions that an agent answers with the tools of MCP servers; needs `pip install 'mmrl-suite[mcp]'`.

    environment:
      factory: mmrl.agents.environments.mcp_tools:McpEnvironment
      kwargs:
        servers: {files: {command: python, args: [my_server.py]}, web: {url: "http://localhost:8000/mcp"}}
        reward: "my_tools.py:reward"
    conversation: {tools: true}

Tasks and answers are those of `mmrl.agents.environments.tools`. Names, schemas and descriptions of the tools are read
from the servers. Each episode has its own session with each server, and starts its own process of each server that is a
command. An error of a tool is text for the agent. A server that dies or hangs ends the episode without a result.

Source: modelcontextprotocol/python-sdk 2.3.0, src/mcp/client/client.py and src/mcp/client/stdio.py.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from mmrl.agents.environments.action_formats import SAY
from mmrl.agents.environments.environment import Action
from mmrl.agents.environments.tools import shortened, tool_error, unknown_tool
from mmrl.errors import RunError, UserError, require_packages
from mmrl.hub.images import ImageError, decode_image
from mmrl.rewards.reward_loading import load_function
from mmrl.workers.family import TAG

if TYPE_CHECKING:
    from mcp import Client

ENTRIES = {"command": ("command", "args", "env", "cwd", "tools"), "url": ("url", "headers", "tools")}
"""Entries of a server that is a command, and of one that runs elsewhere."""
LIST, MAPPING = (list, "a list of texts"), (dict, "a mapping of texts")
TYPES: Mapping[str, tuple[type, str]] = {"args": LIST, "tools": LIST, "env": MAPPING, "headers": MAPPING}
"""Types of the entries that are no texts."""
METHOD_NOT_FOUND = -32601
KINDS = {-32602: "bad_arguments", METHOD_NOT_FOUND: "unknown_tool", -32001: "timeout"}
"""Kinds of errors by their code in JSON-RPC; any other is `server_error`."""


class McpEnvironment:
    """One question an episode.

    Args:
        servers: by name. One with `command` is started for each episode, with `args`, `env` (next to PATH, HOME and
            USER, the only variables that it inherits) and `cwd`. One with `url` runs elsewhere and speaks Streamable
            HTTP; `headers` are sent along. `tools` limits the tools that the agent gets; default: all of the server.
        reward: `module:function` of (task, answer) that returns the reward of the final answer.
        call_timeout_s: seconds for a call. Afterwards the server has as long to show that it is alive, so it should be
            less than half of `environment.step_timeout_s`.

    Raises:
        UserError: a server or tool is described wrongly, two tools have one name, or a package is missing.
        RunError: a server does not start.
    """

    def __init__(self, servers: Mapping[str, Mapping[str, Any]], reward: str, call_timeout_s: float = 20.0) -> None:
        require_packages("McpEnvironment", ["mcp"], "mcp")
        from anyio.from_thread import start_blocking_portal

        self._reward = load_function(reward, what="reward")
        self._servers = {name: checked_server(name, server) for name, server in servers.items()}
        self._call_timeout_s = call_timeout_s
        self._task: Mapping[str, Any] = {}
        self.show_images = True
        """Whether images in results are shown; otherwise a note takes their place."""
        self._opened, self._sessions = ExitStack(), ExitStack()
        self._portal = self._opened.enter_context(start_blocking_portal())
        self._clients: dict[str, Client] = {}
        self.tools: list[dict[str, Any]] = []
        """JSON schemas, as chat templates take them."""
        self._owners: dict[str, str] = {}
        """Name of the server that has a tool, by tool."""
        try:
            self._open()
            for name in self._servers:
                self._add_tools(name)
        except BaseException:
            self.close()
            raise
        self._is_fresh = True
        self.actions: Mapping[str, str] = {
            tool["function"]["name"]: tool["function"]["description"] for tool in self.tools
        }

    def reset(self, task: Mapping[str, Any], seed: int) -> str:
        """Ask the question in new sessions."""
        if not isinstance(task.get("question"), str):
            raise UserError(f"an MCP task needs a text as its question; found {', '.join(task) or 'nothing'}")
        if not self._is_fresh:
            self._open()
        self._is_fresh = False
        self._task = task
        return str(task["question"])

    def step(self, action: Action) -> tuple[Any, float, bool, dict[str, Any]]:
        """Call a tool. A plain answer ends the episode."""
        if action.name == SAY:
            return "", float(self._reward(self._task, action.arguments["text"])), True, {}
        if action.name not in self._owners:
            return unknown_tool(action.name, self._owners)
        server = self._owners[action.name]
        client = self._clients[server]
        try:
            result = self._portal.call(client.call_tool, action.name, dict(action.arguments), self._call_timeout_s)
        except Exception as error:
            if not self._is_alive(client):
                raise RunError(f"the MCP server {server} was lost in a call of {action.name}: {error}") from error
            return tool_error(KINDS.get(getattr(error, "code", 0), "server_error"), str(error) or type(error).__name__)
        text, images = self._shown(result)
        if result.is_error:
            return tool_error("tool_error", text or f"{action.name} failed without a message")
        return {"text": shortened(text), "images": images}, 0.0, False, {}

    def close(self) -> None:
        """End the sessions, and the servers that were started."""
        self._end_sessions()
        self._opened.close()

    def _open(self) -> None:
        """Start a session with each server; those of the last episode end."""
        self._end_sessions()
        for name, server in self._servers.items():
            try:
                # The handshake of 2025 comes first: a later protocol has no sessions over HTTP.
                self._clients[name] = self._connect(server, "legacy")
            except Exception:
                try:
                    self._clients[name] = self._connect(server, "auto")
                except Exception as error:
                    # without its traceback: a run shows that in its message, with hundreds of lines of task groups
                    raise RunError(f"the MCP server {name} does not start: {_cause(error)}") from None

    def _end_sessions(self) -> None:
        self._clients.clear()
        # A server that is gone cannot be told that its session ends.
        with suppress(Exception):
            self._sessions.close()

    def _connect(self, server: Mapping[str, Any], mode: str) -> Client:
        from mcp import Client, StdioServerParameters

        target: Any
        if "url" in server:
            target = _over_http(server["url"], server["headers"]) if server.get("headers") else server["url"]
        else:
            # The tag lets the pool find the process even after the worker was killed.
            tag = {TAG: os.environ[TAG]} if TAG in os.environ else {}
            options = {key: server[key] for key in ("command", "args", "cwd") if key in server}
            target = StdioServerParameters(**options, env={**server.get("env", {}), **tag})
        client = Client(target, mode=mode, read_timeout_seconds=self._call_timeout_s)
        return self._sessions.enter_context(self._portal.wrap_async_context_manager(client))

    def _add_tools(self, name: str) -> None:
        """Describe the tools of a server."""
        found: dict[str, Any] = {}
        cursor: str | None = None
        while True:
            page = self._portal.call(partial(self._clients[name].list_tools, cursor=cursor))
            found |= {tool.name: tool for tool in page.tools}
            cursor = page.next_cursor
            if cursor is None:
                break
        wanted = self._servers[name].get("tools", list(found))
        if missing := [tool for tool in wanted if tool not in found]:
            raise UserError(f"servers.{name}.tools: there is no {missing[0]!r}; the server has: {', '.join(found)}")
        for tool in wanted:
            if tool == SAY or tool in self._owners:
                other = "the action of a plain answer" if tool == SAY else f"a tool of {self._owners[tool]}"
                raise UserError(
                    f"servers.{name}: {tool!r} is also {other}; list the tools to use in servers.{name}.tools"
                )
            self._owners[tool] = name
            schema = {"description": found[tool].description or "", "parameters": found[tool].input_schema}
            self.tools.append({"type": "function", "function": {"name": tool, **schema}})

    def _is_alive(self, client: Client) -> bool:
        """Whether a server still answers in this session."""
        try:
            self._portal.call(client.send_ping)
        except Exception as error:
            # Later protocols have no ping; saying so is an answer, too.
            return getattr(error, "code", 0) == METHOD_NOT_FOUND
        return True

    def _shown(self, result: Any) -> tuple[str, list[Any]]:
        """Text and images of a result; what cannot be shown is named."""
        texts, images = [], []
        for part in result.content:
            if part.type == "text":
                texts.append(part.text)
            elif part.type == "image" and self.show_images:
                try:
                    images.append(decode_image(base64.b64decode(part.data)))
                except (ImageError, ValueError) as error:
                    texts.append(f"[an image that cannot be read: {error}]")
            elif part.type == "resource_link":
                texts.append(f"[{part.name}: {part.uri}]")
            elif part.type == "resource" and hasattr(part.resource, "text"):
                texts.append(part.resource.text)
            else:
                kind = getattr(part, "mime_type", None) or getattr(getattr(part, "resource", None), "mime_type", None)
                texts.append(f"[{part.type} of type {kind or 'unknown'}, which cannot be shown]")
        if not result.content and result.structured_content is not None:
            texts.append(json.dumps(result.structured_content, ensure_ascii=False, default=str))
        return "\n".join(texts), images


def checked_server(name: str, server: Mapping[str, Any]) -> Mapping[str, Any]:
    """The description of a server; raises UserError if it has unknown entries or values of a wrong type."""
    place = next((place for place in ENTRIES if place in server), None)
    if place is None:
        raise UserError(f"servers.{name} has no `command` and no `url`; found {', '.join(server) or 'nothing'}")
    unknown = [key for key in server if key not in ENTRIES[place]]
    if unknown:
        known = ", ".join(ENTRIES[place])
        raise UserError(f"servers.{name}: {unknown[0]!r} is no entry of a server with `{place}`; its entries: {known}")
    for key, value in server.items():
        parts = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else [value]
        kind, plain = TYPES.get(key, (str, "a text"))
        if not isinstance(value, kind) or not all(isinstance(part, str) for part in parts):
            raise UserError(f"servers.{name}.{key} is {value!r:.80}; expected {plain}")
    return dict(server)


@asynccontextmanager
async def _over_http(url: str, headers: Mapping[str, str]) -> AsyncIterator[Any]:
    """A transport that sends headers."""
    from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client

    async with (
        create_mcp_http_client(headers=dict(headers)) as http,
        streamable_http_client(url, http_client=http) as end,
    ):
        yield end


def _cause(error: BaseException) -> str:
    """The innermost reason; task groups wrap errors in groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__
