"""Verifiers that ask a vision-language model: one of the suite's own, or one behind an OpenAI-compatible endpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from robotics.flow3d.asking import ChatEndpoint, LocalModel, NoAnswer, VlmClient
from robotics.flow3d.check.question import QUESTION, SYSTEM, read_verdict
from robotics.flow3d.check.verdict import PlanFacts, Verdict
from robotics.flow3d.geometry import ImageArray

if TYPE_CHECKING:
    from mmrl.vlm.policy import VlmPolicy


class VlmVerifier:
    """Asks a Qwen2.5-VL or Qwen3-VL in this process."""

    def __init__(self, policy: VlmPolicy, max_new_tokens: int = 160) -> None:
        self.client = LocalModel(policy, max_new_tokens)

    def verify(self, before: ImageArray, after: ImageArray, instruction: str, meta: PlanFacts) -> Verdict:
        """Ask the model; see `Verifier`."""
        return _verdict_of(self.client, before, after, instruction)


class EndpointVerifier:
    """Asks a model behind an OpenAI-compatible chat endpoint."""

    def __init__(
        self,
        url: str,
        model: str,
        *,
        timeout_s: float = 60.0,
        max_tokens: int = 300,
        api_key_env: str = "OPENAI_API_KEY",
    ) -> None:
        self.client = ChatEndpoint(url, model, timeout_s, max_tokens, api_key_env, owner="verifier")

    def verify(self, before: ImageArray, after: ImageArray, instruction: str, meta: PlanFacts) -> Verdict:
        """Ask the endpoint; see `Verifier`. `ok` is None after a refusal, a timeout or without a server."""
        return _verdict_of(self.client, before, after, instruction)


def _verdict_of(client: VlmClient, before: ImageArray, after: ImageArray, instruction: str) -> Verdict:
    try:
        answer = client.ask(SYSTEM, QUESTION.format(instruction=instruction), [before, after])
    except NoAnswer as error:
        return Verdict(None, 0.0, str(error))
    return read_verdict(answer)
