"""Environments behind an OpenEnv server; needs `pip install 'mmrl-suite[openenv]'`, but not the package openenv.

    environment:
      factory: mmrl.agents.environments.openenv:OpenEnvEnvironment
      kwargs: {url: "http://localhost:8000"}
      workers: 4  # at most the server's max_concurrent_envs
    actions: {format: json}

The entries of an action are read from the server's schema. They are the arguments of the action `act`. With `format:
text`, the response is the entry `text_key`. The entries of a task are passed to the server's `reset` with the seed; a
server ignores those that its `reset` does not take.

Messages go over the WebSocket directly and not through OpenEnv's client: that of release 0.10 connects again when a
server was restarted, so that an episode would continue in an environment that was never reset.

Source: meta-pytorch/OpenEnv src/openenv/core/env_server/http_server.py and src/openenv/core/env_client.py, the same
messages in the releases 0.3.0 and 0.10.0.
"""

from __future__ import annotations

import base64
import json
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.agents.environments.action_formats import SAY, referenced
from mmrl.agents.environments.environment import ACTION_ERROR, FORMATS, MAX_TEXT_CHARS, TOOL_ERROR, Action
from mmrl.agents.environments.tools import shortened, unknown_tool
from mmrl.errors import RunError, UserError, require_packages
from mmrl.hub.foreign import MalformedError
from mmrl.hub.images import ImageError, decode_image

if TYPE_CHECKING:
    from websockets.sync.client import ClientConnection

SLOT_SECONDS = 20.0
"""Seconds to wait for a free session: a server notices the end of a process a little later."""
MOST_NESTED = 4
"""Levels of an action's entry that are described."""
LIMITS = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "exclusiveMaximum": "below",
    "default": "default",
}
"""Entries of a JSON schema that the description of an action names, and their words."""
OWN_ENTRIES = ("metadata",)
"""Entries of every action and observation that are not for the agent."""


class ServerError(Exception):
    """An error that the server reported instead of an observation."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        super().__init__(f"{data.get('code', 'UNKNOWN')}: {data.get('message', 'no reason given')}")
        self.code = str(data.get("code", "UNKNOWN"))
        self.problems = [entry for entry in data.get("errors") or [] if isinstance(entry, Mapping)]
        """Reasons of pydantic why an action does not fit the schema."""


class OpenEnvEnvironment:
    """One environment of an OpenEnv server.

    Args:
        url: of the server, http or https.
        text_key: entry of an action that is the whole response with `format: text`; default: the only entry that the
            schema requires, if it is a text.
        text_keys: entries of an observation that are shown as text; default: all that are not images.
        image_keys: entries of an observation that are images: base64, a data URL, or lists of the shape (H, W, 3).
        headers: sent along, for example for authorization.
        message_timeout_s: seconds for one message; less than `environment.step_timeout_s`.
        max_message_mb: maximum size of a message from the server, in MiB.

    Raises:
        UserError: it is no OpenEnv server, or its actions have no such entry.
        RunError: the server has no free session.
    """

    def __init__(
        self,
        url: str,
        text_key: str | None = None,
        text_keys: Sequence[str] | None = None,
        image_keys: Sequence[str] = (),
        headers: Mapping[str, str] | None = None,
        message_timeout_s: float = 50.0,
        max_message_mb: float = 100.0,
    ) -> None:
        require_packages("OpenEnvEnvironment", ["websockets"], "openenv")
        self._url = url.rstrip("/")
        if not self._url.startswith(("http://", "https://")):
            raise UserError(f"url is {url!r}; expected one that begins with http:// or https://")
        self._headers = dict(headers or {})
        self._timeout_s = message_timeout_s
        self._max_bytes = int(max_message_mb * (1 << 20))
        self._text_keys = text_keys
        self._image_keys = tuple(image_keys)
        self.show_images = True
        """Whether images are shown."""
        self._opened = ExitStack()
        self._socket: ClientConnection | None = None
        self._has_reward = False
        # Now, so that a server with too few sessions is found before the run begins.
        self._connect()
        self._schema = self._read_schema()
        self._entries: Mapping[str, Any] = {
            name: about for name, about in self._schema.get("properties", {}).items() if name not in OWN_ENTRIES
        }
        self._text_key = self._chosen_text_key(text_key)
        described = "; ".join(_described(name, about, self._schema) for name, about in self._entries.items())
        self.actions: Mapping[str, str] = {"act": described}
        """The only action, with the entries that are its arguments."""
        parameters = {**self._schema, "properties": dict(self._entries)}
        function = {"name": "act", "description": "Act in the environment.", "parameters": parameters}
        self.tools = [{"type": "function", "function": function}]
        """The action as the JSON schema of a tool."""

    def fitting_formats(self) -> list[str]:
        """Formats of actions that can express the server's actions."""
        return [name for name in FORMATS if name != "text" or self._text_key is not None]

    def reset(self, task: Mapping[str, Any], seed: int) -> dict[str, Any]:
        """Start an episode; the entries of the task are passed on."""
        from websockets.exceptions import ConnectionClosed

        if "seed" in task:
            raise UserError("an OpenEnv task has an entry `seed`; set the seed of the task instead")
        self._has_reward = False
        try:
            data = self._ask("reset", {"seed": seed, **task})
        except ConnectionClosed:
            # The server closed the session between two episodes, for example after a long update of the policy.
            self._connect()
            data = self._ask("reset", {"seed": seed, **task})
        if data.get("done"):
            raise MalformedError("the server's reset returned an episode that is already done")
        return self._shown(data)

    def step(self, action: Action) -> tuple[Any, float, bool, dict[str, Any]]:
        """Send an action; one that does not fit the server's schema changes nothing."""
        payload = dict(action.arguments)
        if action.name == SAY and self._text_key is not None:
            payload = {self._text_key: payload.get("text", "")}
        elif action.name not in ("act", SAY):
            return unknown_tool(action.name, self.actions)
        try:
            data = self._ask("step", payload)
        except ServerError as error:
            if error.code != "VALIDATION_ERROR":
                raise
            reasons = [f"{'.'.join(map(str, entry.get('loc', ())))}: {entry.get('msg')}" for entry in error.problems]
            text = f"The action was rejected: {'; '.join(reasons) or error}. Its entries: {self.actions['act']}."
            return text, 0.0, False, {ACTION_ERROR: text, TOOL_ERROR: "bad_arguments"}
        reward, done = data.get("reward"), bool(data.get("done", False))
        self._has_reward |= reward is not None
        if done and not self._has_reward:
            raise MalformedError("the server ended an episode in which no step had a reward")
        return self._shown(data), 0.0 if reward is None else float(reward), done, {}

    def close(self) -> None:
        """Free the session."""
        self._opened.close()

    def _connect(self) -> None:
        """Open a session, waiting for the server to start or for a session to become free."""
        from websockets.exceptions import ConnectionClosed, InvalidHandshake
        from websockets.sync.client import connect

        address = f"ws{self._url.removeprefix('http')}/ws"
        deadline = time.monotonic() + SLOT_SECONDS
        while True:
            self.close()
            try:
                opened = connect(address, max_size=self._max_bytes, additional_headers=self._headers)
                self._socket = self._opened.enter_context(opened)
                # A server accepts the connection first and reports afterwards that it is full.
                self._ask("state", {})
                return
            except (ServerError, ConnectionClosed, InvalidHandshake, OSError) as error:
                if isinstance(error, ServerError) and error.code != "CAPACITY_REACHED":
                    raise
                # a proxy refuses while its server starts, too, but with other statuses
                if getattr(getattr(error, "response", None), "status_code", 0) in (401, 403, 404):
                    raise RunError(f"{self._url} refuses a session: {error}") from None
                if time.monotonic() > deadline:
                    raise RunError(
                        f"{self._url} is not running or has no free session ({error}); the server's "
                        "max_concurrent_envs must be at least environment.workers times the number of processes that "
                        "train"
                    ) from None
            time.sleep(0.2)

    def _ask(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a message and wait for its answer; raises ServerError."""
        from websockets.exceptions import ConnectionClosed

        assert self._socket is not None
        message = {"type": kind} if kind == "state" else {"type": kind, "data": dict(data)}
        # What the server said before it closed the session is still in the buffer.
        with suppress(ConnectionClosed):
            self._socket.send(json.dumps(message))
        try:
            answer = json.loads(self._socket.recv(self._timeout_s))
        except TimeoutError:
            raise RunError(f"{self._url} did not answer a {kind} within {self._timeout_s:g} s") from None
        found = answer.get("data") or {}
        if answer.get("type") == "error":
            raise ServerError(found)
        return found

    def _read_schema(self) -> Mapping[str, Any]:
        """JSON schema of an action."""
        request = urllib.request.Request(f"{self._url}/schema", headers=self._headers)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as answer:
                action = json.load(answer)["action"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"url: {self._url}/schema does not describe an OpenEnv server: {error!r:.200}") from None
        return dict(action)

    def _chosen_text_key(self, name: str | None) -> str | None:
        """The entry of an action that a response fills with `format: text`."""
        texts = [key for key, about in self._entries.items() if about.get("type") == "string"]
        if name is not None and name not in texts:
            raise UserError(
                f"text_key: {name!r} is no text of the server's actions; texts: {', '.join(texts) or 'none'}"
            )
        required = self._schema.get("required", [])
        return required[0] if name is None and len(required) == 1 and required[0] in texts else name

    def _shown(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """An observation as text and images."""
        entries = dict(data.get("observation") or {})
        missing = [key for key in (*(self._text_keys or ()), *self._image_keys) if key not in entries]
        if missing:
            raise MalformedError(f"the observation has no {missing[0]!r}; it has: {', '.join(entries) or 'nothing'}")
        keys = [key for key in entries if key not in (*OWN_ENTRIES, *self._image_keys)]
        wanted = keys if self._text_keys is None else self._text_keys
        texts = {key: entries[key] for key in wanted if entries[key] not in (None, "", [], {})}
        images = [_image(entries[key]) for key in self._image_keys if entries[key] is not None and self.show_images]
        if len(texts) == 1 and isinstance(alone := next(iter(texts.values())), str):
            return {"text": shortened(alone, MAX_TEXT_CHARS), "images": images}
        lines = [f"{key}: {_written(value)}" for key, value in texts.items()]
        return {"text": shortened("\n".join(lines), MAX_TEXT_CHARS), "images": images}


def _described(name: str, about: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    """An entry of an action for the system message."""
    optional = "" if name in schema.get("required", []) else ", optional"
    limits = "".join(f", {word} {_json(about[key])}" for key, word in LIMITS.items() if about.get(key) is not None)
    more = f", {about['description']}" if about.get("description") else ""
    return f"{name} ({_kind(about, schema)}{optional}{limits}{more})"


def _kind(about: Any, root: Mapping[str, Any], depth: int = 0) -> str:
    """The values that a JSON schema inside a root schema allows."""
    # a schema may refer to itself
    if not isinstance(about, Mapping) or depth > MOST_NESTED:
        return "any"
    if isinstance(whole := referenced(about, root), Mapping):
        return _kind(whole, root, depth + 1)
    if "enum" in about or "const" in about:
        return " or ".join(map(_json, about.get("enum") or [about.get("const")]))
    if parts := about.get("anyOf") or about.get("oneOf") or about.get("allOf"):
        return " or ".join(_kind(part, root, depth + 1) for part in parts)
    kind = about.get("type", "any")
    if kind == "array" and "items" in about:
        return f"array of {_kind(about['items'], root, depth + 1)}"
    if kind == "object" and about.get("properties"):
        entries = (f"{key}: {_kind(part, root, depth + 1)}" for key, part in about["properties"].items())
        return f"object with {', '.join(entries)}"
    return kind if isinstance(kind, str) else " or ".join(kind)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _written(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _image(value: Any) -> Any:
    """An image of base64, a data URL or nested lists."""
    if not isinstance(value, str):
        return np.asarray(value, np.uint8)
    try:
        return decode_image(base64.b64decode(value.rpartition(",")[2]))
    except (ImageError, ValueError) as error:
        raise MalformedError(f"an image of the observation cannot be read: {error}") from None
