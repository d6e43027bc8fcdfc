"""REFUEL's loss of one turn by its public code."""

from types import SimpleNamespace

from tests.golden.make.pairs import PAIRS, pairs
from tests.golden.make.peers import Clone, Made, gradient, tensors

COMMIT = "b76c5343211c375f572f2e75bcd54b98a4cb3a36"
FILE = "setting_one/refuel.py"
FIRST, LAST = 415, 419


def make(path: str) -> Made:
    clone = Clone(path, "ZhaolinGao/REFUEL", COMMIT)
    inputs = pairs()
    b = tensors(inputs)
    logp = b.logp.requires_grad_()
    found = clone.lines(
        FILE,
        FIRST,
        LAST,
        new_logprobs=(logp * b.mask).sum(1),
        mb_logprobs=(b.logp_ref * b.mask).sum(1),
        mb_chosen_reward=b.score[:PAIRS],
        mb_reject_reward=b.score[PAIRS:],
        args=SimpleNamespace(per_device_train_batch_size=PAIRS, refuel=SimpleNamespace(eta=1.0)),
    )
    peer = {"program": clone.name, "calls": [f"{FILE}:{FIRST}-{LAST}"], "relative": 1e-12, "options": {}}
    peer |= {"loss": found.loss.detach(), "gradient": gradient(found.loss, logp)}
    return "REFUEL, arXiv 2410.04612", inputs, [peer], clone
