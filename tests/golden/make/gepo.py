"""GRPO with the group preference of OORL by the formula of its paper.

python -m tests.golden.make.gepo
"""

import math

from tests.golden.make.by_hand import by_hand, clipped, groups, mean, spread, standardised
from tests.golden.make.peers import write
from tests.golden.make.tokens import batch

BETA, COEF = 0.1, 0.01


def main() -> None:
    inputs = batch()
    rewards, mask, surrogate = inputs["reward"], inputs["mask"], clipped(0.2, 0.2)
    scores = [
        BETA * math.fsum((n - f) * m for n, f, m in zip(new, ref, row, strict=True))
        for new, ref, row in zip(inputs["logp"], inputs["logp_ref"], mask, strict=True)
    ]
    total, slopes, rows = 0.0, [0.0] * 12, [0.0] * 12
    for members in groups(inputs).values():
        level = mean([rewards[i] for i in members])
        for i, a in zip(members, standardised([rewards[i] for i in members]), strict=True):
            rows[i] = a
        good, bad = ([i for i in members if sign * (rewards[i] - level) > 0] for sign in (1, -1))
        if not good or not bad:
            continue
        best, worst = mean([scores[i] for i in good]), mean([scores[i] for i in bad])
        wrong = 1 / (1 + math.exp(best - worst))
        share = COEF * len(members) / 12
        total += share * (math.log1p(math.exp(worst - best)) + mean([(scores[i] - best) ** 2 for i in good]))
        for i in good:
            slopes[i] += share * BETA * (2 * (scores[i] - best) - wrong) / len(good)
        for i in bad:
            slopes[i] += share * BETA * wrong / len(bad)
    gradient = spread(inputs, slopes)
    for i, row in enumerate(mask):
        for t, real in enumerate(row):
            if real:
                value, slope = surrogate(rows[i], inputs["logp"][i][t] - inputs["logp_old"][i][t])
                total += value / sum(row) / 12
                gradient[i][t] += slope / sum(row) / 12
    answer = {"advantage": spread(inputs, rows), "loss": total, "gradient": gradient}
    write("gepo", "GEPO in OORL, arXiv 2505.12723", inputs, [by_hand("the paper's formula", **answer)])


if __name__ == "__main__":
    main()
