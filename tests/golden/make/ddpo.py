"""DDPO by its public code: the DDIM step, advantages over a prompt's history and the update's loss."""

import math
from collections import deque
from types import SimpleNamespace
from typing import Any

import torch

from tests.golden.make.images import STEPS, latents, mean_of_steps, outlier, update
from tests.golden.make.peers import Clone, Made, gradient, package, tensors

COMMIT = "1958463f020112c9a7bc85768d296daacc2e1b4b"
TIMES = [981, 521, 61]
"""Three times of a grid of fifty steps."""


def make(path: str) -> Made:
    clone = Clone(path, "kvablack/ddpo-pytorch", COMMIT)
    inputs = latents(50) | update()
    answers = step(clone, inputs) | loss(clone, inputs)
    inputs |= {"alphas": answers.pop("alphas"), "later": later_rewards()}
    peer = {
        "program": f"{clone.name}, {package('diffusers')}",
        "calls": [
            "ddpo_pytorch/diffusers_patch/ddim_with_logprob.py:ddim_step_with_logprob",
            "ddpo_pytorch/stat_tracking.py:PerPromptStatTracker",
            "scripts/train.py:539-551",
        ],
        "relative": 1e-7,
        "because": "it adds log(sqrt(2 pi)) in float32",
        "later_advantages": history(clone, inputs),
    }
    beyond = outlier()
    second = {"inputs": beyond} | loss(clone, inputs | beyond)
    return "DDPO, arXiv 2305.13301", inputs, [peer | answers, peer | second], clone


def step(clone: Clone, inputs: dict[str, Any]) -> dict[str, Any]:
    from diffusers import DDIMScheduler

    scheduler = DDIMScheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, clip_sample=False)
    scheduler.set_timesteps(50)
    scheduler.alphas_cumprod = scheduler.alphas_cumprod.double()
    scheduler.final_alpha_cumprod = scheduler.final_alpha_cumprod.double()
    file = "ddpo_pytorch/diffusers_patch/ddim_with_logprob.py"
    names = {name: clone.function(file, name) for name in ("_left_broadcast", "_get_variance")}
    take = clone.function(file, "ddim_step_with_logprob", math=math, DDIMScheduler=DDIMScheduler, **names)
    b, times = tensors(inputs), torch.tensor(TIMES)
    b.velocity.requires_grad_()
    # at noise 0 the step leads to its mean: a generator's draws are replaced by the noise of the inputs
    quiet = clone.function(
        file, "ddim_step_with_logprob", DDIMScheduler=DDIMScheduler, randn_tensor=_no_noise, math=math, **names
    )
    mean = quiet(scheduler, b.velocity, times, b.latents, eta=1.0)[0]
    drawn = (mean + 0.1 * b.noise).detach()
    logp = take(scheduler, b.velocity, times, b.latents, eta=1.0, prev_sample=drawn)[1]
    alphas = [[float(scheduler.alphas_cumprod[t]), float(scheduler.alphas_cumprod[t - 20])] for t in TIMES]
    answers = {"alphas": alphas, "mean": mean.detach(), "drawn": drawn, "step_logp": logp.detach()}
    return answers | {"step_gradient": gradient(logp.sum(), b.velocity)}


def loss(clone: Clone, inputs: dict[str, Any]) -> dict[str, Any]:
    b = tensors(inputs)
    b.logp.requires_grad_()
    tracker = clone.function("ddpo_pytorch/stat_tracking.py", "PerPromptStatTracker", deque=deque)(32, 1)
    advantage = torch.from_numpy(tracker.update(inputs["prompts"], inputs["reward"]))
    config = SimpleNamespace(train=SimpleNamespace(adv_clip_max=5, clip_range=1e-4))
    steps = []
    for j in range(STEPS):
        sample = {"advantages": advantage, "log_probs": b.logp_old}
        names = {"config": config, "sample": sample, "j": j, "log_prob": b.logp[:, j]}
        steps.append(clone.lines("scripts/train.py", 539, 551, **names).loss)
    total = mean_of_steps(steps)
    return {"advantage": advantage, "loss": total.detach(), "gradient": gradient(total, b.logp)}


def later_rewards() -> list[dict[str, Any]]:
    """Three rollouts with changing prompts: a history of at most 6, used from 4 rewards on."""
    return [
        {"prompts": ["fox", "fox", "pig"], "reward": [0.1, 0.9, 0.4]},
        {"prompts": ["fox", "pig", "fox", "pig"], "reward": [0.3, 0.2, 0.8, 0.7]},
        {"prompts": ["pig", "pig", "fox", "owl", "fox"], "reward": [0.6, 0.1, 0.2, 0.5, 1.0]},
    ]


def history(clone: Clone, inputs: dict[str, Any]) -> list[Any]:
    tracker = clone.function("ddpo_pytorch/stat_tracking.py", "PerPromptStatTracker", deque=deque)(6, 4)
    return [tracker.update(rollout["prompts"], rollout["reward"]).tolist() for rollout in inputs["later"]]


def _no_noise(shape: Any, **_: Any) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float64)
