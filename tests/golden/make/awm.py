"""Advantage weighted matching by its public code: pseudo log-likelihoods, and the update's loss."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch

from tests.golden.make.images import outlier, update
from tests.golden.make.peers import Clone, Made, doubles, gradient, numbers, tensors

COMMIT = "be5137232e33a21b449ed65a533211d0deb97ed8"
ROOT = "advantage_weighted_matching"
FILE = f"{ROOT}/scripts/train_sd3_awm.py"
WEIGHTINGS = {"uniform": "Uniform", "t": "t", "t2": "t**2", "huber": "huber", "ghuber": "ghuber"}
DRAWS = 2
CONFIG = {
    "adv_clip_max": 5.0,
    "advantage_max": 1.0,
    "train_timesteps": DRAWS,
    "clip_range": 1.0,
    "beta": 0.001,
    "kl_weight": "Uniform",
    "ema_beta": 0.2,
    "kl_ema_weight": "ELBO",
    "ghuber_power": 0.25,
}


def make(path: str) -> Made:
    clone = Clone(path, "scxue/advantage_weighted_matching", COMMIT)
    inputs = images(update(), 2, 3, 3) | {"sigma": [0.35, 0.8], "config": CONFIG}
    beyond = images(outlier(), 1, 2, 2)
    beyond["logp_old_shift"][0][0] = 2.5  # a ratio below 0.1, where the advantage is negative
    with doubles():
        likelihood = {name: pseudo(clone, inputs, name)[0].detach() for name in WEIGHTINGS}
        losses = {name: loss(clone, inputs, name) for name in ("exp_first", "sum_first")}
    peer = {
        "program": clone.name,
        "calls": [f"{FILE}:compute_log_prob_awm", f"{FILE}:1293-1354", f"{ROOT}/flow_grpo/stat_tracking.py"],
        "relative": 1e-12,
        "advantage": advantages(clone, inputs),
        "likelihood": likelihood,
        "losses": losses,
    }
    second = {key: peer[key] for key in ("program", "calls", "relative")} | {"inputs": beyond}
    with doubles():
        second |= {"losses": {"exp_first": loss(clone, inputs | beyond, "exp_first")}}
    second["advantage"] = advantages(clone, beyond)
    return "AWM, arXiv 2509.25050", inputs, [peer, second], clone


def images(rows: dict[str, Any], *shape: int) -> dict[str, Any]:
    """Prompts, rewards and images of rows, and what the model predicts for two noisy versions of each."""
    number = len(rows["reward"])
    found = {key: rows[key] for key in ("prompts", "reward")} | {"clean": numbers(70, number, *shape, low=-2, high=2)}
    for seed, name in enumerate(("noise", "velocity", "velocity_ref", "velocity_ema"), 71):
        found[name] = numbers(seed, DRAWS, number, *shape, low=-2, high=2)
    return found | {"logp_old_shift": numbers(75, DRAWS, number, low=-1.2, high=0.6)}


def advantages(clone: Clone, inputs: dict[str, Any]) -> torch.Tensor:
    tracker = clone.function(f"{ROOT}/flow_grpo/stat_tracking.py", "PerPromptStatTracker")(global_std=True)
    return torch.from_numpy(tracker.update(inputs["prompts"], inputs["reward"]))


def pseudo(clone: Clone, inputs: dict[str, Any], weighting: str) -> tuple[torch.Tensor, ...]:
    """Likelihoods of the noisy versions, draw by draw, and the velocities that carry their gradient."""
    b = tensors(inputs)
    velocity = b.velocity.flatten(0, 1).requires_grad_()
    train = SimpleNamespace(**CONFIG, cfg=False)
    found = clone.function(FILE, "compute_log_prob_awm")(
        lambda **_: (velocity,),
        None,
        None,
        b.sigma.repeat_interleave(len(b.clean)).reshape(-1, 1, 1, 1),
        None,
        None,
        SimpleNamespace(train=train),
        None,
        b.clean.repeat(DRAWS, 1, 1, 1),
        b.noise.flatten(0, 1),
        weighting=WEIGHTINGS[weighting],
    )
    return (*found, velocity)


def loss(clone: Clone, inputs: dict[str, Any], kind: str) -> dict[str, torch.Tensor]:
    b = tensors(inputs)
    logp, output, deviation, velocity = pseudo(clone, inputs, "ghuber")
    rows = len(b.clean)
    logp = logp.reshape(DRAWS, rows)
    sample = {
        "advantages": advantages(clone, inputs)[:, None],
        "log_probs": logp,
        "old_log_probs": (logp + b.logp_old_shift).detach(),
        "model_output": output.reshape(DRAWS, rows, *output.shape[1:]),
        "model_output_ref": b.velocity_ref,
        "model_output_ema": b.velocity_ema,
        "std_dev_t": deviation.reshape(DRAWS, rows, 1, 1, 1),
    }
    config = SimpleNamespace(train=SimpleNamespace(**CONFIG, loss_type=kind))
    names = {"accelerator": SimpleNamespace(is_main_process=False), "info": defaultdict(list)}
    found = clone.lines(FILE, 1292, 1354, sample=sample, config=config, **names).loss
    return {"loss": found.detach(), "gradient": gradient(found, velocity).reshape(b.velocity.shape)}
