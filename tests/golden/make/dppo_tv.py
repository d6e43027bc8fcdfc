"""DPPO with binary TV by verl, and its gradient by SkyRL, with the row's bounds and with tighter ones."""

from tests.golden.make.dppo import peers
from tests.golden.make.peers import write
from tests.golden.make.tokens import batch


def main() -> None:
    inputs = batch()
    write(
        "dppo_tv",
        "DPPO, arXiv 2602.04879",
        inputs,
        [peer for bound in (0.2, 0.1) for peer in peers(inputs, "tv", bound)],
    )


if __name__ == "__main__":
    main()
