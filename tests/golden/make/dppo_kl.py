"""DPPO with binary KL by verl, and its gradient by SkyRL, with the row's bounds and with tighter ones."""

from tests.golden.make.dppo import peers
from tests.golden.make.peers import write
from tests.golden.make.tokens import batch


def main() -> None:
    inputs = batch()
    write(
        "dppo_kl",
        "DPPO, arXiv 2602.04879",
        inputs,
        [peer for bound in (0.05, 0.02) for peer in peers(inputs, "kl", bound)],
    )


if __name__ == "__main__":
    main()
