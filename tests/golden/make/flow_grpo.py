"""Flow-GRPO by its code: the SDE step, advantages of an epoch, the update's loss and the decay of an average."""

import math
from types import SimpleNamespace
from typing import Any

import torch

from tests.golden.make.images import STEPS, latents, mean_of_steps, outlier, update
from tests.golden.make.peers import Clone, Made, doubles, gradient, numbers, package, tensors

COMMIT = "ac4c86e8cae021841f1fde853d340e0db67690dd"
INDICES = [0, 4, 8]
"""Steps of a grid of ten; the first starts from pure noise."""
NOISE_LEVEL = 0.7
CONFIG = {"adv_clip_max": 5, "clip_range": 1e-4, "beta": 0.04}


def make(path: str) -> Made:
    clone = Clone(path, "yifan123/flow_grpo", COMMIT)
    inputs = latents() | update() | {"means": numbers(32, 2, 12, STEPS, 2, 3, 3), "std": [0.9, 0.7, 0.4]}
    with doubles():
        stepped, sigmas = step(clone, inputs)
        answers = stepped | loss(clone, inputs) | {"decay": decays(clone)}
        beyond = outlier() | {"means": numbers(35, 2, 30, STEPS, 1, 1, 1)}
        second = {"inputs": beyond} | loss(clone, inputs | beyond)
    peer = {
        "program": f"{clone.name}, {package('diffusers')}",
        "calls": [
            "flow_grpo/diffusers_patch/sd3_sde_with_logprob.py:sde_step_with_logprob",
            "flow_grpo/stat_tracking.py:PerPromptStatTracker",
            "scripts/train_sd3.py:881-899",
            "flow_grpo/ema.py:EMAModuleWrapper.get_current_decay",
        ],
        "relative": 1e-7,
        "because": "it adds log(sqrt(2 pi)) in float32",
    }
    inputs |= {"sigmas": sigmas, "indices": INDICES, "noise_level": NOISE_LEVEL}
    return "Flow-GRPO, arXiv 2505.05470", inputs, [peer | answers, peer | second], clone


def step(clone: Clone, inputs: dict[str, Any]) -> tuple[dict[str, Any], list[float]]:
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(10)
    scheduler.sigmas = scheduler.sigmas.double()
    take = clone.function("flow_grpo/diffusers_patch/sd3_sde_with_logprob.py", "sde_step_with_logprob", math=math)
    b, times = tensors(inputs), scheduler.timesteps[INDICES]
    b.velocity.requires_grad_()
    mean, deviation = take(scheduler, b.velocity, times, b.latents, NOISE_LEVEL, b.noise)[2:]
    sigmas = scheduler.sigmas
    dt = torch.stack([sigmas[i + 1] - sigmas[i] for i in INDICES]).reshape(-1, 1, 1, 1)
    drawn = (mean + deviation * (-dt).sqrt() * b.noise).detach()
    logp = take(scheduler, b.velocity, times, b.latents, NOISE_LEVEL, drawn)[1]
    answers = {"mean": mean.detach(), "deviation": deviation.flatten(), "drawn": drawn, "step_logp": logp.detach()}
    return answers | {"step_gradient": gradient(logp.sum(), b.velocity)}, sigmas.tolist()


def loss(clone: Clone, inputs: dict[str, Any]) -> dict[str, Any]:
    b = tensors(inputs)
    b.logp.requires_grad_()
    b.means.requires_grad_()
    tracker = clone.function("flow_grpo/stat_tracking.py", "PerPromptStatTracker")(global_std=True)
    advantage = torch.from_numpy(tracker.update(inputs["prompts"], inputs["reward"]))
    steps = []
    for j in range(STEPS):
        found = clone.lines(
            "scripts/train_sd3.py",
            881,
            899,
            config=SimpleNamespace(train=SimpleNamespace(**CONFIG)),
            sample={"advantages": advantage[:, None].expand(-1, STEPS), "log_probs": b.logp_old},
            j=j,
            log_prob=b.logp[:, j],
            prev_sample_mean=b.means[0, :, j],
            prev_sample_mean_ref=b.means[1, :, j].detach(),
            std_dev_t=b.std[j],
        )
        steps.append(found.loss)
    total = mean_of_steps(steps)
    slopes = torch.autograd.grad(total, [b.logp, b.means])
    return {"advantage": advantage, "loss": total.detach(), "gradient": slopes[0], "means_gradient": slopes[1][0]}


def decays(clone: Clone) -> list[float]:
    average = clone.function("flow_grpo/ema.py", "EMAModuleWrapper")([], decay=0.9)
    return [average.get_current_decay(step) for step in range(0, 120, 7)]
