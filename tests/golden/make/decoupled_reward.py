"""DRPO by its public code; see disco.py."""

from tests.golden.make.disco import answer, moved
from tests.golden.make.peers import Clone, Made


def make(path: str) -> Made:
    clone = Clone(path, "Optimization-AI/DRPO", "405f70268c7943f4e1fb253fd50170bca0de772b")
    inputs, peers = moved(), []
    for share in (0.1, 0.5):  # of the six tokens of the longest answer
        found = answer(clone, inputs, "compute_policy_loss_drpo", tau=10.0, Lambda=share)
        peers.append(found | {"changes": {"clip": {"length_scale": 6 * share}}})
    peers.append(answer(clone, inputs, "compute_policy_loss_drpo", tau=10.0, Lambda=0.1, room=8192 - 6))
    return "DRPO, arXiv 2510.04474", inputs, peers, clone
