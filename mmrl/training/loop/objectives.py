"""A row of the catalogue of objectives and what a run changes in it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from mmrl.core.advantages import AdvantageOptions
from mmrl.core.catalogue import get
from mmrl.core.objective import Objective

__all__ = ["ObjectiveConfig", "make_objective"]


@dataclass
class ObjectiveConfig:
    """A row of the catalogue and what differs from it; an empty field keeps the row's value."""

    preset: str = "grpo"
    """Name in `mmrl list objectives`."""
    advantage: str | None = None
    """Advantage estimator."""
    advantage_eps: float | None = None
    """Constant added to the standard deviation."""
    advantage_ddof: int | None = None
    """1 divides by G-1, 0 by G."""
    advantage_clip: float | None = None
    """Bound of the advantage's absolute value; 0 switches it off."""
    advantage_scale: float | None = None
    """Factor on the advantage after the bound."""
    gamma: float | None = None
    """Discount between decisions."""
    lam: float | None = None
    """Lambda of GAE."""
    ratio: str | None = None
    """Level of the importance ratio."""
    surrogate: str | None = None
    """Clipping rule."""
    clip_low: float | None = None
    """Lower clip: ratios below 1 - clip_low."""
    clip_high: float | None = None
    """Upper clip: ratios above 1 + clip_high."""
    dual_clip: float | None = None
    """Bound c of dual clip for negative advantages; 0 switches it off."""
    kl: str | None = None
    """KL to the reference: the estimators k1, k2, k3, or full (exact) where the policy can score it."""
    kl_coef: float | None = None
    """Weight of the KL term."""
    kl_in_reward: bool | None = None
    """Subtract the KL from the reward instead of adding it to the loss."""
    kl_aggregation: str | None = None
    """Aggregation of the KL term where it differs from that of the policy term."""
    kl_clamp: bool | None = None
    """Bound the k3 estimator as EasyR1 does."""
    entropy: str | None = None
    """Entropy term: sampled or full."""
    entropy_coef: float | None = None
    """Weight of the entropy bonus."""
    aggregation: str | None = None
    """token_mean, sequence_mean or fixed_length."""
    fixed_length: int | None = None
    """Length L of fixed_length."""
    value_coef: float | None = None
    """Weight of the value loss (objectives with a critic)."""


def make_objective(config: ObjectiveConfig, longest: int | None = None) -> Objective:
    """Combine a catalogue row with the fields that a configuration sets.

    Args:
        config: preset and overrides.
        longest: most decisions of a row, the length L of fixed_length aggregation unless the configuration sets it.

    Returns:
        The validated objective.

    Raises:
        ValueError: unknown preset or option, or options that contradict each other.
    """
    objective = get(config.preset)
    changes = {key: value for key, value in dataclasses.asdict(config).items() if value is not None}
    changes.pop("preset")
    options = {ADVANTAGE_KEYS[key]: changes.pop(key) for key in list(changes) if key in ADVANTAGE_KEYS}
    if options.get("clip") == 0:
        options["clip"] = None
    if options:
        base: AdvantageOptions = objective.advantage_options
        changes["advantage_options"] = dataclasses.replace(base, **options)
    if changes.get("dual_clip") == 0:
        changes["dual_clip"] = None
    if changes.get("kl_coef") == 0:
        changes |= {"kl": None, "kl_in_reward": False}
    modes = [changes.get(key, getattr(objective, key)) for key in ("aggregation", "kl_aggregation")]
    if objective.fixed_length and "fixed_length" not in modes:
        changes.setdefault("fixed_length", None)
    elif objective.fixed_length and longest:
        changes.setdefault("fixed_length", longest)
    objective = dataclasses.replace(objective, **changes)
    objective.validate()
    return objective


ADVANTAGE_KEYS = {
    "advantage_eps": "eps",
    "advantage_ddof": "ddof",
    "advantage_clip": "clip",
    "advantage_scale": "scale",
    "gamma": "gamma",
    "lam": "lam",
}
"""Fields that are options of the estimator, by the names that it gives them."""
