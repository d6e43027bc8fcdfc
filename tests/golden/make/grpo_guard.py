"""GRPO-Guard's ratio and Flow-CPS's step by Flow-Factory."""

import math
from types import SimpleNamespace
from typing import Any

import torch

from tests.golden.make.images import latents
from tests.golden.make.peers import Clone, Made, doubles, gradient, numbers, tensors

COMMIT = "a0b2bc5a2b4fbf9125429b3fb70c0c5d7631047c"
SCHEDULER = "src/flow_factory/scheduler/flow_match_euler_discrete.py"
TRAINER = "src/flow_factory/trainers/grpo.py"
CPS_NOISE = 0.8
CLIP = 1e-5


def make(path: str) -> Made:
    clone = Clone(path, "X-GenGroup/Flow-Factory", COMMIT)
    inputs = latents(60) | {
        "means": numbers(63, 3, 2, 4, 4, low=-2, high=2),
        "sigmas": [[0.9, 0.75], [0.6, 0.5], [0.3, 0.1]],
    }
    inputs |= {"moved": numbers(64, 3, 2, 4, 4), "advantage": [1.5, -0.7, -9.0], "std": [0.5, 0.3, 0.2]}
    inputs |= {"cps_noise_level": CPS_NOISE, "clip": CLIP}
    with doubles():
        answers = guard(clone, inputs) | cps(clone, inputs)
    peer = {"program": clone.name, "calls": [f"{TRAINER}:497-510", f"{SCHEDULER}:323-420"], "relative": 1e-7}
    peer["because"] = "it takes the angle of Flow-CPS's noise in float32"
    return "GRPO-Guard, arXiv 2510.22319; Flow-CPS, arXiv 2509.05952", inputs, [peer | answers], clone


def guard(clone: Clone, inputs: dict[str, Any]) -> dict[str, Any]:
    """The loss of one step whose mean has moved by a thousandth."""
    b = tensors(inputs)
    mean = (b.means + 1e-3 * b.moved).requires_grad_()
    deviation = b.std.reshape(-1, 1, 1, 1)
    drawn = b.means + deviation * b.noise

    def logp(middle: torch.Tensor) -> torch.Tensor:
        return torch.distributions.Normal(middle, deviation).log_prob(drawn).flatten(1).mean(1)

    dt = torch.tensor(-0.25, dtype=torch.float64)
    output = SimpleNamespace(dt=dt, std_dev_t=2 * b.std, next_latents_mean=mean, log_prob=logp(mean))
    limits = SimpleNamespace(adv_clip_range=(-5.0, 5.0), clip_range=(-CLIP, CLIP))
    found = clone.lines(
        TRAINER,
        497,
        510,
        self=SimpleNamespace(training_args=limits),
        batch={"advantage": b.advantage, "next_latents_mean": b.means[:, None]},
        output=output,
        old_log_prob=logp(b.means),
        callback_index_map=[0],
        timestep_index=0,
    )
    answers = {"logp": logp(mean).detach(), "logp_old": logp(b.means), "log_ratio": found.ratio.log().detach()}
    return answers | {"loss": found.policy_loss.detach(), "gradient": gradient(found.policy_loss, mean)}


def cps(clone: Clone, inputs: dict[str, Any]) -> dict[str, Any]:
    b = tensors(inputs)
    b.velocity.requires_grad_()
    names = {
        "to_broadcast_tensor": clone.function("src/flow_factory/utils/base.py", "to_broadcast_tensor"),
        "math": math,
        "dynamics_type": "CPS",
        "noise_level": CPS_NOISE,
        "noise_pred": b.velocity,
        "latents": b.latents,
        "sigma": b.sigmas[:, 0],
        "sigma_prev": b.sigmas[:, 1],
        "compute_log_prob": True,
    }
    first = clone.lines(SCHEDULER, 323, 420, next_latents=b.latents, **names)
    drawn = (first.next_latents_mean + first.std_dev_t * b.noise).detach()
    found = clone.lines(SCHEDULER, 323, 420, next_latents=drawn, **names)
    answers = {"mean": found.next_latents_mean.detach(), "deviation": found.std_dev_t.flatten(), "drawn": drawn}
    slope = gradient(found.log_prob.sum(), b.velocity)
    return {
        f"cps_{key}": value for key, value in (answers | {"logp": found.log_prob.detach(), "gradient": slope}).items()
    }
