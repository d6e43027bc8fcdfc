"""ARPO for GUI agents by its public code: advantage, actor's loss, and which groups get a replayed trajectory."""

import json
import math
import random
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import torch

from tests.golden.make.peers import Clone, Made, doubles, gradient, tensors
from tests.golden.make.tokens import COUNT_EPS, batch

COMMIT = "7489ae309e90d8b3b9e823f495b63e5116434060"
BOUNDS = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3, "clip_ratio_dual": 3.0}
OUTCOMES = [
    ("a", [0.0, 0.0, 0.0, 0.0]),  # nothing is stored yet
    ("a", [0.0, 1.0, 0.1, 0.11]),
    ("a", [0.0, 0.0, 0.0, 0.0]),
    ("b", [0.0, 0.0, 0.0, 0.0]),
    ("a", [0.1, 0.1, 0.1, 0.1]),
    ("a", [0.1, 0.1, 0.0, 0.0]),
    ("a", [0.1, 0.0, 0.0, 0.0]),
    ("a", [0.2, 0.2, 0.2, 0.2]),
    ("a", [0.19, 0.19, 0.19, 0.19]),
    ("a", [1.0, 1.0, 0.9, 0.8]),
    ("b", [0.0, 0.5, 0.0, 0.0]),
    ("b", [0.0, 0.04, 0.0, 0.0]),
]
"""Task and outcomes of groups, one after another."""


def make(path: str) -> Made:
    clone = Clone(path, "dvlab-research/ARPO", COMMIT)
    inputs = batch() | {"tasks": [task for task, _ in OUTCOMES], "outcomes": [row for _, row in OUTCOMES]}
    with doubles():
        advantage, loss, slope = update(clone, inputs)
    injected, stored = replay(clone)
    peer = {
        "program": clone.name,
        "calls": [
            "verl/trainer/core_algos.py:compute_grpo_outcome_advantage",
            "verl/trainer/core_algos.py:compute_policy_loss",
            "verl/trainer/ray_trainer.py:736-747",
            "verl/trainer/replay_buffer.py:ReplayBuffer",
        ],
        **COUNT_EPS,
        "advantage": advantage,
        "loss": loss,
        "gradient": slope,
        "injected": injected,
        "stored": stored,
    }
    return "ARPO for GUI agents, dvlab-research/ARPO", inputs, [peer], clone


def update(clone: Clone, inputs: dict) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Advantages, and the mean of the losses of micro-batches of one trajectory."""
    b = tensors(inputs)
    b.logp.requires_grad_()
    file = "verl/trainer/core_algos.py"
    estimate = clone.function(file, "compute_grpo_outcome_advantage", defaultdict=defaultdict)
    torch.set_default_dtype(torch.float64)
    advantage = estimate(b.reward[:, None].clone(), b.mask, b.group.tolist())[0]
    torch.set_default_dtype(torch.float32)
    functional = "verl/utils/torch_functional.py"
    names = {"VF": SimpleNamespace(masked_mean=clone.function(functional, "masked_mean"))}
    compute = clone.function(file, "compute_policy_loss", **names)
    rows = range(len(b.mask))
    losses = [compute(b.logp_old[[i]], b.logp[[i]], advantage[[i]], b.mask[[i]], **BOUNDS)[0] for i in rows]
    loss = torch.stack(losses).mean()
    return advantage, loss.detach(), gradient(loss, b.logp)


def replay(clone: Clone) -> tuple[list[bool], list[list[float]]]:
    """For each group whether it gets a stored trajectory, and the outcomes stored for its task afterwards."""
    file = "verl/trainer/replay_buffer.py"
    buffer = clone.function(
        file, "ReplayBuffer", np=np, math=math, json=json, random=random, defaultdict=defaultdict,
        DataProto=list, collate_fn=list,
    )(None, 3)  # fmt: skip
    injected, stored = [], []
    for task, outcomes in OUTCOMES:
        found = clone.lines(
            "verl/trainer/ray_trainer.py",
            736,
            747,
            self=SimpleNamespace(replay=buffer),
            eval_results=outcomes,
            batch=outcomes,
            rollout_n=len(outcomes),
            i=0,
            cur_task_config=[{"id": task}],
        )
        injected.append(bool(found.pos_batch))
        for outcome in outcomes:
            buffer.update_replay_buffer({"task_id": task}, outcome, outcome)
        stored.append(list(buffer.pos_dataset[task]) if task in buffer.pos_dataset else [])
    return injected, stored
