"""The objective of DR-PO by lines of its public code: rewards with the divergence, GAE, the losses of both parts."""

from types import SimpleNamespace

import torch

from tests.golden.make.peers import Clone, Made, tensors
from tests.golden.make.tokens import batch

FILE = "src/tldr/drpo.py"


def make(path: str) -> Made:
    clone = Clone(path, "Cornell-RL/drpo", "bd825df853cea7ca94ec67a4dfb6bc0c7aad2d92")
    inputs = batch()
    inputs["mask"] = [[1.0] * 6] * 12  # the code has no padding
    b = tensors(inputs)
    logp, values_new = b.logp.requires_grad_(), b.values_new.requires_grad_()
    ppo = SimpleNamespace(gamma=1.0, lam=0.95, cliprange=0.2, cliprange_value=0.2, vf_coef=0.1)
    args = SimpleNamespace(ppo=ppo, task=SimpleNamespace(response_length=6))
    end = torch.full((12,), 5)
    scored = {"logprobs": b.logp_old, "ref_logprobs": b.logp_ref, "kl_ctl": SimpleNamespace(value=0.05)}
    rewards = clone.lines(FILE, 808, 813, scores=b.reward, sequence_lengths=end, **scored).rewards
    found = clone.lines(FILE, 820, 829, args=args, rewards=rewards, values=b.values)  # 830 whitens
    old = {"mb_values": b.values, "mb_return": found.returns, "mb_advantage": found.advantages}
    old |= {"mb_logprobs": b.logp_old, "mb_rollin_masks": b.mask.bool(), "accelerator": SimpleNamespace(device="cpu")}
    loss = clone.lines(FILE, 867, 889, args=args, vpred=values_new, new_logprobs=logp, **old).loss
    slope, slope_values = torch.autograd.grad(loss, [logp, values_new])
    answer = {"advantage": found.advantages, "returns": found.returns, "loss": loss.detach()}
    answer |= {"gradient": slope, "gradient_values": slope_values}
    calls = [f"{FILE}:808-813", f"{FILE}:820-829", f"{FILE}:867-889"]
    peer = {"program": clone.name, "calls": calls, "relative": 1e-12, "changes": {"scaling": {"whiten": "none"}}}
    return "DR-PO, arXiv 2404.08495", inputs, [peer | answer], clone
