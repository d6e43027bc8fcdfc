"""TSPO by its public code: the agent's scores, advantages and the loss of a group of draws."""

from types import SimpleNamespace

import torch
from torch import nn

from tests.golden.make.peers import Clone, Made, doubles, gradient, numbers, tensors

COMMIT = "19f4ecb2331bd1914fe06e96d35d0408bc866512"
FRAMES, WIDTH, HEADS, WINDOW = 9, 8, 2, 4
LAYERS = ("temporal.Self_q", "temporal.Self_k", "temporal.Self_v", "mlp.0", "mlp.2")
FIRST, LAST = 587, 607
TRAINER = "src/open_tspo/trainer/tspo_trainer.py"


def make(path: str) -> Made:
    clone = Clone(path, "Hui-design/TSPO", COMMIT)
    inputs = {
        "frames": numbers(1, FRAMES, WIDTH, low=-2.0, high=2.0),
        "text": numbers(2, WIDTH, low=-2.0, high=2.0),
        "weights": numbers(3, len(LAYERS), WIDTH, WIDTH),
        "biases": numbers(4, len(LAYERS), WIDTH),
        "heads": HEADS,
        "window": WINDOW,
        "temperature": 0.5,
        "picks": [[0, 3, 5], [2, 3, 8], [1, 4, 5], [0, 6, 7]],
        "reward": [1.5, 0.25, 0.0, 1.0],
    }
    with doubles():
        torch.set_default_dtype(torch.float64)
        found = compute(clone, inputs)
        torch.set_default_dtype(torch.float32)
    peer = {
        "program": clone.name,
        "calls": [
            "model/temporal_agent.py:MultiModal_Align",
            "model/temporal_agent.py:Simple_SelfAttn",
            "model/temporal_agent.py:positional_encoding",
            f"{TRAINER}:{FIRST}-{LAST}",
        ],
        "relative": 1e-12,
        **found,
    }
    return "TSPO, arXiv 2508.04369, Hui-design/TSPO", inputs, [peer], clone


def compute(clone: Clone, inputs: dict) -> dict:
    """Logits, advantages, loss and the loss's gradient with respect to the logits."""
    b = tensors(inputs)
    file = "model/temporal_agent.py"
    modules = {"nn": nn, "F": nn.functional}
    attention = clone.function(file, "Simple_SelfAttn", **modules)
    encoding = clone.function(file, "positional_encoding")
    module = clone.function(
        file, "MultiModal_Align", Simple_SelfAttn=attention, positional_encoding=encoding, **modules
    )
    agent = module(WIDTH, HEADS)
    with torch.no_grad():
        for name, weight, bias in zip(LAYERS, b.weights, b.biases, strict=True):
            agent.get_submodule(name).weight.copy_(weight)
            agent.get_submodule(name).bias.copy_(bias)
    similarity = nn.CosineSimilarity(dim=-1)(b.text[None], b.frames)
    logits = agent(b.frames, b.text[None], similarity, window_size=WINDOW, score_tau=inputs["temperature"])[0]
    logits = logits.detach().requires_grad_()
    logp = logits.softmax(0).log()
    scope = clone.lines(
        TRAINER,
        FIRST,
        LAST,
        self=SimpleNamespace(num_generations=4),
        rewards=b.reward,
        ts_logps_batch=[logp[row] for row in b.picks],
        per_token_kl_batch=[torch.zeros(1)] * 4,
        all_completion_ids=torch.zeros(4, 1, 1),
    )
    slope = gradient(scope.loss_avg, logits)
    return {
        "logits": logits.detach(),
        "advantage": scope.advantages,
        "loss": scope.loss_avg.detach(),
        "gradient": slope,
    }
