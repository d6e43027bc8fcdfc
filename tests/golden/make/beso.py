"""BESO: loss, noise levels, denoiser, guidance and sampler by the authors' code, around a network of one line."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from tests.golden.make.peers import Clone, Made, doubles, gradient, numbers, tensors

COMMIT = "ef68824e533802ec0d7a5368ae21d013ce0df5c3"
FOLDER = "beso/agents/diffusion_agents/k_diffusion"
ROWS, STEPS, SIZE = 4, 3, 2
LEVELS = {"steps": 3, "sigma_data": 0.5, "sigma_min": 0.05, "sigma_max": 1.0}


class Network(nn.Module):
    """What both sides have as their network."""

    def forward(self, state: Tensor, actions: Tensor, goal: Tensor, sigma: Tensor, uncond: bool = False) -> Tensor:
        seen = state - 0.5 * goal * (not uncond)
        return (2 * actions + (seen + sigma.log() / 4)[:, None, None]).tanh()


def make(path: str) -> Made:
    clone = Clone(path, "intuitive-robots/beso", COMMIT)
    inputs: dict[str, Any] = {
        **LEVELS,
        "state": numbers(0, ROWS),
        "goal": numbers(1, ROWS),
        "actions": numbers(2, ROWS, STEPS, SIZE),
        "noise": numbers(3, ROWS, STEPS, SIZE, low=-2, high=2),
        "sigma": numbers(4, ROWS, low=0.05, high=1),
        "uniform": [0.0, 0.125, 0.25, 0.5, 0.75, 0.875, 0.999],
        "guidance": [1.0, 0.0, 2.0],
    }
    with doubles():
        return "BESO, arXiv 2304.02532", inputs, [peer(clone, inputs)], clone


def peer(clone: Clone, inputs: dict[str, Any]) -> dict[str, Any]:
    b = tensors(inputs)
    append_dims = clone.function(f"{FOLDER}/utils.py", "append_dims")
    hydra = SimpleNamespace(utils=SimpleNamespace(instantiate=lambda module: module))
    names = {"nn": nn, "hydra": hydra, "append_dims": append_dims}
    model = clone.function(f"{FOLDER}/score_wrappers.py", "GCDenoiser", **names)(Network(), b.sigma_data)
    actions = b.actions.clone().requires_grad_()
    loss = model.loss(b.state, actions, b.goal, b.noise, b.sigma)
    noisy = b.actions + b.noise * b.sigma[:, None, None]
    return {
        "program": clone.name,
        "calls": [
            f"{FOLDER}/score_wrappers.py:GCDenoiser",
            f"{FOLDER}/gc_sampling.py:sample_ddim",
            f"{FOLDER}/gc_sampling.py:get_sigmas_linear",
            f"{FOLDER}/classifier_free_sampler.py:ClassifierFreeSampleModel",
            f"{FOLDER}/utils.py:rand_log_logistic",
        ],
        "relative": 2e-7,
        "because": "its levels of sampling are float32",
        "scalings": torch.stack(model.get_scalings(b.sigma)),
        "loss": loss,
        "gradient": gradient(loss, actions),
        "denoised": model(b.state, noisy, b.goal, b.sigma),
        "levels": levels(clone, b),
        "chunks": torch.stack([sample(clone, b, model, float(weight)) for weight in b.guidance]),
    }


def levels(clone: Clone, b: SimpleNamespace) -> Tensor:
    """Noise levels of uniform numbers, which the function would draw."""
    given = {name: getattr(torch, name) for name in ("as_tensor", "float64", "float32")}
    fake = SimpleNamespace(**given, rand=lambda *_, **__: b.uniform)
    draw = clone.function(f"{FOLDER}/utils.py", "rand_log_logistic", torch=fake)
    bounds = {"min_value": b.sigma_min, "max_value": b.sigma_max}
    found: Tensor = draw(b.uniform.shape, loc=torch.tensor(b.sigma_data).log().item(), scale=0.5, **bounds)
    return found


def sample(clone: Clone, b: SimpleNamespace, model: nn.Module, weight: float) -> Tensor:
    file = f"{FOLDER}/gc_sampling.py"
    append_zero = clone.function(file, "append_zero")
    sigmas = clone.function(file, "get_sigmas_linear", append_zero=append_zero)
    ddim = clone.function(file, "sample_ddim", trange=lambda count, disable: range(count))
    free = clone.function(
        f"{FOLDER}/classifier_free_sampler.py", "ClassifierFreeSampleModel", nn=nn, deepcopy=lambda x: x
    )
    start = b.noise * b.sigma_max
    found: Tensor = ddim(free(model, weight), b.state, start, b.goal, sigmas(b.steps, b.sigma_min, b.sigma_max))
    return found
