"""P3O with joint clipping by the formula of its paper, for all pairs of a group in both orders."""

import math

from tests.golden.make.by_hand import by_hand, groups, mean, spread
from tests.golden.make.peers import write
from tests.golden.make.tokens import batch


def main() -> None:
    inputs = batch()
    rewards, mask = inputs["reward"], inputs["mask"]
    sums = [
        math.fsum((n - o) * m for n, o, m in zip(new, old, row, strict=True))
        for new, old, row in zip(inputs["logp"], inputs["logp_old"], mask, strict=True)
    ]
    total, slopes, rows = 0.0, [0.0] * 12, [0.0] * 12
    for members in groups(inputs).values():
        for i in members:
            rows[i] = rewards[i] - mean([rewards[j] for j in members])
            for j in members:
                a, ratio = (rewards[i] - rewards[j]) / 2, math.exp(sums[i] - sums[j])
                bounded = min(max(ratio, 0.8), 1.2)
                weight = 0.0 if i == j else 1 / (len(members) - 1) / 12
                total += weight * max(-a * ratio, -a * bounded)
                if -a * ratio >= -a * bounded:
                    slopes[i] -= weight * a * ratio
                    slopes[j] += weight * a * ratio
    answer = {"advantage": spread(inputs, rows), "loss": total, "gradient": spread(inputs, slopes)}
    write("p3o_joint", "P3O, arXiv 2310.00212", inputs, [by_hand("section 4 of the paper", **answer)])


if __name__ == "__main__":
    main()
