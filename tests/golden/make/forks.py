"""Policy losses of papers whose code is a fork of verl."""

from types import SimpleNamespace
from typing import Any

from torch import Tensor

from tests.golden.make.peers import Clone, gradient, tensors

CORE = "verl/trainer/ppo/core_algos.py"
COUNT_EPS = {"relative": 1e-8, "because": "it adds 1e-8 to the number of tokens that a mean is taken over"}


def fork_names(clone: Clone, root: str = "") -> dict[str, Any]:
    """Globals for the functions of a core_algos.py below `root`."""
    means, names = f"{root}verl/utils/torch_functional.py", {}
    if "def masked_sum" in (clone.path / means).read_text():  # newer forks
        names["masked_sum"] = clone.function(means, "masked_sum")
    mean = clone.function(means, "masked_mean", **names)
    return {"verl_F": SimpleNamespace(masked_mean=mean)}


def fork_loss(
    clone: Clone, inputs: dict[str, Any], advantage: Tensor, average: str, low: float, high: float, dual: float
) -> dict[str, Any]:
    """Value and gradient of a fork's `compute_policy_loss`."""
    b = tensors(inputs)
    logp, names = b.logp.requires_grad_(), fork_names(clone)
    names["agg_loss"] = clone.function(CORE, "agg_loss", **names)
    bounds = {"cliprange_low": low, "cliprange_high": high, "clip_ratio_c": dual}
    compute = clone.function(CORE, "compute_policy_loss", **names)
    loss = compute(b.logp_old, logp, advantage, b.mask, **bounds, loss_agg_mode=average)[0]
    return {"loss": loss.detach(), "gradient": gradient(loss, logp)}


def token_rewards(inputs: dict[str, Any]) -> Tensor:
    """The reward at the first token of each row, whose sum over tokens is all that outcome estimators read."""
    b = tensors(inputs)
    rewards = b.mask.new_zeros(b.mask.shape)
    rewards[:, 0] = b.reward
    return rewards
