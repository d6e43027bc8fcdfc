"""BGPO, whose public code could not be had: its bound in plain Python over float64 numbers.

A decision is one of the draws of an answer's log-likelihood; all answers have as many.

python -m tests.golden.make.bgpo
"""

import math

from tests.golden.make.by_hand import BY_HAND, groups, spread, standardised
from tests.golden.make.peers import write
from tests.golden.make.tokens import batch


def main() -> None:
    inputs = batch() | {"mask": [[1.0] * 6] * 12}
    advantage = [0.0] * 12
    for rows in groups(inputs).values():
        for row, a in zip(rows, standardised([inputs["reward"][row] for row in rows]), strict=True):
            advantage[row] = a
    loss, gradient = [], []
    for a, new, old in zip(advantage, inputs["logp"], inputs["logp_old"], strict=True):
        d = [n - o for n, o in zip(new, old, strict=True)]
        loss += [-a * (1 + x) if a >= 0 else -a * math.exp(x) for x in d]
        gradient.append([-a / 72 if a >= 0 else -a * math.exp(x) / 72 for x in d])
    numbers = {"advantage": spread(inputs, advantage), "loss": math.fsum(loss) / 72, "gradient": gradient}
    calls = ["arXiv 2510.11683: mean over answers and draws of (1 + d) A where A >= 0, exp(d) A elsewhere"]
    write("bgpo", "BGPO, arXiv 2510.11683", inputs, [{"program": BY_HAND, "calls": calls, "relative": 1e-12} | numbers])


if __name__ == "__main__":
    main()
