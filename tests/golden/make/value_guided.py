"""Value-augmented scores by the public code's logits processor, with a table in place of a value model."""

from typing import Any

import torch

from tests.golden.make.peers import Clone, Made, numbers, tensors

FILE, NAME = "vas_trainer.py", "VASLogitsProcessor"


def make(path: str) -> Made:
    clone = Clone(path, "idanshen/Value-Augmented-Sampling", "85e13ed6061a3438c33ad2079f51fa833b640b95")
    inputs: dict[str, Any] = {
        "scores": numbers(1, 1, 9, low=-4, high=2),
        "values": numbers(2, 9, low=-1, high=1),
        "beta": 3.0,
        "top_k": 4,
    }
    b = tensors(inputs)

    def value_model(ids: torch.Tensor, **_: Any) -> tuple[None, None, torch.Tensor, tuple]:
        return None, None, b.values[ids], ((torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1)),)

    names = {
        "LogitsProcessor": type("LogitsProcessor", (), {}),
        "PreTrainedTokenizer": None,
        "AutoModelForCausalLMWithValueHead": None,
    }
    kind = clone.function(FILE, NAME, **names)
    processor = kind(value_model, beta=float(b.beta), topk=int(b.top_k), topk_per_device_batch_size=2)
    found = processor(torch.tensor([[5, 7]]), b.scores)
    peer = {"program": clone.name, "calls": [f"{FILE}:{NAME}"], "relative": 1e-12, "augmented": found}
    return "Value-Augmented Sampling, arXiv 2405.06639", inputs, [peer], clone
