"""Nash-MD by TRL; half of the preferred answers are the policy's.

python -m tests.golden.make.nash_md
"""

from types import SimpleNamespace

import torch

from tests.golden.make.pairs import OWN, PAIRS, pairs
from tests.golden.make.peers import gradient, package, tensors, write
from tests.golden.make.tokens import ensure_torchvision


def main() -> None:
    ensure_torchvision()
    from trl.experimental.nash_md import NashMDTrainer

    inputs = pairs() | {"own": OWN}
    b = tensors(inputs)
    logp = b.logp.requires_grad_()
    own = b.own[:PAIRS, None] > 0
    policy, reference = (torch.where(own, *(x * b.mask).chunk(2)) for x in (logp, b.logp_ref))
    chosen, rejected = b.score.chunk(2)
    ahead = torch.where(own[:, 0], chosen - rejected, rejected - chosen)
    loss, _, _ = NashMDTrainer._compute_losses(SimpleNamespace(beta=0.1), policy, reference, torch.sigmoid(ahead))
    calls = ["trl.experimental.nash_md.NashMDTrainer._compute_losses"]
    peer = {"program": package("trl"), "calls": calls, "relative": 1e-12, "options": {}}
    peer |= {"loss": loss.detach(), "gradient": gradient(loss, logp)}
    write("nash_md", "Nash-MD, arXiv 2312.00886", inputs, [peer])


if __name__ == "__main__":
    main()
