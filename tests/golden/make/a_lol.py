"""A-LoL's loss by its public code; the scores of the sides are advantages."""

from copy import deepcopy
from types import SimpleNamespace

from tests.golden.make.pairs import pairs
from tests.golden.make.peers import Clone, Made, doubles, gradient, tensors

COMMIT = "9f8d81660bfa0bad17ae5d7835185987f028812e"
FILE = "lolrl_qlora_llama_hh.py"
RATIO, LOSS = (865, 875), (876, 905)


def make(path: str) -> Made:
    clone = Clone(path, "abaheti95/LoL-RL", COMMIT)
    inputs = pairs()
    b = tensors(inputs)
    logp, model = b.logp.requires_grad_(), SimpleNamespace(device="cpu")
    names = {
        "deepcopy": deepcopy,
        "per_token_log_probs": -logp,
        "baseline_per_token_log_probs": -b.logp_ref,
        "response_mask": b.mask,
        "baseline_response_mask": b.mask,
        "batch_rewards": b.score.numpy(),
        "val_outputs": 0.0,
        "script_args": SimpleNamespace(ppo_clip=0.9, kl_beta=0.0),
        **dict.fromkeys(("model", "baseline_model"), model),
        **dict.fromkeys(("total_advantage", "total_per_resp_loss_with_IS", "step"), 0.0),
        "postfix_dict": {},
    }
    with doubles():
        ratio = clone.lines(FILE, *RATIO, **names).importance_sampling_ratio
        loss = clone.lines(FILE, *LOSS, **names, importance_sampling_ratio=ratio).loss
    calls = [f"{FILE}:{first}-{last}" for first, last in (RATIO, LOSS)]
    peer = {"program": clone.name, "calls": calls, "relative": 1e-12, "options": {}}
    peer |= {"loss": loss.detach(), "gradient": gradient(loss, logp)}
    return "A-LoL, arXiv 2305.14718", inputs, [peer], clone
