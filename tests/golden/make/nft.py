"""DiffusionNFT by its public code: the two-sided loss and the schedules of the sampling policy."""

from types import SimpleNamespace
from typing import Any

import torch

from tests.golden.make.peers import Clone, Made, doubles, numbers, tensors

COMMIT = "24af5554898d85e93efa492f42b5e9cdf4156e9b"
FILE = "scripts/train_nft_sd3.py"
BETA, REFERENCE = 0.5, 1e-4


def make(path: str) -> Made:
    clone = Clone(path, "NVlabs/DiffusionNFT", COMMIT)
    shape = (6, 2, 4, 4)
    inputs: dict[str, Any] = {
        "clean": numbers(80, *shape, low=-2, high=2),
        "noise": numbers(81, *shape, low=-2, high=2),
        "velocity": numbers(82, *shape, low=-2, high=2),
        "velocity_old": numbers(83, *shape, low=-2, high=2),
        "velocity_ref": numbers(84, *shape, low=-2, high=2),
        "sigma": [0.9, 0.75, 0.5, 0.4, 0.2, 0.05],
        "advantage": [2.1, -1.3, 0.0, 7.5, -6.0, 0.4],
        "steps": list(range(0, 400, 19)),
        "beta": BETA,
        "kl_coef": REFERENCE,
    }
    decay = clone.function(FILE, "return_decay")
    decays = {str(kind): [decay(step, kind) for step in inputs["steps"]] for kind in range(3)}
    with doubles():
        answers = loss(clone, inputs)
    calls = [f"{FILE}:910-970", f"{FILE}:return_decay"]
    peer = {"program": clone.name, "calls": calls, "relative": 1e-12, "decay": decays}
    return "DiffusionNFT, arXiv 2509.16117", inputs, [peer | answers], clone


def loss(clone: Clone, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    b = tensors(inputs)
    b.velocity.requires_grad_()
    t = b.sigma.reshape(-1, 1, 1, 1)
    # the code has one beta for the mixture and one for the distance to the reference
    config = SimpleNamespace(beta=BETA, train=SimpleNamespace(adv_clip_max=5.0, beta=REFERENCE))
    found = clone.lines(
        FILE,
        910,
        970,
        config=config,
        train_sample_batch={"advantages": b.advantage[:, None]},
        j_idx=0,
        loss_terms={},
        x0=b.clean,
        xt=(1 - t) * b.clean + t * b.noise,
        t_expanded=t,
        forward_prediction=b.velocity,
        old_prediction=b.velocity_old,
        ref_forward_prediction=b.velocity_ref,
    )
    # the lines add the distance in place to what they call the policy's loss
    slope = torch.autograd.grad(found.loss, b.velocity)[0]
    return {"weight": found.r, "loss": found.loss.detach(), "gradient": slope}
