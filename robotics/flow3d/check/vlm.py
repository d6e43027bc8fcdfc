"""Verifiers that ask a vision-language model: one of the suite's own, or one behind an OpenAI-compatible endpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from robotics.flow3d.asking import Asker, Endpoint, NoAnswer, OwnModel
from robotics.flow3d.check.question import SYSTEM, question, read_verdict
from robotics.flow3d.check.verdict import PlanFacts, Verdict

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from mmrl.vlm.policy import VlmPolicy


class VlmVerifier:
    """Asks a Qwen2.5-VL or Qwen3-VL in this process."""

    def __init__(self, policy: VlmPolicy, max_new_tokens: int = 160) -> None:
        self.asker = OwnModel(policy, max_new_tokens)

    def verify(self, before: NDArray[np.uint8], after: NDArray[np.uint8], instruction: str, meta: PlanFacts) -> Verdict:
        """Take the likeliest answer; see `Verifier`."""
        return _verdict_of(self.asker, before, after, instruction)


class EndpointVerifier:
    """Asks a model behind an OpenAI-compatible chat endpoint.

    Args:
        url: address of the server up to /v1.
        model: name of the model there.
        timeout_s: seconds for the whole exchange.
        max_tokens: longest answer.
        api_key_env: variable of the environment that holds the key; nothing is sent where it is not set.
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
        self.asker = Endpoint(url, model, timeout_s, max_tokens, api_key_env, owner="verifier")

    def verify(self, before: NDArray[np.uint8], after: NDArray[np.uint8], instruction: str, meta: PlanFacts) -> Verdict:
        """Ask the endpoint; see `Verifier`. After a refusal, a timeout or without a server, ok is None."""
        return _verdict_of(self.asker, before, after, instruction)


def _verdict_of(asker: Asker, before: NDArray[np.uint8], after: NDArray[np.uint8], instruction: str) -> Verdict:
    try:
        answer = asker.ask(SYSTEM, question(instruction), [before, after])
    except NoAnswer as error:
        return Verdict(None, 0.0, str(error))
    return read_verdict(answer)
