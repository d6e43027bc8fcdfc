"""The clip rule of DCPO by its public code, with the bounds of its paper and of its script."""

from types import SimpleNamespace

from tests.golden.make.forks import CORE, COUNT_EPS, fork_names
from tests.golden.make.peers import Clone, Made, gradient, numbers, tensors
from tests.golden.make.tokens import batch


def make(path: str) -> Made:
    clone = Clone(path, "lime-RL/DCPO", "01787b0f61580961162faeb492defeb39f1eba53")
    inputs = batch() | {"advantage": numbers(8, 12, 6)}
    # decisions so unlikely that the upper bound is capped, and a ratio beyond the dual clip
    inputs["logp_old"][0][0], inputs["logp"][0][0] = -7.0, -4.2
    inputs["logp_old"][1][1], inputs["logp"][1][1] = -6.0, -3.2
    inputs["logp_old"][3][2], inputs["logp"][3][2] = -8.0, -5.1
    return "DCPO, arXiv 2509.02333", inputs, [run(clone, inputs, 0.16, 0.2), run(clone, inputs, 0.2, 0.28)], clone


def run(clone: Clone, inputs: dict, low: float, high: float) -> dict:
    b = tensors(inputs)
    logp, names = b.logp.requires_grad_(), fork_names(clone)
    names |= {"AlgoConfig": type(None), "get_clip_low_high": clone.function(CORE, "get_clip_low_high")}
    names["agg_loss"] = lambda loss_mat, loss_mask, **_: names["verl_F"].masked_mean(loss_mat, loss_mask)
    options = {"clip_ratio": 0.2, "clip_ratio_low": low, "clip_ratio_high": high}
    options |= {"clip_type": "dynamic", "clip_ratio_c": 10.0}
    config = SimpleNamespace(**options, get=options.get)
    loss = clone.function(CORE, "compute_policy_loss_dcpo", **names)(
        b.logp_old, logp, b.advantage * b.mask, b.mask, config=config
    )[0]
    return {
        "program": clone.name,
        "calls": [f"{CORE}:compute_policy_loss_dcpo"],
        **COUNT_EPS,
        "options": {"low": low, "high": high},
        "loss": loss.detach(),
        "gradient": gradient(loss, logp),
    }
