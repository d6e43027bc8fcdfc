"""The default loss of prime-rl, whose gradient is compared: its policy loss is -A r, which has the same one."""

from types import SimpleNamespace

from tests.golden.make.peers import Clone, Made, gradient
from tests.golden.make.tokens import Verl, batch, far

FILE = "src/prime_rl/trainer/rl/loss.py"


def make(path: str) -> Made:
    inputs, peers = batch(), []
    clone = Clone(path, "PrimeIntellect-ai/prime-rl", "559b44772e471d1538537b8805cc77f3824a5e64")
    names = {name: clone.function(FILE, name) for name in ("_safe_mean", "compute_importance_ratio_and_mismatch_kl")}
    rule = clone.function(FILE, "default_loss_fn", LossOutputs=SimpleNamespace, **names)
    for bound, tau, changed in ((0.2, 1e-3, {}), (0.1, 0.3, {}), (0.2, 1e-3, far(inputs))):
        verl = Verl(inputs | changed)
        advantage = verl.advantage("compute_grpo_outcome_advantage", norm_adv_by_std_in_grpo=False)
        given = {"trainer_logprobs": verl.b.logp, "inference_logprobs": verl.b.logp_old, "advantages": advantage}
        given |= {"loss_mask": verl.b.mask > 0, "loss_weights": None}
        constants = SimpleNamespace(dppo_mask_low=bound, dppo_mask_high=bound, adv_tau=1.0, kl_tau=tau)
        loss = rule(SimpleNamespace(**given), constants).loss / verl.b.mask.sum()
        numbers = {"gradient": gradient(loss, verl.b.logp), "relative": 1e-12}
        peer = {"program": clone.name, "calls": [f"{FILE} default_loss_fn"]} | ({"inputs": changed} if changed else {})
        changes = {"clip": {"low": bound, "high": bound, "squared": tau}}
        peers.append(peer | ({"changes": changes} if bound != 0.2 else {}) | numbers)
    return "default loss of prime-rl", inputs, peers, clone
