"""Schulman's estimators of the divergence, with and without the gradient of k2, by verl."""

import torch

from tests.golden.make.peers import gradient, package, write
from tests.golden.make.tokens import ensure_torchvision

KINDS = {"k1": "k1", "k2": "k2", "k3": "k3", "k1p": "k1+", "k3p": "k3+"}


def main() -> None:
    ensure_torchvision()
    from verl.trainer.ppo.core_algos import kl_penalty

    # The last three reach the limits of k3: on its exponent and on its value.
    inputs = {
        "logp": [-0.2, -1.4, -3.0, -2.5, -0.7, -9.0, -30.0, -0.1],
        "logp_ref": [-0.2, -0.9, -3.1, -0.4, -2.9, -5.0],
    }
    inputs["logp_ref"] += [-1.0, -30.0]
    logp = torch.tensor(inputs["logp"], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor(inputs["logp_ref"], dtype=torch.float64)
    found = {name: kl_penalty(logp, reference, kind) for name, kind in KINDS.items()}
    answer = {name: {"value": kl.detach(), "gradient": gradient(kl.sum(), logp)} for name, kl in found.items()}
    peer = {"program": package("verl"), "calls": ["verl.trainer.ppo.core_algos.kl_penalty"], "relative": 1e-14}
    write("kl_estimators", "Schulman, Approximating KL divergence (2020)", inputs, [peer | answer])


if __name__ == "__main__":
    main()
