"""Segments of answers against the code of SPO."""

import math

import pytest
import torch

from mmrl.contrib.language.segment import bounds, chain_cuts, tree_values
from tests.golden.numbers import assert_agrees, inputs_of, load
from tests.golden.test_tokens import compare

INPUTS = load("segment_chain").inputs
PARTS = INPUTS["parts"]


def test_cuts_and_advantages_of_chains():
    for row, length in enumerate(PARTS["lengths"]):
        probability = [math.exp(value) for value in INPUTS["logp_old"][row][:length]]
        cuts = chain_cuts(probability, 0.9, 2)
        assert cuts == [cut + 1 for cut in PARTS["cuts"][row]], "a cut of the code is the place before"
        before, after = bounds(length, list(zip(cuts, INPUTS["cut_value"][row], strict=False)), INPUTS["reward"][row])
        uncertain = torch.tensor(probability) <= 0.9
        expected = torch.tensor(PARTS["advantage"][row][:length])
        torch.testing.assert_close((after - before) * uncertain, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("peer", load("segment_chain").peers, ids=["near", "far"])
def test_trees_have_the_loss_of_chains(peer):
    compare("segment_tree", peer, inputs_of("segment_chain", peer))


@pytest.mark.parametrize("number", [0, 1])
def test_advantages_of_trees(number):
    tree = load("segment_tree")
    peer, leaves = tree.peers[number], tree.inputs["leaves"]
    values = tree_values([[leaf[: depth + 1] for depth in range(len(leaf))] for leaf in leaves], list(leaves.values()))
    ends = [(values[branch], values[branch[:-1] or None]) for branch in peer["branches"]]
    found = torch.tensor([one[0] - parent[0] for one, parent in ends], dtype=torch.float64)
    assert [branch for branch, value in zip(peer["branches"], found, strict=True) if value != 0] == peer["kept"]
    if peer["kind"] == "grpo":
        found = found / (torch.tensor([parent[1] for _, parent in ends], dtype=torch.float64) + 1e-8)
    assert_agrees(found, peer, "advantage")
