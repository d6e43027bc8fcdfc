"""ORW-CFM-W2 by its public code: reward-weighted matching with the distance to the start model."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tests.golden.make.peers import Clone, Made, gradient, numbers, tensors

COMMIT = "de9c766f22075f6eb8b1ab7290abd325bdf085bc"
TAU, ALPHA = 1.0, 0.7


def make(path: str) -> Made:
    clone = Clone(path, "markerthu/orw-cfm", COMMIT)
    shape = (6, 2, 4, 4)
    inputs: dict[str, Any] = {
        "target": numbers(90, *shape, low=-2, high=2),
        "velocity": numbers(91, *shape, low=-2, high=2),
        "velocity_ref": numbers(92, *shape, low=-2, high=2),
        "reward": [0.1, 0.9, 0.5, 0.0, 1.4, -0.3],
        "tau": TAU,
        "alpha": ALPHA,
    }
    b = tensors(inputs)
    b.velocity.requires_grad_()
    trainer = trainer_class(clone)
    stub = SimpleNamespace(
        alpha=ALPHA,
        beta=TAU,
        device="cpu",
        fm=SimpleNamespace(sample_location_and_conditional_flow=lambda *_: (None, None, b.target)),
        net_model=lambda *_: b.velocity,
        ref_model=lambda *_: b.velocity_ref,
    )
    weight = clone.lines("finetune_fm.py", 137, 137, self=stub, rewards=b.reward).weights
    loss, _ = trainer.compute_loss(stub, b.target, weight)
    peer = {"program": clone.name, "calls": ["finetune_fm.py:137", "finetune_fm.py:compute_loss"], "relative": 1e-12}
    peer |= {"weight": weight, "loss": loss.detach(), "gradient": gradient(loss, b.velocity)}
    return "ORW-CFM-W2, arXiv 2502.06061", inputs, [peer], clone


def trainer_class(clone: Clone) -> Any:
    import ast

    tree = ast.parse((clone.path / "finetune_fm.py").read_text())
    (name,) = [
        node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef) and any(getattr(part, "name", "") == "compute_loss" for part in node.body)
    ]
    return clone.function("finetune_fm.py", name, nn=nn, torch=torch)
