"""PAPO by its public code: one micro-batch of the actor's update, with and without the optional terms."""

from collections import defaultdict
from types import SimpleNamespace

import torch

from tests.golden.make.peers import Clone, Made, doubles, gradient, numbers, tensors
from tests.golden.make.tokens import COUNT_EPS, Verl, batch, far

COMMIT = "fb63bf4533b78da5a2bb17bc812375dcb620887d"
SCRIPT = {
    "clip_ratio_low": 0.2,
    "clip_ratio_high": 0.3,
    "clip_ratio_dual": 3.0,
    "loss_avg_mode": "token",
    "use_kl_loss": True,
    "kl_penalty": "low_var_kl",
    "kl_coef": 0.01,
    "use_kl_prcp": True,
    "kl_prcp_penalty": "low_var_kl",
    "kl_prcp_coef": 0.02,
    "use_kl_prcp_token_level_mask": False,
    "use_kl_prcp_clipping": False,
    "use_aug_entropy_loss": False,
    "aug_entropy_loss_coef": 0.0,
    "use_ori_entropy_loss": False,
    "use_sft_loss": False,
}
"""The constants of PAPO_G's script."""
ENTROPY = {
    "use_aug_entropy_loss": True,
    "aug_entropy_loss_coef": 0.05,
    "use_ori_entropy_loss": True,
    "ori_entropy_loss_coef": 0.03,
}
LIKELIHOOD = {"use_sft_loss": True, "sft_loss_coef": 1e-3}
SHARE = {"use_kl_prcp_token_level_mask": True, "kl_prcp_token_level_mask_top_p": 0.2}
CLIP = {"use_kl_prcp_clipping": True, "kl_prcp_clipping": 0.2}


def make(path: str) -> Made:
    clone = Clone(path, "MikeWangWZHL/PAPO", COMMIT)
    inputs = batch() | {"logp_masked": numbers(6, 12, 6, low=-3.5, high=-0.3)}
    inputs |= {"weight": [1.0] * 8 + [0.0] * 4, "correct": [1.0, 0.0, 0.0, 0.0] * 2 + [0.0, 1.0, 1.0, 0.0]}
    advantage = Verl(inputs).advantage("compute_grpo_outcome_advantage")
    # all but the first half way through the annealing
    cases = {"entropies, share": ENTROPY | SHARE, "entropies, clip": ENTROPY | CLIP}
    cases |= {"share and clip": SHARE | CLIP, "likelihood": LIKELIHOOD}
    with doubles():
        peers = [run(clone, inputs, advantage, {}, 0.02) | {"case": "script"}]
        peers += [run(clone, inputs, advantage, more, 0.01) | {"case": case} for case, more in cases.items()]
        beyond = far(inputs)
        peers.append({"inputs": beyond} | run(clone, inputs | beyond, advantage, {}, 0.02) | {"case": "far"})
    return "PAPO, arXiv 2507.06448", inputs, peers, clone


def run(clone: Clone, inputs: dict, advantage: torch.Tensor, options: dict, coef: float) -> dict:
    """Loss of the lines of `update_policy` that make it, and its gradient by the log-probabilities."""
    b = tensors(inputs)
    b.logp.requires_grad_()
    algos, masked_mean = "verl/trainer/core_algos.py", clone.function("verl/utils/torch_functional.py", "masked_mean")
    names = {"VF": SimpleNamespace(masked_mean=masked_mean)}
    names["average_loss"] = clone.function(algos, "average_loss", **names)
    names["compute_policy_loss"] = clone.function(algos, "compute_policy_loss", **names)
    names["compute_kl"] = clone.function(algos, "compute_kl")
    found = clone.lines(
        "verl/workers/actor/dp_actor.py",
        299,
        398,
        **names,
        self=SimpleNamespace(config=SimpleNamespace(**(SCRIPT | options))),
        metrics=defaultdict(list),
        model_inputs={"ref_log_probs": b.logp_ref},
        old_log_probs=b.logp_old,
        log_probs=b.logp,
        advantages=advantage,
        response_mask=b.mask,
        entropy_loss=-masked_mean(b.logp, b.mask),
        aug_log_probs=b.logp_masked,
        kl_prcp_weighting=b.weight.tolist(),
        kl_prcp_coef=[coef] * 12,
        correctness_mult_mask=b.correct.tolist(),
    )
    return {
        "program": clone.name,
        "calls": ["verl/workers/actor/dp_actor.py:299-398"],
        **COUNT_EPS,
        "options": options | {"coef": coef},
        "advantage": advantage,
        "loss": found.pg_loss.detach(),
        "gradient": gradient(found.pg_loss, b.logp),
    }
