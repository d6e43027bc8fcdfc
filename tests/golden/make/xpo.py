"""XPO by TRL; half of the preferred answers are the policy's.

python -m tests.golden.make.xpo
"""

from types import SimpleNamespace

import torch

from tests.golden.make.pairs import OWN, PAIRS, pairs
from tests.golden.make.peers import gradient, package, tensors, write
from tests.golden.make.tokens import ensure_torchvision


def main() -> None:
    ensure_torchvision()
    from trl.experimental.xpo import XPOTrainer

    inputs, peers = pairs() | {"own": OWN}, []
    for beta, alpha in ((0.1, 1e-5), (0.3, 0.02)):
        b = tensors(inputs)
        logp = b.logp.requires_grad_()
        own = b.own[:PAIRS, None] > 0
        policy, reference = ((x * b.mask).chunk(2) for x in (logp, b.logp_ref))
        numbers = [torch.where(own, *policy), torch.where(own, *policy[::-1])]
        numbers += [torch.where(own, *reference[::-1]), torch.where(own, *reference)]
        trainer = SimpleNamespace(args=SimpleNamespace(loss_type="sigmoid"), beta=beta, alpha=alpha)
        loss, _, _ = XPOTrainer._compute_losses(trainer, *numbers, own[:, 0])
        peer = {"program": package("trl"), "calls": ["trl.experimental.xpo.XPOTrainer._compute_losses"]}
        peer |= {"relative": 1e-12, "loss": loss.detach(), "gradient": gradient(loss, logp)}
        peers.append(peer | {"options": {} if beta == 0.1 else {"beta": beta, "alpha": alpha}})
    write("xpo", "XPO, arXiv 2405.21046", inputs, peers)


if __name__ == "__main__":
    main()
