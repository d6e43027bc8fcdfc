"""An OpenAI-compatible chat endpoint on this machine whose replies are given by the policy in training.

A session is one episode and has its own key. Requests wait in its queue until they are answered; a request with the key
of another session is refused, so that a program left over from an earlier episode cannot take part in a later one.

Source of the messages: the Chat Completions API of OpenAI, platform.openai.com/docs/api-reference/chat.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import json
import queue
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from mmrl.agents.environments.action_formats import whole_text
from mmrl.agents.environments.environment import MAX_IMAGES, MAX_TEXT_CHARS, Observation
from mmrl.agents.environments.tools import shortened
from mmrl.hub.foreign import MalformedError, as_image

if TYPE_CHECKING:
    import numpy as np

PATH, MODELS = "/v1/chat/completions", "/v1/models"
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""Roles of the API, and what chat templates call them."""
MAX_BODY_BYTES = 256 << 20
ANYTHING = ("messages", "tools", "model", "stream", "stream_options", "user", "metadata", "store", "seed")
"""Entries of a request that do not change how the policy samples."""


class RequestError(ValueError):
    """A request that cannot be read; the message is the reason."""


def read_request(body: Any) -> Observation:
    """The messages, tools and sampling settings of a request, as `Observation.request`; raises RequestError.

    The text of the observation is that of the messages after the last one of the assistant, shortened: the model reads
    the request.
    """
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list) or not body["messages"]:
        raise RequestError("the request has no list of messages")
    images, names = list["np.ndarray"](), dict[str, str]()
    messages = [_message(message, images, names) for message in body["messages"]]
    if messages[-1]["role"] == "assistant":
        raise RequestError("the last message is from the assistant; the policy answers the user, the system or a tool")
    if len(images) > MAX_IMAGES:
        raise RequestError(f"the messages have {len(images)} images; at most {MAX_IMAGES} are allowed")
    last = max((place for place, turn in enumerate(messages, 1) if turn["role"] == "assistant"), default=0)
    texts = [part["text"] for turn in messages[last:] for part in turn["content"] if part["type"] == "text"]
    if not isinstance(body.get("stream_options") or {}, dict):
        raise RequestError(f"stream_options is {body['stream_options']!r:.80}; expected an object")
    settings = {name: value for name, value in body.items() if name not in ANYTHING and value is not None}
    request = {"messages": messages, "tools": _tools(body.get("tools") or []), "settings": settings}
    return Observation(
        shortened("\n".join(texts), MAX_TEXT_CHARS),
        tuple(images),
        request=whole_text(json.dumps(request, ensure_ascii=False)),
    )


def _message(message: Any, images: list[np.ndarray], names: dict[str, str]) -> dict[str, Any]:
    """A message as chat templates take it; adds its images, and the names of its calls by their ids."""
    if not isinstance(message, dict) or str(message.get("role")) not in ROLES:
        raise RequestError(f"a message must have one of the roles {', '.join(ROLES)}: {message!r:.200}")
    turn: dict[str, Any] = {"role": ROLES[message["role"]]}
    turn["content"] = list(_parts(message.get("content"), images))
    if turn["role"] == "tool":
        own = str(message.get("tool_call_id") or "")
        turn |= {"tool_call_id": own, "name": str(message.get("name") or names.get(own) or "unknown")}
    if turn["role"] == "assistant":
        thought = message.get("reasoning_content") or message.get("reasoning")
        turn |= {"reasoning_content": thought} if isinstance(thought, str) else {}
        calls = [_call(call) for call in message.get("tool_calls") or []]
        names |= {call["id"]: call["function"]["name"] for call in calls}
        turn |= {"tool_calls": calls} if calls else {}
    return turn


def _parts(content: Any, images: list[np.ndarray]) -> Iterator[dict[str, Any]]:
    parts = [{"type": "text", "text": content or ""}] if content is None or isinstance(content, str) else content
    for part in parts if isinstance(parts, list) else [parts]:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind == "text" and isinstance(part.get("text"), str):
            yield {"type": "text", "text": part["text"]}
        elif kind == "image_url":
            address = part["image_url"].get("url") if isinstance(part.get("image_url"), dict) else None
            images.append(_image(str(address)))
            # the digest tells one image from another when requests are compared
            yield {"type": "image", "digest": blake2b(images[-1].tobytes(), digest_size=8).hexdigest()}
        else:
            raise RequestError(f"a message has content of the type {kind!r}; text and image_url are supported")


def _image(address: str) -> np.ndarray:
    from mmrl.hub.images import ImageError, decode_image

    head, _, data = address.partition(";base64,")
    if not head.startswith("data:") or not data:
        raise RequestError(f"an image is at {address[:80]!r}; only data URLs with base64 are read")
    try:
        return as_image(decode_image(base64.b64decode(data, validate=True)))
    except (binascii.Error, ImageError, MalformedError) as error:
        raise RequestError(f"an image cannot be read: {error}") from None


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"a tool call has no function with a name: {call!r:.200}")
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        # chat templates write arguments from a mapping; what is no JSON stays text
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return {
        "type": "function",
        "id": str(call.get("id") or ""),
        "function": {"name": function["name"], "arguments": arguments},
    }


def _tools(tools: Any) -> list[dict[str, Any]]:
    for tool in tools if isinstance(tools, list) else [tools]:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(f"a tool is no function with a name: {tool!r:.200}")
    # without entries such as `strict`, which are instructions to a server
    usual = {"name": "", "description": "", "parameters": {"type": "object", "properties": {}}}
    return [
        {"type": "function", "function": {key: tool["function"].get(key) or other for key, other in usual.items()}}
        for tool in tools
    ]


@dataclass
class Exchange:
    """A request and, once it is answered, its reply."""

    observation: Observation
    answered: threading.Event = field(default_factory=threading.Event)
    reply: Mapping[str, Any] | None = None
    """Content, reasoning, calls, finish reason and counts of tokens; None if the session ended before."""

    def answer(self, reply: Mapping[str, Any] | None) -> None:
        """Set the reply."""
        self.reply = reply
        self.answered.set()


class Session:
    """The requests of one episode, in the order of their arrival."""

    def __init__(self) -> None:
        self.key = f"mmrl-{secrets.token_urlsafe(24)}"
        """Key that its requests must have."""
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        """Requests, and what else its owner adds."""
        self._lock = threading.Lock()
        # a program may send the same request several times at once, for several answers
        self._sent: list[tuple[bytes, Exchange]] = []
        self._over = False

    def ask(self, body: bytes, retried: bool) -> Exchange:
        """Add a request, or find it if a client sends it again because it lost the connection."""
        with self._lock:
            if retried and (known := [exchange for sent, exchange in self._sent if sent == body]):
                return known[-1]
            try:
                exchange = Exchange(read_request(json.loads(body)))
            except RequestError:
                raise
            # also JSON that nests too deep, a number with too many digits, and a value of another type than the API's
            except (ValueError, RecursionError, TypeError) as error:
                raise RequestError(f"the request is not JSON of the API: {error}") from None
            self._sent.append((body, exchange))
            self.events.put(exchange)
            if self._over:
                exchange.answer(None)
            return exchange

    def end(self) -> None:
        """Refuse everything that has no reply yet."""
        with self._lock:
            self._over = True
            for _, exchange in self._sent:
                if not exchange.answered.is_set():
                    exchange.answer(None)


class ChatEndpoint:
    """The server, on a free port of this machine; `session` is the current episode."""

    def __init__(self) -> None:
        endpoint = self

        class Handler(_Handler):
            owner = endpoint

        self.session = Session()
        self._server = _Server(("127.0.0.1", 0), Handler)
        self.base_url = f"http://127.0.0.1:{self._server.server_port}/v1"
        """Address for clients."""
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def begin(self) -> Session:
        """End the current session and start another."""
        self.session.end()
        self.session = Session()
        return self.session

    def close(self) -> None:
        """Stop the server."""
        self.session.end()
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    """Has room for the requests that a program sends at the same time; those beyond it lose their connection."""

    daemon_threads = True
    request_queue_size = 1024


class _Handler(BaseHTTPRequestHandler):
    """Reads one request, waits for its reply and writes it."""

    owner: ChatEndpoint
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Answer a request."""
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > MAX_BODY_BYTES:
            self.close_connection = True
            return self._refuse(400, f"the request needs a Content-Length of at most {MAX_BODY_BYTES}")
        body, session = self.rfile.read(int(length)), self.owner.session
        if self.path.partition("?")[0] != PATH:
            return self._refuse(404, f"there is no {self.path}; the policy answers POST {PATH}")
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), session.key.encode()):
            return self._refuse(401, "this is not the key of the running episode")
        try:
            exchange = session.ask(body, self.headers.get("x-stainless-retry-count", "0") != "0")
        except RequestError as error:
            return self._refuse(400, str(error))
        exchange.answered.wait()
        # a client that has gone away sends the request again
        with suppress(OSError):
            if exchange.reply is None:
                # 403, which clients do not try again
                return self._refuse(403, "the episode is over")
            request = json.loads(body)
            if request.get("stream"):
                self._write(200, b"".join(_events(exchange.reply, request)), "text/event-stream")
            else:
                self._write(200, json.dumps(_completion(exchange.reply, request)).encode())
        return None

    def do_GET(self) -> None:
        """List the policy, which clients ask for; any other name of a model means it too."""
        if self.path.partition("?")[0] != MODELS:
            return self._refuse(404, f"there is no {self.path}; the policy answers POST {PATH}")
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "mmrl"}
        return self._write(200, json.dumps({"object": "list", "data": [model]}).encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: errors are in the replies."""

    def _refuse(self, status: int, message: str) -> None:
        kind = "authentication_error" if status == 401 else "invalid_request_error"
        self._write(status, json.dumps({"error": {"message": message, "type": kind, "code": None}}).encode())

    def _write(self, status: int, content: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def _completion(reply: Mapping[str, Any], request: Mapping[str, Any]) -> dict[str, Any]:
    """A reply as an object `chat.completion`."""
    choice = {"index": 0, "message": _said(reply), "finish_reason": reply["finish_reason"], "logprobs": None}
    return {**_head(request, "chat.completion"), "choices": [choice], "usage": _usage(reply)}


def _events(reply: Mapping[str, Any], request: Mapping[str, Any]) -> Iterator[bytes]:
    """A reply as a stream: the whole message in one chunk, since it is sampled together with those of other rows."""
    message = _said(reply)
    calls = [{"index": number, **call} for number, call in enumerate(message.get("tool_calls", ()))]
    delta = message | ({"tool_calls": calls} if calls else {})
    head = _head(request, "chat.completion.chunk")
    chunks: list[dict[str, Any]] = [
        {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": reply["finish_reason"]}]},
    ]
    if (request.get("stream_options") or {}).get("include_usage"):
        chunks.append({**head, "choices": [], "usage": _usage(reply)})
    yield from (f"data: {json.dumps(chunk)}\n\n".encode() for chunk in chunks)
    yield b"data: [DONE]\n\n"


def _head(request: Mapping[str, Any], kind: str) -> dict[str, Any]:
    own = f"chatcmpl-{secrets.token_hex(12)}"
    return {"id": own, "object": kind, "created": int(time.time()), "model": str(request.get("model") or "policy")}


def _said(reply: Mapping[str, Any]) -> dict[str, Any]:
    calls = [
        {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
        for call in reply["tool_calls"]
    ]
    message: dict[str, Any] = {"role": "assistant", "content": reply["content"] or (None if calls else "")}
    message |= {"reasoning_content": reply["reasoning"]} if reply["reasoning"] else {}
    return message | ({"tool_calls": calls} if calls else {})


def _usage(reply: Mapping[str, Any]) -> dict[str, int]:
    read, written = int(reply["prompt_tokens"]), int(reply["completion_tokens"])
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
