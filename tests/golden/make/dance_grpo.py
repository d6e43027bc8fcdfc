"""DanceGRPO by its public code: the SDE step, advantages of the group and the update's loss."""

import math
from types import SimpleNamespace
from typing import Any

from tests.golden.make.images import STEPS, latents, mean_of_steps, outlier, update
from tests.golden.make.peers import Clone, Made, gradient, tensors

COMMIT = "15cc71d53cc2e6e18a68ee607d5fb6ba9a99e344"
FILE = "fastvideo/train_grpo_flux.py"
SIGMAS = [1.0, 0.92, 0.75, 0.5, 0.3, 0.0]
INDEX, ETA = 2, 0.3


def make(path: str) -> Made:
    clone = Clone(path, "XueZeyue/DanceGRPO", COMMIT)
    inputs = latents(40) | update() | {"sigmas": SIGMAS, "index": INDEX, "eta": ETA}
    peer = {
        "program": clone.name,
        "calls": [f"{FILE}:flux_step", f"{FILE}:534-545", f"{FILE}:589-603"],
        "relative": 1e-6,
        "because": "it takes the log-probability of a step in float32",
    }
    beyond = outlier()
    peers = [peer | step(clone, inputs) | loss(clone, inputs), peer | {"inputs": beyond} | loss(clone, beyond)]
    return "DanceGRPO, arXiv 2505.07818", inputs, peers, clone


def step(clone: Clone, inputs: dict[str, Any]) -> dict[str, Any]:
    take = clone.function(FILE, "flux_step", math=math)
    b = tensors(inputs)
    b.velocity.requires_grad_()
    mean, _ = take(b.velocity, b.latents, ETA, b.sigmas, INDEX, None, False, True)
    deviation = ETA * math.sqrt(SIGMAS[INDEX] - SIGMAS[INDEX + 1])
    drawn = (mean + deviation * b.noise).detach()
    logp = take(b.velocity, b.latents, ETA, b.sigmas, INDEX, drawn, True, True)[2]
    answers = {"mean": mean.detach(), "drawn": drawn, "step_logp": logp.detach()}
    return answers | {"step_gradient": gradient(logp.sum(), b.velocity)}


def loss(clone: Clone, inputs: dict[str, Any]) -> dict[str, Any]:
    b = tensors(inputs)
    b.logp.requires_grad_()
    options = {"use_group": True, "num_generations": inputs["prompts"].count("fox"), "gradient_accumulation_steps": 1}
    args, samples = SimpleNamespace(**options), {"rewards": b.reward}
    advantage = clone.lines(FILE, 534, 545, args=args, samples=samples).samples["advantages"]
    steps = []
    for j in range(STEPS):
        sample = {"advantages": advantage, "log_probs": b.logp_old}
        bounds = {"adv_clip_max": 5.0, "clip_range": 1e-4, "train_timesteps": 1}
        names = {"args": args, "sample": sample, "new_log_probs": b.logp[:, j], "_": j, **bounds}
        steps.append(clone.lines(FILE, 589, 603, **names).loss)
    total = mean_of_steps(steps)
    return {"advantage": advantage, "loss": total.detach(), "gradient": gradient(total, b.logp)}
