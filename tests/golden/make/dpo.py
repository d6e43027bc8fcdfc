"""DPO by TRL, and conservative DPO (smoothed labels) by SPPO's fork of an older TRL."""

from tests.golden.make.pairs import pairs, trl
from tests.golden.make.peers import Clone, Made
from tests.golden.make.sppo import COMMIT, fork


def make(path: str) -> Made:
    clone = Clone(path, "uclaml/SPPO", COMMIT)
    inputs = pairs()
    peers = [trl(inputs, ["sigmoid"], [1.0], beta=0.1, smoothing=0.0) | {"options": {}}]
    for smoothing in (0.0, 0.2):
        found = fork(clone, inputs, loss_type="sigmoid", beta=0.3, label_smoothing=smoothing)
        peers.append(found | {"options": {"beta": 0.3, "label_smoothing": smoothing}})
    return "DPO, arXiv 2305.18290", inputs, peers, clone
