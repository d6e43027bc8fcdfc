"""Hints and sampling of masked-diffusion language models, against the public code of IGPO."""

from types import SimpleNamespace

import pytest
import torch

from mmrl.masked.inpainting import with_chunks
from mmrl.masked.masked_config import InpaintingConfig
from mmrl.masked.masked_sampler import MaskedSampling, fill
from tests.golden.numbers import load, tensor

FILE = load("masked_filling")
HINTS, FILLED = FILE.peers
MASK = 0


@pytest.mark.parametrize("case", HINTS["hints"], ids=lambda case: f"{case['length']}-{case['share']}")
def test_chunks_of_the_worked_answer_go_where_they_go_in_the_code(case):
    config = InpaintingConfig(free=FILE.inputs["free"], max_gap=FILE.inputs["max_gap"])
    trace, length = range(1, case["length"] + 1), FILE.inputs["length"]
    assert with_chunks(trace, case["given"], length, MASK, config) == case["answer"]
    assert (max(case["answer"]) > 0) == bool(case["given"])


def test_the_likeliest_answer_is_filled_in_as_in_the_code():
    table, move = tensor(FILLED["table"]), tensor(FILLED["move"])

    def logits(prompts, answers):
        around = torch.nn.functional.pad(move[answers], (0, 0, 1, 0))[:, :-1] + move[answers].flip(1) * 0.5
        return (table + around).index_fill(2, torch.tensor([MASK]), float("-inf"))

    policy = SimpleNamespace(mask_id=MASK, logits=logits)
    for case in FILLED["answers"]:
        config = MaskedSampling(len(case["hint"]), FILE.inputs["block"], case["steps"])
        found = fill(policy, [None], torch.tensor([case["hint"]]), config, None)
        assert found[0].tolist() == case["answer"]
    assert len({tuple(case["answer"]) for case in FILLED["answers"]}) > 2
