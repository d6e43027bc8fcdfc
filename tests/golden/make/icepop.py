"""IcePop by verl, and the other weights and gates between sampler and trainer by verl and TRL."""

import inspect
import math
import textwrap
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from tests.golden.make.peers import Made, numbers, package, tensors
from tests.golden.make.tokens import COUNT_EPS, Trl, Verl, batch

MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
FIRST, LAST = "per_token_logps_diff = (old_per_token_logps", "# Compute the per-token log probabilities for the ref"
"""The lines of `GRPOTrainer._generate_and_score_completions` that make weights of log-probabilities."""


def make() -> Made:
    inputs = batch() | {"logp_rollout": rollout_logps(batch()["logp_old"])}
    # weights of 0.52 and 4.8, a little inside the bounds of 0.5 and 5
    near = {"logp_rollout": [[*row] for row in inputs["logp_rollout"]]}
    for row, weight in ((0, 0.52), (3, 4.8)):
        near["logp_rollout"][row][0] = round(inputs["logp_old"][row][0] - math.log(weight), 4)
    peers = [icepop(inputs), {"inputs": near} | icepop(inputs | near)]
    peers += [weights(inputs, level, bounds) for level in ("token", "sequence") for bounds in (2.0, "0.5_5.0")]
    gates = {"token_k1": (0.5, 2.0), "seq_sum_k1": (0.5, 2.0), "seq_mean_k1": (0.9, 1.2)}
    peers += [gate(inputs, kind, low, high) for kind, (low, high) in gates.items()]
    peers += [trl(inputs, mode, low, high) for mode in MODES for low, high in ((None, 3.0), (0.5, 2.0))]
    return "IcePop in Ring-1T, arXiv 2510.18855; TIS and MIS as in verl and TRL", inputs, peers


def rollout_logps(old: list[list[float]]) -> list[list[float]]:
    """The sampler's log-probabilities: near the trainer's, but for tokens beyond each bound."""
    moves = numbers(6, 12, 6, low=-0.15, high=0.2)
    moves[0][1], moves[3][2], moves[8][4], moves[9][0] = 1.2, -1.9, 0.8, -0.9
    return [[round(a + b, 3) for a, b in zip(*rows, strict=True)] for rows in zip(old, moves, strict=True)]


def icepop(inputs: dict[str, Any]) -> dict[str, Any]:
    verl = Verl(inputs)
    advantage = verl.advantage("compute_grpo_outcome_advantage")
    config = verl.config(strategy="fsdp", rollout_n=4, use_dynamic_bsz=True, clip_ratio_c=1e9)
    b, weight = verl.b, verl_weights(inputs, "token", "0.5_5.0")
    given = (b.logp_old, b.logp, advantage, b.mask, "seq-mean-token-mean", config)
    loss = verl._call("compute_policy_loss_vanilla", *given, rollout_is_weights=weight)[0]
    return verl.answer(advantage, loss, **COUNT_EPS) | {"row": "icepop"}


def verl_weights(inputs: dict[str, Any], level: str, bounds: float | str) -> Tensor:
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

    b = tensors(inputs)
    found: Tensor = compute_rollout_correction_weights(b.logp_old - b.logp_rollout, b.mask, level, bounds)[0]
    return found


def weights(inputs: dict[str, Any], level: str, bounds: float | str) -> dict[str, Any]:
    low, high = (None, bounds) if isinstance(bounds, float) else map(float, bounds.split("_"))
    options = {"kind": "truncated" if low is None else "masked", "level": level, "low": low, "high": high}
    call = "verl.trainer.ppo.rollout_corr_helper.compute_rollout_correction_weights"
    found = {"options": options, "weight": verl_weights(inputs, level, bounds)}
    return {"program": package("verl"), "calls": [call], "relative": 1e-12} | found


def gate(inputs: dict[str, Any], kind: str, low: float, high: float) -> dict[str, Any]:
    """Bounds are those of rho here, and of 1 / rho in verl; it also measures the divergences."""
    from verl.trainer.ppo.rollout_corr_helper import compute_offpolicy_metrics, compute_rollout_rejection_mask

    b = tensors(inputs)
    mask, metrics = compute_rollout_rejection_mask(b.logp_old - b.logp_rollout, b.mask, kind, f"{1 / high}_{1 / low}")
    names = {"token_k1": "token", "seq_sum_k1": "sequence", "seq_mean_k1": "geometric"}
    found = {"gate": {"kind": names[kind], "low": low, "high": high}, "kept": mask}
    found["rejected"] = metrics["rollout_rs_masked_fraction"]
    found["kl"] = compute_offpolicy_metrics(b.logp_old, b.logp_rollout, b.mask)["k3_kl"]
    calls = [
        f"verl.trainer.ppo.rollout_corr_helper.{f.__name__}"
        for f in (compute_rollout_rejection_mask, compute_offpolicy_metrics)
    ]
    return {"program": package("verl"), "calls": calls} | COUNT_EPS | found


def trl(inputs: dict[str, Any], mode: str, low: float | None, high: float) -> dict[str, Any]:
    """Weights by the trainer's own lines, and its loss with them."""
    import trl.trainer.grpo_trainer as module

    source = textwrap.dedent(inspect.getsource(module.GRPOTrainer._generate_and_score_completions)).splitlines()
    first = next(i for i, line in enumerate(source) if FIRST in line)
    last = next(i for i, line in enumerate(source) if LAST in line)
    b = tensors(inputs)
    trainer = SimpleNamespace(
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=low,
        vllm_importance_sampling_clip_max=high,
    )
    names = vars(module) | {"self": trainer, "mask": b.mask}
    names |= {"old_per_token_logps": b.logp_old, "sampling_per_token_logps": b.logp_rollout}
    exec(compile(textwrap.dedent("\n".join(source[first:last])), module.__file__, "exec"), names)
    ratio = names["vllm_importance_sampling_ratio"]
    level, kind = mode.split("_")
    options = {"kind": "truncated" if kind == "truncate" else "masked", "level": level, "low": low, "high": high}
    advantage = Verl(inputs).advantage("compute_grpo_outcome_advantage")[:, 0]
    answer = Trl(inputs).grpo(advantage, "grpo", mismatch=ratio)
    calls = ["trl.GRPOTrainer._generate_and_score_completions, ratios", *answer["calls"]]
    return answer | {"calls": calls, "options": options, "weight": ratio.expand_as(b.mask) * b.mask}
