"""GTPO by its public code: advantages, conflict weights and the loss of each response."""

from types import SimpleNamespace

import numpy as np
import torch

from tests.golden.make.peers import Clone, Made, gradient, numbers, tensors
from tests.golden.make.tokens import batch

FILE, VOCABULARY, PAD = "gtpo/gtpo_training.py", 5, 0
NAMES = {"print": lambda *_: None, "PAD_ID": PAD, "W_RAW": 2.0}


def make(path: str) -> Made:
    clone = Clone(path, "winstonsmith1897/GTPO", "5d33811e8ea1cf76c665db65b247cef9d1e436dd")
    inputs = batch() | {"entropy_old": numbers(9, 12, 6, low=0.0, high=1.2)}
    inputs["logp"] = [
        [round(x - 0.3, 3) for x in row] for row in inputs["logp"]
    ]  # all below 0: it gets whole softmaxes
    # few tokens, so that responses share beginnings and ends
    tokens = np.random.RandomState(10).randint(1, 3, (12, 6))
    tokens[8:, :3], tokens[:4, 0] = [1, 2, 1], 1
    inputs["extras"] = {"tokens": np.where(np.array(inputs["mask"]) > 0, tokens, PAD).tolist()}
    return "GTPO, arXiv 2508.03772", inputs, [run(clone, inputs)], clone


def run(clone: Clone, inputs: dict) -> dict:
    b = tensors({key: value for key, value in inputs.items() if key != "extras"})
    tokens, logp = torch.tensor(inputs["extras"]["tokens"]), b.logp.requires_grad_()
    raw = clone.lines(FILE, 1316, 1321, rewards=b.reward, self=SimpleNamespace(num_generations=4)).advantages
    entropies = (b.entropy_old * b.mask).sum(1) / b.mask.sum(1)
    low = clone.lines(FILE, 334, 334, entropies=entropies, ENT_THRESHOLD=0.7).low_ent
    shaped = clone.lines(FILE, 367, 371, low_ent=low, adv_BG=raw, entropies=entropies, ENT_SCALE=0.1).adv_BG
    build = clone.function(FILE, "build_conflict_mask", **NAMES)
    loss_of = clone.function(FILE, "gtpo_compute_loss")
    # of two words, the first one is the token that was taken
    logits = torch.stack([logp, torch.log1p(-logp.exp())], -1)
    ids, total = torch.zeros(6, dtype=torch.int64), torch.zeros((), dtype=torch.float64)
    for first in (0, 4, 8):
        rows = slice(first, first + 4)
        weight, _, conflicts = build(tokens[rows], b.mask[rows].long(), raw[rows] > 0, raw[rows] < 0, VOCABULARY)
        for one in range(first, first + 4):
            factors = (weight[one - first].double(), 0.0, shaped[one][None], conflicts[one - first][None])
            total = total + loss_of(logits[one].detach(), logits[one], ids, b.mask[one], *factors)[0]
    return {
        "program": clone.name,
        "calls": [f"{FILE}:{what}" for what in ("build_conflict_mask", "gtpo_compute_loss", "1316-1321", "367-371")],
        "relative": 1e-12,
        "changes": {"weight": {"count": "longest"}},
        "advantage": shaped[:, None] * b.mask,
        # it adds the losses of responses up; the row averages them
        "gradient": gradient(total / 12, logp),
    }
