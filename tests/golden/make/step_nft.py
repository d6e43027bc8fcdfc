"""The ranking loss of pi-StepNFT by RLinf's code."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import torch
from torch import Tensor
from torch.nn import functional

from tests.golden.make.peers import Clone, Made, doubles, gradient, numbers, tensors

COMMIT = "a3816b596478dcd8a5c69a6ec1468c9519f77b5b"
FILE = "rlinf/workers/actor/fsdp_nft_policy_worker.py"
ADVANTAGES = "rlinf/algorithms/advantages.py"
SETTINGS = {"adv_type": "grpo", "adv_clip_max": 0.5, "nft_beta": 1.0, "dpo_beta": 1.0, "nft_weight_scale": [1.0, 1.0]}
OTHERS = {"nft_beta": 0.7, "dpo_beta": 1.3}
STEPS, NOISE = 4, 0.5


def make(path: str) -> Made:
    clone = Clone(path, "RLinf/RLinf", COMMIT)
    shape = (6, 2, 3)  # rows, control steps, numbers of an action
    inputs: dict[str, Any] = {
        "latents": numbers(100, *shape, low=-2, high=2),
        "velocity_old": numbers(101, *shape, low=-2, high=2),
        "moved": (0.1 * torch.tensor(numbers(102, *shape, low=-2, high=2), dtype=torch.float64)).tolist(),
        "noise": numbers(103, *shape, low=-2, high=2),
        "place": [0, 1, 2, 3, 1, 2],
        "group": [0, 0, 0, 1, 1, 1],
        "reward": [0.9, 0.1, 0.5, 1.0, 0.2, 0.3],
        "steps": STEPS,
        "noise_level": NOISE,
    }
    b, estimate = tensors(inputs), clone.function(ADVANTAGES, "compute_grpo_advantages")
    advantage = estimate(b.reward, torch.ones_like(b.reward), 3)[0].flatten()
    calls = [f"{ADVANTAGES}:compute_grpo_advantages", f"{FILE}:EmbodiedNFTFSDPPolicy"]
    peer = {"program": clone.name, "calls": calls, "relative": 1e-12, "advantage": advantage}
    with doubles():
        peers = [peer | loss(clone, inputs, advantage, SETTINGS)]
        peers += [peer | loss(clone, inputs, advantage, SETTINGS | OTHERS)]
    peers[1]["changes"] = {"clip": {"beta": OTHERS["nft_beta"], "strength": OTHERS["dpo_beta"]}}
    return "pi-StepNFT, arXiv 2603.02083", inputs, peers, clone


def loss(clone: Clone, inputs: dict[str, Any], advantage: Tensor, settings: dict[str, Any]) -> dict[str, Any]:
    b = tensors(inputs)
    names = {"EmbodiedFSDPActor": object, "F": functional, "masked_mean": masked_mean, "ListConfig": ()}
    names["Worker"] = Mock()  # decorates methods that are not called
    own = clone.function(FILE, "EmbodiedNFTFSDPPolicy", **names)()
    own.cfg = SimpleNamespace(algorithm=settings)
    own.model = SimpleNamespace(config=SimpleNamespace(num_steps=STEPS))
    velocity = (b.velocity_old + b.moved).requires_grad_()
    schedule, _ = own._build_schedule_and_timesteps(b.place, b.latents.device, b.latents.dtype)
    time, length, sigma, std = own._build_schedule_params(schedule, b.place, torch.tensor(NOISE), b.latents)

    def step(v: Tensor) -> Tensor:
        given = ({"nft_xnext": b.latents}, "xnext", b.latents, v, time, length, sigma)
        return own._compute_nft_target_and_pred(*given)[1]

    reached = step(b.velocity_old) + std * b.noise
    energies, candidates = [], own._compute_delta_v_candidates(velocity, b.velocity_old)[1:]
    for side, candidate in zip(("pos", "neg"), candidates, strict=True):
        given = ("sigma", time, std, torch.tensor(NOISE), reached, "chunk_level")
        weight = own._compute_nft_weight(*given, pred=step(candidate), sample_type=side)
        energies.append(own._reduce_nft_tensor((step(candidate) - reached) ** 2 * weight, "chunk_level", "mean"))
    wish = own._postprocess_advantages(advantage)
    total, _ = own._compute_nft_loss(*energies, energies[0] - energies[1], wish, torch.ones_like(wish))
    return {"loss": total.detach(), "gradient": gradient(total, velocity), "std": std.flatten(), "reached": reached}


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    return (x * mask).sum() / mask.sum()
