"""Verifiers by configuration, and their verdicts on sampled flows as numbers."""

from __future__ import annotations

from dataclasses import dataclass

from mmrl.fields import bounded, choice, rare
from robotics.flow3d.check.geometric import GeometricVerifier
from robotics.flow3d.check.verdict import AlwaysVerifier, Verifier

VERIFIERS = ("none", "always", "geometric", "oracle", "vlm", "endpoint")


@dataclass
class VerifierConfig:
    """The verifier of predicted outcomes."""

    kind: str = choice("geometric", VERIFIERS)
    """none: no rendering or judgement; always: rendered and accepted; geometric: without a model; oracle: the task's
    criteria on the predicted pose, an upper bound; vlm: a local model; endpoint: one behind a chat server."""
    path: str = ""
    """Folder or hub id of the model; read by vlm."""
    url: str = rare("")
    """Address of the server up to /v1; read by endpoint."""
    model: str = ""
    """Name of the model there; read by endpoint."""
    timeout_s: float = bounded(60.0, above=0)
    """Seconds for an answer; read by endpoint."""

    def validate(self) -> None:
        """Raise ValueError for a verifier that lacks an option."""
        if self.kind == "vlm" and not self.path:
            raise ValueError("verifier.kind is vlm, but verifier.path names no model")
        if self.kind == "endpoint" and not (self.url and self.model):
            raise ValueError("verifier.kind is endpoint; name verifier.url, such as http://host:8000/v1, and model")


def open_verifier(config: VerifierConfig) -> Verifier | None:
    """The verifier of a configuration; None for none, and for oracle, which depends on the scene."""
    if config.kind == "geometric":
        return GeometricVerifier()
    if config.kind == "always":
        return AlwaysVerifier()
    if config.kind == "vlm":
        from mmrl.vlm.model_config import ModelConfig
        from mmrl.vlm.models import load_policy
        from robotics.flow3d.check.vlm import VlmVerifier

        return VlmVerifier(load_policy(ModelConfig(path=config.path)))
    if config.kind == "endpoint":
        from robotics.flow3d.check.vlm import EndpointVerifier

        return EndpointVerifier(config.url, config.model, timeout_s=config.timeout_s)
    return None
