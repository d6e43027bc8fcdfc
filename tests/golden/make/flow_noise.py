"""A step of Flow-Noise by RLinf's code: mean, standard deviation, log-density and entropy."""

import math
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import torch

from tests.golden.make.peers import Clone, Made, doubles, numbers, tensors

COMMIT = "a3816b596478dcd8a5c69a6ec1468c9519f77b5b"
NOISE = "rlinf/models/embodiment/modules/explore_noise_net.py"
MODEL = "rlinf/models/embodiment/openpi/openpi_action_model.py"
BOUNDS = [0.08, 0.16]
FIRST, LAST = 1169, 1197


def make(path: str) -> Made:
    clone = Clone(path, "RLinf/RLinf", COMMIT)
    shape = (3, 2, 2)  # rows, control steps, numbers of an action
    inputs: dict[str, Any] = {
        "latents": numbers(95, *shape, low=-2, high=2),
        "velocity": numbers(96, *shape, low=-2, high=2),
        "head": numbers(97, *shape, low=-2, high=2),
        "following": numbers(98, *shape, low=-2, high=2),
        "sigma": 0.75,
        "sigma_next": 0.5,
        "bounds": BOUNDS,
    }
    with doubles():
        answers = step(clone, inputs)
    calls = [f"{NOISE}:ExploreNoiseNet.post_process", f"{MODEL}:{FIRST}-{LAST}", f"{MODEL}:get_logprob_norm"]
    peer = {"program": clone.name, "calls": calls, "relative": 1e-6, "because": "its bounds are float32"}
    return "pi_RL, arXiv 2510.25889", inputs, [peer | answers], clone


def step(clone: Clone, inputs: dict[str, Any]) -> dict[str, Any]:
    b = tensors(inputs)
    module = SimpleNamespace(Module=object)
    net = clone.function(NOISE, "ExploreNoiseNet", nn=module)
    low, high = (torch.log(torch.tensor(bound**2, dtype=torch.float32))[None] for bound in BOUNDS)
    head = SimpleNamespace(logvar_min=low, logvar_max=high)
    own = SimpleNamespace(noise_head=lambda hidden: net.post_process(head, hidden))
    time, delta = (torch.full_like(b.latents, value) for value in (b.sigma, b.sigma - b.sigma_next))
    found = clone.lines(
        MODEL,
        FIRST,
        LAST,
        self=own,
        sample_method="flow_noise",
        x_t=b.latents,
        v_t=b.velocity,
        suffix_out=b.head,
        t_input=time,
        delta=delta,
    )
    bases = {name: type(name, (), {}) for name in ("PI0Pytorch", "BasePolicy")}
    model = clone.function(MODEL, "OpenPi0ForRLActionPrediction", math=math, ForwardType=Mock(), **bases)
    mean, std = found.x_t_mean, found.x_t_std
    settings = SimpleNamespace(config=SimpleNamespace(safe_get_logprob=False))
    logp = model.get_logprob_norm(settings, b.following, mean, std)
    return {"mean": mean, "std": std, "logp": logp, "entropy": model.gaussian_entropy(settings, std)}
