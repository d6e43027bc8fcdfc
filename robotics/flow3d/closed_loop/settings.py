"""Options of a closed loop: who verifies, how grasps are found, how it is planned and carried out."""

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
    """How a flow becomes an episode."""

    verifier: VerifierConfig = field(default_factory=VerifierConfig)
    """Who judges predicted outcomes."""
    grasps: list[str] = rare(field(default_factory=lambda: ["primitive", "antipodal"]))
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


def verifier_in(config: VerifierConfig, opened: Verifier | None, robot: FlowTabletop) -> Verifier | None:
    """The verifier for a scene: that of `open_verifier`, or the scene's own criteria."""
    if config.kind != "oracle":
        return opened
    return PredicateVerifier(lambda T_t_0: robot.success(T_t_0 @ robot.object_pose()).success)
