"""P3O with separate clipping by the formula of its paper: groups of two answers."""

import math

from tests.golden.make.by_hand import by_hand, clipped, groups, spread
from tests.golden.make.peers import write
from tests.golden.make.tokens import batch


def main() -> None:
    inputs = batch() | {"group": [row // 2 for row in range(12)]}
    total, rows, slopes = 0.0, [0.0] * 12, [0.0] * 12
    for pair in groups(inputs).values():
        for i, j in (pair, pair[::-1]):
            rows[i] = (inputs["reward"][i] - inputs["reward"][j]) / 2
            found = zip(inputs["logp"][i], inputs["logp_old"][i], inputs["mask"][i], strict=True)
            value, slope = clipped(0.2, 0.2)(rows[i], math.fsum((n - o) * m for n, o, m in found))
            total, slopes[i] = total + value / 12, slope / 12
    answer = {"advantage": spread(inputs, rows), "loss": total, "gradient": spread(inputs, slopes)}
    write("p3o_separate", "P3O, arXiv 2310.00212", inputs, [by_hand("section 4 of the paper", **answer)])


if __name__ == "__main__":
    main()
