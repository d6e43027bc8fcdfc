"""ASPO by the formulas of Understanding Tool-Integrated Reasoning, which has no public code of it."""

from tests.golden.make.by_hand import by_hand, clipped, groups, mean, standardised, token_loss
from tests.golden.make.peers import write
from tests.golden.make.tokens import batch


def main() -> None:
    rewards = [1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0]
    inputs = batch() | {"reward": rewards, "extras": {"code_start": [4, 1, -1, 0, 0, 1, 1, 3, 2, 0, 1, -1]}}
    found = [0.0] * 12
    for rows in groups(inputs).values():
        for i, a in zip(rows, standardised([rewards[i] for i in rows]), strict=True):
            found[i] = a
        start = {i: inputs["extras"]["code_start"][i] for i in rows}
        coded = [i for i in rows if rewards[i] == 1.0 and start[i] >= 0]
        length = mean([sum(inputs["mask"][i]) for i in coded])
        for i in coded:
            bonus = -2.0 * (start[i] - mean([start[j] for j in coded])) / length
            found[i] += min(max(bonus, -0.7 * abs(found[i])), 0.7 * abs(found[i]))
    answer = token_loss(inputs, found, clipped(0.2, 0.28))
    write("aspo_tir", "ASPO, arXiv 2508.19201", inputs, [by_hand("section 3, equation 2, of the paper", **answer)])


if __name__ == "__main__":
    main()
