"""Presets of `robotics.offpolicy.sac`: RLPD, the residual of a frozen policy, and the noise that one starts from.

`robot_rlpd` has ten critics with layer normalisation, the minimum of two of them in a target, an actor that maximises
the mean of all, twenty updates of the critics for each decision and one of the actor after them, and a target entropy
of half a nat per entry of an action. Each update has the same number of demonstrations, half of `batch`, rounded up.

`robot_residual` and `robot_dsrl` have a policy of `robotics.policies.improved`. The warm-up is played by the base, and
the critics learn from it before the head does. A residual's critics judge the summed action, those of `robot_dsrl` the
noise; their state is the simulator's full state, or what the head reads.

Source: RLPD, arXiv 2302.02948; ikostrikov/rlpd configs/rlpd_config.py, and README.md for tasks that reward only
    success: its target there has no entropy. Differences: a new policy warms up by its own actions and not by uniform
    ones; the hidden layers are two, as in its configuration, and not three, as in these commands; and `sac.demo_bc`
    adds behaviour cloning, which RLPD does not have.
    Johannink et al., arXiv 1812.03201 (residuals). Differences from PLD, arXiv 2511.00091: the critics are not
    pretrained with a conservative loss, and successes are not distilled back into the base.
    DSRL-SAC, arXiv 2506.15799, without the second critic of DSRL-NA; ajwagen/dsrl, its settings for robomimic's can
    (bound, updates, target entropy).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mmrl.fields import bounded, choice
from robotics.offpolicy.sac import WARMUPS, RobotSacConfig, RobotSacRecipe
from robotics.offpolicy.sac_learner import QSettings, SacSettings, TemperatureSettings
from robotics.policies.policy_loading import ActionPolicyConfig


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


@dataclass
class RobotResidualConfig(RobotSacConfig):
    """A run that learns a residual on the actions of a frozen policy."""

    model: ActionPolicyConfig = field(default_factory=lambda: ActionPolicyConfig(kind="residual"))
    """The policy, of kind residual; `model.options.base` is the frozen one."""
    sac: SacSettings = field(
        default_factory=lambda: SacSettings(
            actor_after=1000,
            entropy_in_target=False,
            critics=QSettings(layer_norm=True),
            temperature=TemperatureSettings(initial=0.01),
        )
    )
    """The method."""
    utd: float = bounded(4.0, above=0)
    """Updates of the critics per decision of the policy; fractions are carried over to the next step."""
    warmup: str = choice("base", WARMUPS)
    """Actions of the warm-up: base = those of the frozen base; policy = as always."""


@dataclass
class RobotDsrlConfig(RobotSacConfig):
    """A run that learns the noise that a frozen flow policy starts from."""

    model: ActionPolicyConfig = field(default_factory=lambda: ActionPolicyConfig(kind="steered"))
    """The policy, of kind steered; `model.options.base` is the frozen one."""
    sac: SacSettings = field(
        default_factory=lambda: SacSettings(
            critics=QSettings(layer_norm=True), temperature=TemperatureSettings(target_entropy=0.0)
        )
    )
    """The method."""
    utd: float = bounded(20.0, above=0)
    """Updates of the critics per decision of the policy; fractions are carried over to the next step."""
    warmup: str = choice("base", WARMUPS)
    """Actions of the warm-up: base = those of the frozen base; policy = as always."""


class RobotResidualRecipe(RobotSacRecipe):
    """Soft actor-critic on the residual of a frozen policy."""


class RobotDsrlRecipe(RobotSacRecipe):
    """Soft actor-critic on the noise that a frozen flow policy starts from."""
