"""COPO with the two advantages of its paper blended, where its repository (hijih/copo-code) blends two losses."""

import math

from tests.golden.make.by_hand import by_hand, clipped, entropy, groups, mean, standardised, token_loss
from tests.golden.make.peers import write
from tests.golden.make.tokens import batch


def main() -> None:
    # the answers of the first question differ, those of the second are one, and the third has two
    inputs = batch() | {"extras": {"answer": [0, 1, 2, 3, 0, 0, 0, 0, 0, 1, 1, 0]}}
    members = groups(inputs)
    level = standardised([mean([inputs["reward"][i] for i in rows]) for rows in members.values()])
    found = [0.0] * 12
    for group, rows in members.items():
        weight = 1 / (1 + math.exp(-20 * (entropy([inputs["extras"]["answer"][i] for i in rows]) - 1.5)))
        local = standardised([inputs["reward"][i] for i in rows])
        for i, a in zip(rows, local, strict=True):
            found[i] = weight * a + (1 - weight) * level[group]
    answer = token_loss(inputs, found, clipped(0.2, 0.28))
    write("copo", "COPO, arXiv 2508.04138", inputs, [by_hand("sections 3.2 and 3.3 of the paper", **answer)])


if __name__ == "__main__":
    main()
