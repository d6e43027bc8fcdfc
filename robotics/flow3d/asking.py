"""Questions to a vision-language model: one in this process, or one behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from robotics.flow3d.geometry import ImageArray

if TYPE_CHECKING:
    from mmrl.vlm.policy import VlmPolicy

FENCE = re.compile(r"^```(?:json)?\s*\n(.*)\n```$", re.DOTALL)


class NoAnswer(RuntimeError):  # noqa: N818
    """The model gave no answer: it refused, timed out, is down, or cannot read the question."""


class VlmClient(Protocol):
    """Answers questions about images."""

    def ask(self, system: str, text: str, images: Sequence[ImageArray]) -> str:
        """The answer to a question about images (H, W, 3); raises NoAnswer."""


@dataclass(frozen=True)
class LocalModel:
    """A Qwen2.5-VL or Qwen3-VL in this process."""

    policy: VlmPolicy
    """For example from `mmrl.vlm.models.load_policy`."""
    max_new_tokens: int = 160
    """Longest answer."""

    def ask(self, system: str, text: str, images: Sequence[ImageArray]) -> str:
        """The greedy answer; see `VlmClient`."""
        from PIL import Image

        from mmrl.errors import UserError
        from mmrl.vlm.sampler import sample
        from mmrl.vlm.sampling import SamplerConfig
        from mmrl.vlm.task import TaskError, VlmTask

        content = [*({"type": "image"} for _ in images), {"type": "text", "text": text}]
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}, {"role": "user", "content": content}]
        task = VlmTask("plan", messages, [Image.fromarray(image) for image in images])
        try:
            prompt = self.policy.encode(task)
            config = SamplerConfig(max_new_tokens=self.max_new_tokens)
            answers = sample(self.policy, [prompt], 1, config, None)
        except (TaskError, UserError) as error:
            raise NoAnswer(f"the model cannot read the question: {error}") from error
        return answers.texts[0]


@dataclass(frozen=True)
class ChatEndpoint:
    """A model behind an OpenAI-compatible chat endpoint; a `url` that is not http or https raises UserError."""

    url: str
    """Server address up to /v1."""
    model: str
    """Name of the model there."""
    timeout_s: float = 60.0
    """Limit for the whole request."""
    max_tokens: int = 300
    """Longest answer."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable with the key; optional."""
    owner: str = "endpoint"
    """First word of error messages about the address."""

    def __post_init__(self) -> None:
        from mmrl.hub.chat_endpoint import check_url

        check_url(self.url, self.owner)

    def ask(self, system: str, text: str, images: Sequence[ImageArray]) -> str:
        """The endpoint's answer; see `VlmClient`."""
        from mmrl.hub.chat_endpoint import ModelRefused, ask_chat

        try:
            return ask_chat(
                self.url,
                self.model,
                text,
                list(images),
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
    """JSON of a model's answer, with or without a Markdown fence; other text raises ValueError."""
    text = answer.strip()
    fenced = FENCE.match(text)
    try:
        return json.loads(fenced.group(1) if fenced else text)
    except RecursionError as error:
        raise ValueError("too deep") from error
