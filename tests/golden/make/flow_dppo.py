"""Flow-DPPO's loss by its public code."""

from types import SimpleNamespace
from typing import Any

import torch

from tests.golden.make.peers import Clone, Made, doubles, gradient, numbers, tensors

COMMIT = "1a7b501e8fe8517b432a130220d2ff462f9b5afa"
FILE = "unirl/algorithms/flowdppo.py"
TRACK = "unirl/types/rollout_resp.py"
LIMIT = 1e-5


def make(path: str) -> Made:
    clone = Clone(path, "Tencent-Hunyuan/UniRL", COMMIT)
    shape = (6, 3, 2, 3, 3)
    inputs: dict[str, Any] = {
        "means": numbers(70, *shape, low=-2, high=2),
        "moved": (1e-3 * torch.tensor(numbers(71, *shape, low=-5, high=5), dtype=torch.float64)).tolist(),
        "noise": numbers(72, *shape, low=-2, high=2),
        "std": [0.9, 0.7, 0.4],
        "group": [0, 0, 0, 1, 1, 1],
        "reward": [0.9, 0.1, 0.5, 1.0, 0.2, 0.3],
    }
    # the first step moves along its noise, to a divergence a little beyond the limit, and its advantage is positive
    noise = torch.tensor(inputs["noise"][0][0], dtype=torch.float64)
    moved = inputs["std"][0] * (2 * 1.05 * LIMIT / noise.square().mean()).sqrt() * noise
    inputs["moved"][0][0] = moved.tolist()
    advantage = advantages(clone, inputs)
    with doubles():
        answers = {"advantage": advantage} | loss(clone, inputs, advantage)
    peer = {"program": clone.name, "relative": 1e-12}
    peer["calls"] = [f"{TRACK}:314-332", f"{FILE}:_flowdppo_kl_adv_loss"]
    return "Flow-DPPO, arXiv 2606.11025", inputs, [peer | answers], clone


def advantages(clone: Clone, inputs: dict[str, Any]) -> torch.Tensor:
    """Advantages (B,) by the lines of `RolloutTrack.compute_advantages` for groups of one size."""
    b = tensors(inputs)
    found = clone.lines(
        TRACK,
        314,
        332,
        torch=SimpleNamespace(float32=torch.float64),
        rewards_local=b.reward,
        n_groups=len(b.group.unique()),
        branch=len(b.group) // len(b.group.unique()),
        normalize=True,
        use_global_std=True,
        eps=1e-8,
    )
    return found.adv.flatten()


def loss(clone: Clone, inputs: dict[str, Any], advantage: torch.Tensor) -> dict[str, Any]:
    b = tensors(inputs)
    mean = (b.means + b.moved).requires_grad_()
    std = b.std.reshape(1, 3, 1, 1, 1)
    drawn = b.means + std * b.noise
    new, old = (torch.distributions.Normal(m, std).log_prob(drawn).flatten(2).mean(2) for m in (mean, b.means))
    take = clone.function(FILE, "_flowdppo_kl_adv_loss", _gaussian_kl_div=clone.function(FILE, "_gaussian_kl_div"))
    losses, metrics = take(
        new_logp=new,
        old_logp=old,
        new_means=mean,
        old_means=b.means,
        advantages=advantage[:, None].expand(-1, 3),
        sigma_t=std,
        kl_mask_threshold=LIMIT,
    )
    total = losses.mean()
    names = {"kl_new_old_mean": "divergence", "pos_rm_fraction": "above", "neg_rm_fraction": "below"}
    found = {"loss": total.detach(), "gradient": gradient(total, mean)}
    return found | {own: metrics[name] for name, own in names.items()}
