"""How a plan is made: the settings of `FlowPlanner`."""

from __future__ import annotations

from dataclasses import dataclass, field

from mmrl.errors import UserError
from mmrl.fields import bounded, choice, rare
from robotics.flow3d.act.choice import ReachSettings
from robotics.flow3d.act.chunk_solver import ChunkSettings
from robotics.flow3d.act.estimators import ESTIMATORS, IN_SPACE
from robotics.flow3d.act.ik import IkSettings
from robotics.flow3d.check.outcome import RENDERERS, REPLAY
from robotics.flow3d.execution import ExecutionSettings


@dataclass(frozen=True)
class PlannerConfig:
    """How a plan is made."""

    samples: int = bounded(4, at_least=1)
    """K, most predictions for one plan; the paper does not give its number."""
    grid: int = rare(bounded(4, at_least=1))
    """N, query points a side; a model with an `encoding` brings its own."""
    min_points: int = rare(bounded(8, at_least=3))
    """Pixels of the object with depth, at least."""
    support_z_m: float | None = rare(0.0)
    """Height of what objects stand on, in the world frame; null where there is nothing."""
    estimator: str = choice("irls", ESTIMATORS)
    """Reads the motion from the flow: irls, robust; kabsch, least squares; pnp and frozen_depth take u and v alone."""
    flow_scale_m: float = bounded(0.03, above=0)
    """Distance at which a point counts half in the fit: 0.03 for a model's flow, 0.01 for measured flow."""
    smooth_window: int = rare(bounded(3, at_least=1))
    """Frames of the moving average of motions."""
    from_first_predicted: bool = rare(False)
    """Measure motions from the first predicted frame, as the public viewer does."""
    least_way_m: float = rare(bounded(0.005, at_least=0))
    """A flow that moves no point of the object farther moves nothing."""
    renderer: str = rare(choice("numpy", lambda: (*RENDERERS, REPLAY)))
    """Draws the predicted outcome: points by numpy or open3d, or a simulator's exact picture by `replay`."""
    when_rejected: str = rare(choice("best", ("best", "stop")))
    """Carry out the plan with the highest score when none is accepted, or stop."""
    when_unverified: str = rare(choice("stop", ("best", "stop")))
    """The same where the verifier could not judge, such as when its server is down."""
    solver: str = rare(choice("closed_form", ("closed_form", "chunk")))
    """closed_form follows the fitted motion; chunk adjusts it by the paper's optimisation, in seconds a grasp."""
    chunk: ChunkSettings = rare(field(default_factory=ChunkSettings))
    """Weights and bounds of the solver chunk."""
    refined_grasps: int = rare(bounded(1, at_least=1))
    """Grasps, those with the least joint path, whose motion the solver chunk adjusts."""
    check_collisions: bool = rare(True)
    """Keep arm and hand clear of support, object and scene."""
    ik: IkSettings = rare(field(default_factory=IkSettings))
    """Inverse kinematics."""
    reach: ReachSettings = rare(field(default_factory=ReachSettings))
    """How the arm's way is checked."""
    execution: ExecutionSettings = field(default_factory=ExecutionSettings)
    """Chunks, looking again, letting go."""

    def validate(self) -> None:
        """Refuse a start that the estimator does not look at; raises UserError."""
        if self.from_first_predicted and self.estimator not in IN_SPACE:
            raise UserError(
                f"from_first_predicted has no meaning for the estimator {self.estimator}, which takes depth from the "
                f"first picture; use {' or '.join(IN_SPACE)}"
            )
