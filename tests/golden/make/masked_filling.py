"""Filling in masked answers by the code of IGPO: where chunks of a worked answer go, and the likeliest answers."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.golden.make.peers import Clone, Made, numbers

GENERATE, MASK = "utils/generate.py", 0


def make(path: str) -> Made:
    clone = Clone(path, "facebookresearch/igpo", "e85eaea1508c9062991b44ca2e44d5d12ebc64be")
    inputs = {"length": 96, "free": 30, "max_gap": 20, "words": 7, "block": 4}
    return "sampling and hints of IGPO, arXiv 2509.10396", inputs, [places(clone), sampled(clone)], clone


class Tokenizer:
    """Words of a worked answer are its tokens."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [int(word) for word in text.split()]

    def convert_tokens_to_ids(self, token: str) -> int:
        return -1


def places(clone: Clone) -> dict[str, Any]:
    """Hinted answers for worked answers of several lengths and seeds, with the chunks that were drawn."""
    place = clone.function(GENERATE, "scale_chunk_positions", List=list, Tuple=tuple)
    cases = []
    for length in (3, 17, 40, 61, 120):
        for share in (0.25, 0.5, 0.9):
            given: list[list[int]] = []

            def noted(chunks: list, given: list = given, **options: Any) -> list:
                given[:] = [list(chunk) for chunk in chunks]
                return list(place(chunks, **options))

            names = {"random": random, "scale_chunk_positions": noted, "print": lambda *_: None}
            make = clone.function(GENERATE, "create_spacing_scaled_inpainting_sequence", **names)
            trace = list(range(1, length + 1))
            settings = {"min_chunk_size": 5, "max_chunk_size": 10, "mask_id": MASK, "max_spacing": 20}
            text = " ".join(map(str, trace))
            ids = torch.zeros(1, 2, dtype=torch.int64)
            found, _ = make(
                Tokenizer(), ids, text, 96, 1 - share, seed=length, inpaint_last_chunk_end=False, **settings
            )
            cases.append({"length": length, "share": share, "given": list(given), "answer": found[0, 2:].tolist()})
    return {
        "program": clone.name,
        "calls": [f"{GENERATE}:create_spacing_scaled_inpainting_sequence"],
        "relative": 1e-12,
        "hints": cases,
    }


def sampled(clone: Clone) -> dict[str, Any]:
    """Likeliest answers of a table of logits that depend on what is filled in, without and with hints."""
    words, length, block = 7, 8, 4
    table = torch.from_numpy(np.array(numbers(12, length, words, low=-2.0, high=2.0)))
    move = torch.from_numpy(np.array(numbers(13, words, words, low=-2.0, high=2.0)))
    hints = [[MASK] * length, [MASK, 3, MASK, MASK, MASK, 5, 5, MASK]]

    class Model:
        device = torch.device("cpu")

        def __call__(self, x: torch.Tensor) -> SimpleNamespace:
            around = torch.nn.functional.pad(move[x[:, 1:]], (0, 0, 1, 0))[:, :-1] + move[x[:, 1:]].flip(1) * 0.5
            logits = table + around
            logits[..., MASK] = -1e9
            return SimpleNamespace(logits=torch.nn.functional.pad(logits, (0, 0, 1, 0)))

    answers = []
    for steps in (2, 4, 8):
        for hint in hints:

            def given(*_: Any, hint: list = hint, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
                x = torch.tensor([[1, *hint]])
                return x, (x == MASK) & (torch.arange(length + 1) > 0)

            names = {
                "create_spacing_scaled_inpainting_sequence": given,
                "get_num_transfer_tokens": clone.function(GENERATE, "get_num_transfer_tokens"),
                "add_gumbel_noise": clone.function(GENERATE, "add_gumbel_noise"),
                "F": torch.nn.functional,
            }
            generate = clone.function(GENERATE, "generate_inpainting", **names)
            ids = torch.ones(1, 1, dtype=torch.int64)
            out = generate(Tokenizer(), Model(), ids, "1", [0.5], 5, 10, steps, length, block, mask_id=MASK)[0]
            answers.append({"steps": steps, "hint": hint, "answer": out[0, 1:].tolist()})
    calls = [f"{GENERATE}:generate_inpainting"]
    return {"program": clone.name, "calls": calls, "relative": 1e-12, "table": table, "move": move, "answers": answers}
