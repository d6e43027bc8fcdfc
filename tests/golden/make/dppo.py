"""DPPO by verl and SkyRL."""

from types import SimpleNamespace
from typing import Any

from tests.golden.make.tokens import SkyRl, Verl


def peers(inputs: dict[str, Any], kind: str, bound: float) -> list[dict[str, Any]]:
    """verl's loss, and SkyRL's gradient: its loss is -A r, which has the same one."""
    changes = {"changes": {"clip": {"low": bound, "high": bound}}}
    verl, sky = Verl(inputs), SkyRl(inputs)
    advantage = verl.advantage("compute_grpo_outcome_advantage")
    loss = verl.policy_loss(f"dppo_{kind}", advantage, "token-mean", bound, bound, dual=20.0)
    config = SimpleNamespace(dppo_type=f"binary_{kind}", delta_low=bound, delta_high=bound)
    other = sky.answer("dppo_policy_loss", loss=sky.loss("dppo_policy_loss", advantage, "token_mean", dppo=config))
    del other["loss"]
    return [verl.answer(advantage, loss) | changes, other | changes]
