"""Soft actor-critic on a frozen policy: its residual (`robot_residual`), or the noise it starts from (`robot_dsrl`).

Both are `robotics.offpolicy.sac` with a policy of `robotics.policies.improved` and other defaults. The warm-up is
played by the base, and the critics learn from it before the head does. A residual's critics judge the summed action,
those of `robot_dsrl` the noise; their state is the simulator's full state, or what the head reads.

Differences from PLD, arXiv 2511.00091: the critics are not pretrained with a conservative loss, and successes are not
distilled back into the base. `robot_dsrl` is DSRL-SAC, arXiv 2506.15799, without the second critic of DSRL-NA.

Source: Johannink et al., arXiv 1812.03201 (residuals); ajwagen/dsrl, its settings for robomimic's can
    (bound, updates, target entropy).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mmrl.fields import bounded, choice
from robotics.offpolicy.sac import WARMUPS, RobotSacConfig, RobotSacRecipe
from robotics.offpolicy.sac_learner import QSettings, SacSettings, TemperatureSettings
from robotics.policies.policy_loading import ActionPolicyConfig


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
