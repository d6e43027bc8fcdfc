"""A model behind an OpenAI-compatible chat endpoint, queried over HTTP with text and images.

Request and answer are JSON with images as PNG in base64; nothing that comes over the network is ever unpickled.
"""

from __future__ import annotations

import base64
import http.client
import io
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from PIL import Image

from mmrl.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_ANSWER_BYTES = 4 << 20


class ModelRefused(RuntimeError):  # noqa: N818 - named after what happened
    """The endpoint works, but its model declines to answer."""


def check_url(url: str, owner: str) -> None:
    """Raise UserError, beginning with the owner's name, if an address is not http or https."""
    if not url.startswith(("http://", "https://")):
        raise UserError(f"{owner}: url is {url!r}; must start with http:// or https://")


def ask_chat(
    url: str,
    model: str,
    text: str,
    images: Sequence[NDArray[np.uint8]] = (),
    *,
    system: str = "",
    max_tokens: int = 512,
    timeout_s: float = 60.0,
    api_key: str = "",
) -> str:
    """Ask one question about images (H, W, 3) uint8 and return the answer; `timeout_s` limits the whole exchange.

    `url` is the server's address up to /v1; `api_key` is sent as a bearer token where given.
    """
    content: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": _data_uri(each)}} for each in images]
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": [*content, {"type": "text", "text": text}]})
    body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": max_tokens}
    return _post(f"{url.rstrip('/')}/chat/completions", body, timeout_s, api_key)


def _data_uri(image: NDArray[np.uint8]) -> str:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def _post(url: str, body: dict[str, Any], timeout_s: float, api_key: str) -> str:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
    request = urllib.request.Request(url, data=json.dumps(body).encode(), headers=headers, method="POST")
    exchange = _Exchange(timeout_s)
    try:
        with exchange.open(request) as response:
            content = response.read(MAX_ANSWER_BYTES + 1)
    except (OSError, http.client.HTTPException) as error:
        if exchange.is_over() or isinstance(getattr(error, "reason", error), TimeoutError):
            raise TimeoutError(f"{url} did not complete an answer within {timeout_s:g} s") from error
        raise RuntimeError(f"{url} cannot be queried: {error}") from error
    finally:
        exchange.end()
    if exchange.is_over():  # what was cut off then may look like the end
        raise TimeoutError(f"{url} did not complete an answer within {timeout_s:g} s")
    if len(content) > MAX_ANSWER_BYTES:
        raise RuntimeError(f"{url} sent an answer larger than {MAX_ANSWER_BYTES >> 20} MiB")
    return _read_answer(url, content)


def _read_answer(url: str, content: bytes) -> str:
    try:
        choice = json.loads(content)["choices"][0]
        message, cut = choice["message"], choice.get("finish_reason") == "length"
        text, refusal = message.get("content"), message.get("refusal")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise RuntimeError(f"{url} did not answer like a chat endpoint: {type(error).__name__}: {error}") from error
    if cut and not str(text or "").strip():
        raise RuntimeError(f"{url} used up max_tokens before answering, as reasoning models may; increase it")
    if refusal or text is None:
        raise ModelRefused(f"{url} refused to answer: {refusal or 'no content'}")
    return str(text)


class _Exchange:
    """A request with one time limit for everything: a socket's own timeout restarts with every byte."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s
        self._timers: list[threading.Timer] = []

    def open(self, request: urllib.request.Request) -> Any:
        """Send the request; returns the response, which the caller must close."""
        plain, secure = _Http(), _Https()
        plain.exchange = secure.exchange = self
        return urllib.request.build_opener(plain, secure).open(request, timeout=self._timeout_s)

    def connection(self, kind: type[http.client.HTTPConnection]) -> Any:
        """A function that makes connections of a given kind, for `do_open`."""

        def make(host: str, **options: Any) -> http.client.HTTPConnection:
            made = kind(host, **options)
            made._create_connection = self.connect  # type: ignore[attr-defined]
            return made

        return make

    def connect(self, address: tuple[str, int], *_: Any, **__: Any) -> socket.socket:
        """Connect within the remaining time, and cut the connection when it is over."""
        left_s = max(0.001, self._end - time.monotonic())
        connected = socket.create_connection(address, left_s)
        timer = threading.Timer(max(0.001, self._end - time.monotonic()), _cut, (connected,))
        timer.daemon = True
        timer.start()
        self._timers.append(timer)
        return connected

    def is_over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() >= self._end

    def end(self) -> None:
        """Stop watching."""
        for timer in self._timers:
            timer.cancel()


class _Http(urllib.request.HTTPHandler):
    exchange: _Exchange

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self.exchange.connection(http.client.HTTPConnection), req)


class _Https(urllib.request.HTTPSHandler):
    exchange: _Exchange

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self.exchange.connection(http.client.HTTPSConnection), req)


def _cut(connected: socket.socket) -> None:
    try:
        connected.shutdown(socket.SHUT_RDWR)
    except OSError:  # it is closed already
        return
