"""Options of a closed loop."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mmrl.fields import rare
from robotics.flow3d.act.grasps import PROPOSERS
from robotics.flow3d.check.opening import VerifierConfig
from robotics.flow3d.check.verdict import PredicateVerifier, Verifier
from robotics.flow3d.planner_config import PlannerConfig

if TYPE_CHECKING:
    from robotics.flow3d.scenes.tabletop import FlowTabletop


@dataclass
class LoopConfig:
    """From a flow to an episode."""

    verifier: VerifierConfig = field(default_factory=VerifierConfig)
    """Verifier of predicted outcomes."""
    grasps: list[str] = rare(field(default_factory=lambda: ["primitive", "antipodal"]))
    """Rows of `PROPOSERS`."""
    planner: PlannerConfig = field(default_factory=PlannerConfig)
    """Planning and execution."""
    language_swap: bool = True
    """Also predict for the other instructions of a scene, without executing them."""
    seed: int = 0
    """Seed of the predictions, together with the episode's number."""

    def validate(self) -> None:
        """Raise ValueError for unknown proposers."""
        unknown = [name for name in self.grasps if name not in PROPOSERS]
        if unknown or not self.grasps:
            raise ValueError(f"grasps has {unknown or 'nothing'}; there are {', '.join(PROPOSERS)}")


def verifier_in(config: VerifierConfig, opened: Verifier | None, robot: FlowTabletop) -> Verifier | None:
    """The verifier for a scene: `opened`, or the scene's own criteria for oracle."""
    if config.kind != "oracle":
        return opened
    return PredicateVerifier(lambda T_t_0: robot.success(T_t_0 @ robot.object_pose()).success)
