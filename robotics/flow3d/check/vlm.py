"""Verifiers that ask a vision-language model: one of the suite's own, or one behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from mmrl.errors import UserError
from robotics.flow3d.check.question import SYSTEM, question, read_verdict
from robotics.flow3d.check.verdict import PlanFacts, Verdict

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from mmrl.vlm.policy import VlmPolicy

__all__ = ["EndpointVerifier", "VlmVerifier"]


class VlmVerifier:
    """Asks a Qwen2.5-VL or Qwen3-VL in this process.

    Args:
        policy: the model, such as `mmrl.vlm.models.load_policy` gives it.
        max_new_tokens: longest answer.
    """

    def __init__(self, policy: VlmPolicy, max_new_tokens: int = 160) -> None:
        self.policy, self.max_new_tokens = policy, max_new_tokens

    def verify(self, before: NDArray[np.uint8], after: NDArray[np.uint8], instruction: str, meta: PlanFacts) -> Verdict:
        """Take the likeliest answer; see `Verifier`."""
        import torch
        from PIL import Image

        from mmrl.vlm.sampler import sample
        from mmrl.vlm.sampling import SamplerConfig
        from mmrl.vlm.task import TaskError, VlmTask

        content = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": question(instruction)}]
        messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": content}]
        task = VlmTask("plan", messages, [Image.fromarray(before), Image.fromarray(after)])
        try:
            prompt = self.policy.encode(task)
            config = SamplerConfig(max_new_tokens=self.max_new_tokens)
            answers = sample(self.policy, [prompt], 1, config, torch.Generator(), greedy=True)
        except (TaskError, UserError) as error:
            return Verdict(None, 0.0, f"the model cannot be asked: {error}")
        return read_verdict(answers.texts[0])


class EndpointVerifier:
    """Asks a model behind an OpenAI-compatible chat endpoint.

    Args:
        url: address of the server up to /v1.
        model: name of the model there.
        timeout_s: seconds for the whole exchange.
        max_tokens: longest answer.
        api_key_env: variable of the environment that holds the key; nothing is sent where it is not set.

    Raises:
        UserError: the address is not http or https.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        timeout_s: float = 60.0,
        max_tokens: int = 300,
        api_key_env: str = "OPENAI_API_KEY",
    ) -> None:
        from mmrl.hub.chat_endpoint import check_url

        check_url(url, "verifier")
        self.url, self.model = url, model
        self.timeout_s, self.max_tokens, self.api_key_env = timeout_s, max_tokens, api_key_env

    def verify(self, before: NDArray[np.uint8], after: NDArray[np.uint8], instruction: str, meta: PlanFacts) -> Verdict:
        """Ask the endpoint; see `Verifier`. After a refusal, a timeout or without a server, ok is None."""
        from mmrl.hub.chat_endpoint import ModelRefused, ask_chat

        try:
            answer = ask_chat(
                self.url,
                self.model,
                question(instruction),
                [before, after],
                system=SYSTEM,
                max_tokens=self.max_tokens,
                timeout_s=self.timeout_s,
                api_key=os.environ.get(self.api_key_env, ""),
            )
        except ModelRefused as error:
            return Verdict(None, 0.0, f"refused: {error}")
        except TimeoutError as error:
            return Verdict(None, 0.0, f"timeout: {error}")
        except RuntimeError as error:
            return Verdict(None, 0.0, f"down: {error}")
        return read_verdict(answer)
