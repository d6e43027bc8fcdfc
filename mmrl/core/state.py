"""Coefficients that move during a run, their state explicit."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["AdaptiveKL"]


@dataclass
class AdaptiveKL:
    """Controller that moves the coefficient of a divergence so that the divergence meets a target.

    Source: Ziegler et al., arXiv 1909.08593, section 2.2; volcengine/verl AdaptiveKLController.
    """

    coefficient: float
    """The coefficient now in use."""
    target: float
    """Wanted divergence in nats."""
    horizon: float
    """Samples over which the coefficient moves by the relative error."""

    def __post_init__(self) -> None:
        if min(self.coefficient, self.target, self.horizon) <= 0:
            raise ValueError(
                "AdaptiveKL needs a positive coefficient, target and horizon; got "
                f"{self.coefficient}, {self.target}, {self.horizon}."
            )

    def update(self, divergence: float, samples: int) -> float:
        """Move the coefficient after a step.

        Args:
            divergence: Measured divergence in nats.
            samples: Rows the step was made of.

        Returns:
            The new coefficient.
        """
        error = min(max(divergence / self.target - 1.0, -0.2), 0.2)
        self.coefficient *= 1.0 + error * samples / self.horizon
        return self.coefficient

    def state_dict(self) -> dict[str, float]:
        """Return what a checkpoint has to keep."""
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from a checkpoint."""
        self.coefficient = float(state["coefficient"])
