"""Counted operations against sums by hand and against PyTorch's counts while the model runs."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.floor import (
    Dimensions,
    activation_bytes,
    decode_bytes,
    decode_flops,
    dimensions_of,
    forward_flops,
    matmul_rates,
    vision_flops,
)

SMALL = Dimensions(
    layers=1,
    hidden=2,
    heads=1,
    kv_heads=1,
    head_dim=2,
    intermediate=3,
    vocabulary=5,
    vision_layers=2,
    vision_hidden=2,
    vision_intermediate=3,
    vision_gated=True,
    vision_full_layers=1,
    window_patches=2,
    patch_values=6,
    mergers=1,
)
"""34 weights in the decoder layer: query, key, value and output 4 each and three matrices of 6."""


def test_decoder_by_hand():
    rows = forward_flops(SMALL, 3, [1, 2], 0, shared=False)
    shared = forward_flops(SMALL, 3, [1, 2], 0, shared=True)
    assert rows["linear"] == 2 * 34 * (4 + 5)
    assert shared["linear"] == 2 * 34 * (3 + 1 + 2)
    assert rows["attention"] == 4 * 2 * (10 + 15)
    assert shared["attention"] == 4 * 2 * (6 + (3 + 1) + (6 + 3))
    assert rows["head"] == shared["head"] == 2 * 2 * 5 * 3
    assert rows["total"] == rows["linear"] + rows["attention"] + rows["head"]


def test_vision_tower_by_hand():
    # one token of 4 patches: two blocks of 34 weights and 12 of the patch embedding, a block that sees 4 patches
    # and one that sees 2, and a merger of 8 x 8 and 8 x 2
    assert vision_flops(SMALL, 1) == 2 * 4 * (2 * 34 + 12) + 4 * 2 * 4 * (4 + 2) + 2 * (64 + 16)
    plain = dataclasses.replace(SMALL, vision_gated=False, mergers=3)
    assert vision_flops(SMALL, 1) - vision_flops(plain, 1) == 2 * 4 * 2 * 6 - 2 * 2 * (64 + 16)
    shared = forward_flops(SMALL, 3, [1, 2], 1, shared=True)
    assert shared["vision"] == vision_flops(SMALL, 1)
    assert forward_flops(SMALL, 3, [1, 2], 1, shared=False)["vision"] == 2 * shared["vision"]


def test_decoding_by_hand():
    # the first token comes from the prompt; the second row reads one token, which sees 3 + 1
    assert decode_flops(SMALL, 3, [1, 2]) == 2 * 34 * 1 + 4 * 2 * 4 + 2 * 2 * 5 * 3
    # one step through the layer, the head twice; keys and values of 3 and 1 tokens
    assert decode_bytes(SMALL, 3, [1, 2], width=2) == 2 * (34 + 2 * 10 + 2 * 2 * (3 + 1))


def test_prefill_and_decode_together_are_the_shared_forward_pass():
    """A forward pass additionally reads only the last token of each completion, in every layer."""
    completions = [4, 4, 4]
    whole = forward_flops(SMALL, 7, completions, 2, shared=True)["total"]
    prefill = forward_flops(SMALL, 7, [], 2, shared=True)["total"]
    last = 3 * (2 * 34 + 4 * 2 * (7 + 4))
    assert prefill + decode_flops(SMALL, 7, completions) + last == whole


def test_activations_by_hand():
    # 4 widths, query, key, value and output, and 4 of the gated layer for each token; 8 widths and 4 in the tower
    decoder = 4 * 2 + 8 + 4 * 3
    tower = 2 * (8 * 2 + 4 * 3)
    assert activation_bytes(SMALL, 3, [1, 2], 1, shared=True) == 4 * (6 * decoder + 4 * tower)
    assert activation_bytes(SMALL, 3, [1, 2], 1, shared=False, width=2) == 2 * (9 * decoder + 2 * 4 * tower)


def test_ratios_approach_the_group_size_for_long_prompts_and_one_for_long_completions():
    def ratio(prompt, completion):
        rows, shared = (forward_flops(SMALL, prompt, [completion] * 8, 0, shared=s)["linear"] for s in (False, True))
        return rows / shared

    assert ratio(16, 1) == pytest.approx(8 * 17 / 24)
    assert ratio(100_000, 1) == pytest.approx(8.0, rel=1e-3)
    assert ratio(1, 100_000) == pytest.approx(1.0, rel=1e-3)


def test_tower_operations_equal_pytorchs_count(policy):
    model = policy.network.model
    size = dimensions_of(policy.network.config)
    unit = size.merge**2
    patches = 4 * unit
    pixels = torch.randn(patches, size.patch_values)
    grid = torch.tensor([[1, 2 * size.merge, 2 * size.merge]])
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.get_image_features(pixels, grid, return_dict=True)
    assert counter.get_total_flops() == pytest.approx(vision_flops(size, patches // unit), rel=1e-6)


def test_decoder_operations_equal_pytorchs_count(policy):
    """PyTorch counts the attention of every pair, which the causal mask halves."""
    network = policy.network
    size = dimensions_of(network.config)
    length = 12
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        network(input_ids=torch.arange(length)[None])
    counted = forward_flops(size, 0, [length], 0, shared=False)
    missing = 4 * size.layers * size.heads * size.head_dim * (length * length - length * (length + 1) // 2)
    assert counter.get_total_flops() == counted["total"] - counted["vision"] + missing


def test_rates_are_positive_and_finite():
    options = {"hidden": 16, "intermediate": 32, "tall": 64, "flat": 4, "operations": 10**6, "read": 2**20}
    options |= {"repetitions": 1, "device": "cpu"}
    rates = matmul_rates(options)["counts"]
    assert set(rates) == {"tall_flops", "flat_flops", "read_bytes"}
    assert all(0 < rate < 1e15 for rate in rates.values())
