"""RLPD: soft actor-critic in which demonstrations are half of every batch.

It is `robotics.offpolicy.sac` with other defaults: ten critics with layer normalisation, the minimum of two of them in
a target, an actor that maximises the mean of all, twenty updates of the critics for each decision and one of the actor
after them, and a target entropy of half a nat per entry of an action. Each update has the same number of
demonstrations, half of `batch`, rounded up.

Source: RLPD, arXiv 2302.02948; ikostrikov/rlpd configs/rlpd_config.py, and README.md for tasks that reward only
    success: its target there has no entropy. Differences: a new policy warms up by its own actions and not by uniform
    ones; the hidden layers are two, as in its configuration, and not three, as in these commands; and `sac.demo_bc`
    adds behaviour cloning, which RLPD does not have.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mmrl.fields import bounded, choice
from robotics.offpolicy.sac import WARMUPS, RobotSacConfig, RobotSacRecipe
from robotics.offpolicy.sac_learner import QSettings, SacSettings, TemperatureSettings


def _settings() -> SacSettings:
    return SacSettings(
        actor_every=None,
        actor_values="mean",
        entropy_in_target=False,
        critics=QSettings(count=10, subset=2, layer_norm=True),
        temperature=TemperatureSettings(target_entropy=-0.5),
    )


@dataclass
class RobotRlpdConfig(RobotSacConfig):
    """A run of RLPD on a robot; `prior.path` is required."""

    sac: SacSettings = field(default_factory=_settings)
    """The method."""
    utd: float = bounded(20.0, above=0)
    """Updates of the critics per decision of the policy; fractions are carried over to the next step."""
    warmup: str = choice("policy", WARMUPS)
    """Actions of the warm-up: policy = as always; random = uniform."""

    def validate(self) -> None:
        """Check that there is prior data; raises ValueError."""
        super().validate()
        if not self.prior.path:
            raise ValueError("robot_rlpd learns from demonstrations; set prior.path, or use robot_sac without any")


class RobotRlpdRecipe(RobotSacRecipe):
    """The recipe of `robot_sac` with the configuration of RLPD."""

    config: RobotRlpdConfig
