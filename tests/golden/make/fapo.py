"""FAPO's objective: DAPO's loss with a dual clip of 10, on the rewards 1, 0 (flawed) and -1."""

from tests.golden.make.by_hand import by_hand, clipped, groups, standardised, token_loss
from tests.golden.make.peers import write
from tests.golden.make.tokens import batch


def main() -> None:
    inputs = batch() | {"reward": [1.0, 0.0, -1.0, -1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.0, -1.0]}
    inputs["logp"][9][0] = inputs["logp_old"][9][0] + 2.5
    inputs["logp"][11][1] = inputs["logp_old"][11][1] + 2.5
    found = [0.0] * 12
    for rows in groups(inputs).values():
        for i, a in zip(rows, standardised([inputs["reward"][i] for i in rows]), strict=True):
            found[i] = a
    answer = token_loss(inputs, found, clipped(0.2, 0.28, 10.0))
    write("fapo", "FAPO, arXiv 2510.22543", inputs, [by_hand("section 4 of the paper", **answer)])


if __name__ == "__main__":
    main()
