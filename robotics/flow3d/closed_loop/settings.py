"""Options of a closed loop: who verifies, how grasps are found, how it is planned and carried out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mmrl.fields import bounded, choice
from robotics.flow3d.act.grasps import PROPOSERS
from robotics.flow3d.check.geometric import GeometricVerifier
from robotics.flow3d.check.verdict import AlwaysVerifier, PredicateVerifier, Verifier
from robotics.flow3d.planner_config import PlannerConfig

if TYPE_CHECKING:
    from robotics.flow3d.scenes.tabletop import FlowTabletop

__all__ = ["LoopConfig", "VerifierConfig", "open_verifier", "verifier_in"]

VERIFIERS = ("none", "always", "geometric", "oracle", "vlm", "endpoint")


@dataclass
class VerifierConfig:
    """Who judges predicted outcomes."""

    kind: str = choice("geometric", VERIFIERS)
    """none: nothing is drawn or judged; always: drawn and accepted; geometric: without a model; oracle: the task's own
    criteria on the predicted pose, an upper bound; vlm: a model of the suite; endpoint: one behind a chat server."""
    path: str = ""
    """Folder or hub id of the model; read by vlm."""
    url: str = ""
    """Address of the server up to /v1; read by endpoint."""
    model: str = ""
    """Name of the model there; read by endpoint."""
    timeout_s: float = bounded(60.0, above=0)
    """Seconds for an answer; read by endpoint."""

    def validate(self) -> None:
        """Refuse a verifier without what it needs; raises ValueError."""
        if self.kind == "vlm" and not self.path:
            raise ValueError("verifier.kind is vlm, but verifier.path names no model")
        if self.kind == "endpoint" and not (self.url and self.model):
            raise ValueError("verifier.kind is endpoint; name verifier.url, such as http://host:8000/v1, and model")


@dataclass
class LoopConfig:
    """How a flow becomes an episode."""

    verifier: VerifierConfig = field(default_factory=VerifierConfig)
    """Who judges predicted outcomes."""
    grasps: list[str] = field(default_factory=lambda: ["primitive", "antipodal"])
    """Rows of `PROPOSERS`."""
    planner: PlannerConfig = field(default_factory=PlannerConfig)
    """How a plan is made and carried out."""
    language_swap: bool = True
    """Ask the model also for the other instructions of a scene; nothing is carried out for them."""
    seed: int = 0
    """Of the predictions, with the number of the episode."""

    def validate(self) -> None:
        """Refuse unknown proposers; raises ValueError."""
        unknown = [name for name in self.grasps if name not in PROPOSERS]
        if unknown or not self.grasps:
            raise ValueError(f"grasps has {unknown or 'nothing'}; there are {', '.join(PROPOSERS)}")


def open_verifier(config: VerifierConfig) -> Verifier | None:
    """The verifier of a configuration; None for none, and for oracle, which `verifier_in` makes for each scene.

    Raises:
        UserError: the model cannot be read, or the address is none.
    """
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


def verifier_in(config: VerifierConfig, opened: Verifier | None, robot: FlowTabletop) -> Verifier | None:
    """The verifier for a scene: that of `open_verifier`, or the scene's own criteria."""
    if config.kind != "oracle":
        return opened
    return PredicateVerifier(lambda T_t_0: robot.success(T_t_0 @ robot.object_pose()).success)
