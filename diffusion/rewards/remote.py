"""A vision-language model behind an HTTP server as the judge of pictures.

Request and answer are JSON with the picture as PNG in base64; nothing that comes over the network is ever unpickled.
"""

from __future__ import annotations

import base64
import functools
import http.client
import io
import json
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mmrl.errors import UserError

__all__ = ["read_score", "unified_reward"]

HIGHEST = 5.0
MAX_TOKENS = 512
MAX_ANSWER_BYTES = 4 << 20
QUESTION = (
    "You are given a picture that was generated for this prompt: {prompt}\n"
    "Judge how well the picture shows what the prompt asks for and how good it looks. Explain briefly, then end with "
    "a line 'Final Score: x', where x is a number from 1 (worst) to 5 (best)."
)
FINAL_SCORE = re.compile(r"Final Score:\s*\**\s*(-?\d+(?:\.\d+)?)", re.IGNORECASE)


def unified_reward(
    prompts: Sequence[str],
    completions: Sequence[NDArray[np.uint8]],
    *,
    url: str,
    model: str = "UnifiedReward",
    question: str = QUESTION,
    timeout_s: float = 60.0,
    **_: Any,
) -> list[float]:
    """Ask a server for a score of each picture, as UnifiedReward is asked through an OpenAI-compatible endpoint.

    Args:
        prompts: B captions.
        completions: B pictures (H, W, 3) uint8.
        url: address of the server up to /v1, to which /chat/completions is added.
        model: name of the model at the server.
        question: what the model is asked; {prompt} stands for the caption.
        timeout_s: seconds for one exchange, from the connection to the last byte of the answer.

    Returns:
        B numbers from 0 to 1, the score over 5.

    Raises:
        UserError: the address is not http or https, or the question has no {prompt}.
        RuntimeError: the server cannot be reached, or its answer has no score; that is no reward of 0.
        TimeoutError: it took too long.

    Source: UnifiedReward, arXiv 2503.05236; the scale of yifan123/flow_grpo flow_grpo/rewards.py, where a failure
        scores 0.
    """
    if not url.startswith(("http://", "https://")):
        raise UserError(f"unified_reward: url is {url!r}; must start with http:// or https://")
    if "{prompt}" not in question:
        raise UserError("unified_reward: the question must contain {prompt}")
    rewards = []
    for prompt, image in zip(prompts, completions, strict=True):
        asked = _request(model, question.replace("{prompt}", prompt), image)
        rewards.append(read_score(_post(f"{url.rstrip('/')}/chat/completions", asked, timeout_s)))
    return rewards


def read_score(answer: str) -> float:
    """Read the last "Final Score: x" of an answer.

    Args:
        answer: what the model wrote.

    Returns:
        x / 5.

    Raises:
        RuntimeError: there is no score, or it is not between 0 and 5.
    """
    found = FINAL_SCORE.findall(answer)
    if not found:
        raise RuntimeError(f"the answer has no 'Final Score: x': {answer[-200:]!r}")
    score = float(found[-1])
    if not 0.0 <= score <= HIGHEST:
        raise RuntimeError(f"the final score is {score}; must be between 0 and {HIGHEST:.0f}")
    return score / HIGHEST


def _request(model: str, text: str, image: NDArray[np.uint8]) -> dict[str, Any]:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="PNG")
    picture = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
    content = [{"type": "image_url", "image_url": {"url": picture}}, {"type": "text", "text": text}]
    return {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
    }


def _post(url: str, body: dict[str, Any], timeout_s: float) -> str:
    request = urllib.request.Request(
        url, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}, method="POST"
    )
    exchange = _Exchange(timeout_s)
    try:
        with exchange.open(request) as response:
            content = response.read(MAX_ANSWER_BYTES + 1)
    except (OSError, http.client.HTTPException) as error:
        if exchange.is_over() or isinstance(getattr(error, "reason", error), TimeoutError):
            raise TimeoutError(f"{url} gave no whole answer within {timeout_s:g} s") from error
        raise RuntimeError(f"{url} cannot be asked: {error}") from error
    finally:
        exchange.end()
    if exchange.is_over():  # what was cut off then may look like the end
        raise TimeoutError(f"{url} gave no whole answer within {timeout_s:g} s")
    if len(content) > MAX_ANSWER_BYTES:
        raise RuntimeError(f"{url} answered with more than {MAX_ANSWER_BYTES >> 20} MiB")
    try:
        return str(json.loads(content)["choices"][0]["message"]["content"])
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise RuntimeError(f"{url} did not answer as a chat endpoint does: {type(error).__name__}: {error}") from error


class _Exchange:
    """A request with one limit for everything: a socket's own timeout begins anew with every byte.

    Args:
        timeout_s: seconds after which its connections are cut.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s, self._end = timeout_s, time.monotonic() + timeout_s
        self._timers: list[threading.Timer] = []

    def open(self, request: urllib.request.Request) -> Any:
        """Send the request; returns the response, to be closed."""
        opener = urllib.request.build_opener(_Http(self), _Https(self))
        return opener.open(request, timeout=self._timeout_s)

    def connect(self, address: tuple[str, int], *_: Any, **__: Any) -> socket.socket:
        """Connect for what is left of the time, and cut the connection after it."""
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
    def __init__(self, exchange: _Exchange) -> None:
        super().__init__()
        self._exchange = exchange

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(functools.partial(_connection, http.client.HTTPConnection, self._exchange), req)


class _Https(urllib.request.HTTPSHandler):
    def __init__(self, exchange: _Exchange) -> None:
        super().__init__()
        self._exchange = exchange

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(functools.partial(_connection, http.client.HTTPSConnection, self._exchange), req)


def _connection(
    kind: type[http.client.HTTPConnection], exchange: _Exchange, host: str, **options: Any
) -> http.client.HTTPConnection:
    connection = kind(host, **options)
    connection._create_connection = exchange.connect  # type: ignore[attr-defined]
    return connection


def _cut(connected: socket.socket) -> None:
    try:
        connected.shutdown(socket.SHUT_RDWR)
    except OSError:  # it is closed already
        return
