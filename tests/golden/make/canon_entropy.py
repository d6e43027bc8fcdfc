"""CANON by its public code, by entropy; see canon_length.py."""

from tests.golden.make.canon_length import COMMIT, answers
from tests.golden.make.peers import Clone, Made, numbers, tensors
from tests.golden.make.tokens import batch


def make(path: str) -> Made:
    clone = Clone(path, "biuboomc/CANON", COMMIT)
    inputs = batch() | {"entropy_old": numbers(7, 12, 6, low=0.0, high=2.0)}
    name = "compute_dr_entropy_per_token_group_outcome_advantage"
    peers = answers(clone, inputs, name, entropy=tensors(inputs).entropy_old)
    return "CANON, arXiv 2509.23962", inputs, peers, clone
