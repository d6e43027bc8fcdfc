"""Settings of `FlowPlanner`."""

from __future__ import annotations

from dataclasses import dataclass, field

from mmrl.errors import UserError
from mmrl.fields import bounded, choice, rare
from robotics.flow3d.plan.execution import ExecutionSettings
from robotics.flow3d.plan.reach import ReachSettings
from robotics.flow3d.plan.rendering import POINTS, RENDERERS
from robotics.flow3d.rigid_motion import ESTIMATORS, IN_SPACE


@dataclass(frozen=True)
class PlannerConfig:
    """Settings of a plan."""

    samples: int = bounded(4, at_least=1)
    """K, maximum number of predictions per plan; the paper gives no number."""
    grid: int = rare(bounded(4, at_least=1))
    """N, query points per side; a model with an `encoding` uses its own value."""
    support_z_m: float | None = rare(0.0)
    """Height of the support in the world frame; null = no support."""
    estimator: str = choice("irls", ESTIMATORS)
    """Fit of the motion to the flow. irls: robust; kabsch: least squares; pnp and frozen_depth only use u and v."""
    flow_scale_m: float = bounded(0.03, above=0)
    """Distance at which a point counts half in the fit: 0.03 for a model's flow, 0.01 for measured flow."""
    from_first_predicted: bool = rare(False)
    """Measure motions from the first predicted frame, as the public viewer does."""
    renderer: str = rare(choice(POINTS, RENDERERS))
    """Renderer of the predicted outcome: the image's points with open3d, or the simulator with `replay`."""
    when_rejected: str = rare(choice("best", ("best", "stop")))
    """If no plan is accepted, execute the one with the highest score (best), or stop."""
    when_unverified: str = rare(choice("stop", ("best", "stop")))
    """The same if the verifier could not judge, for example because its server is down."""
    reach: ReachSettings = rare(field(default_factory=ReachSettings))
    """Checks of the arm's path."""
    execution: ExecutionSettings = field(default_factory=ExecutionSettings)
    """Execution in chunks, renewed observation, and release."""

    def validate(self) -> None:
        """Raise UserError if the estimator cannot start from the first predicted frame."""
        if self.from_first_predicted and self.estimator not in IN_SPACE:
            raise UserError(
                f"from_first_predicted does not apply to the estimator {self.estimator}, which takes depth from the "
                f"first image; use {' or '.join(IN_SPACE)}"
            )
