"""Asking a vision-language model about pictures: the suite's own, or one behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from mmrl.vlm.policy import VlmPolicy

FENCE = re.compile(r"^```(?:json)?\s*\n(.*)\n```$", re.DOTALL)


class NoAnswer(RuntimeError):  # noqa: N818 - named after what happened
    """The model gave no answer: it refused, took too long, is down, or cannot take the question."""


class Asker(Protocol):
    """Whoever answers questions about pictures."""

    def ask(self, system: str, text: str, pictures: Sequence[NDArray[np.uint8]]) -> str:
        """Ask one question.

        Args:
            system: what the model is there for.
            text: the question, after the pictures.
            pictures: (H, W, 3) each.
        """


@dataclass(frozen=True)
class OwnModel:
    """A Qwen2.5-VL or Qwen3-VL in this process."""

    policy: VlmPolicy
    """Such as `mmrl.vlm.models.load_policy` gives it."""
    max_new_tokens: int = 160
    """Longest answer."""

    def ask(self, system: str, text: str, pictures: Sequence[NDArray[np.uint8]]) -> str:
        """The likeliest answer; see `Asker`."""
        from PIL import Image

        from mmrl.errors import UserError
        from mmrl.vlm.sampler import sample
        from mmrl.vlm.sampling import SamplerConfig
        from mmrl.vlm.task import TaskError, VlmTask

        content = [*({"type": "image"} for _ in pictures), {"type": "text", "text": text}]
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}, {"role": "user", "content": content}]
        task = VlmTask("plan", messages, [Image.fromarray(picture) for picture in pictures])
        try:
            prompt = self.policy.encode(task)
            config = SamplerConfig(max_new_tokens=self.max_new_tokens)
            answers = sample(self.policy, [prompt], 1, config, None)
        except (TaskError, UserError) as error:
            raise NoAnswer(f"the model cannot be asked: {error}") from error
        return answers.texts[0]


@dataclass(frozen=True)
class Endpoint:
    """A model behind an OpenAI-compatible chat endpoint; an address that is not http or https raises UserError."""

    url: str
    """Address of the server up to /v1."""
    model: str
    """Name of the model there."""
    timeout_s: float = 60.0
    """Seconds for the whole exchange."""
    max_tokens: int = 300
    """Longest answer."""
    api_key_env: str = "OPENAI_API_KEY"
    """Variable of the environment that holds the key; nothing is sent where it is not set."""
    owner: str = "endpoint"
    """First word of the error about the address."""

    def __post_init__(self) -> None:
        from mmrl.hub.chat_endpoint import check_url

        check_url(self.url, self.owner)

    def ask(self, system: str, text: str, pictures: Sequence[NDArray[np.uint8]]) -> str:
        """The endpoint's answer; see `Asker`."""
        from mmrl.hub.chat_endpoint import ModelRefused, ask_chat

        try:
            return ask_chat(
                self.url,
                self.model,
                text,
                list(pictures),
                system=system,
                max_tokens=self.max_tokens,
                timeout_s=self.timeout_s,
                api_key=os.environ.get(self.api_key_env, ""),
            )
        except ModelRefused as error:
            raise NoAnswer(f"refused: {error}") from error
        except TimeoutError as error:
            raise NoAnswer(f"timeout: {error}") from error
        except RuntimeError as error:
            raise NoAnswer(f"down: {error}") from error


def read_json(answer: str) -> object:
    """JSON that a model wrote; a Markdown fence around it is forgiven, other words raise ValueError."""
    text = answer.strip()
    fenced = FENCE.match(text)
    try:
        return json.loads(fenced.group(1) if fenced else text)
    except RecursionError as error:
        raise ValueError("too deep") from error
