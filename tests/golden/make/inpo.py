"""INPO, equation 8 of the paper, in Python's floats: no public code of its authors was found.

python -m tests.golden.make.inpo
"""

from tests.golden.make.by_hand import by_hand
from tests.golden.make.pairs import PAIRS, TOKENS, pairs
from tests.golden.make.peers import numbers, write

ETA = 0.0075
TAU = ETA / 3


def main() -> None:
    inputs = pairs() | {"logp_previous": numbers(26, 2 * PAIRS, TOKENS, low=-3.0, high=0.0)}

    def total(key: str, row: int) -> float:
        return sum(value for value, real in zip(inputs[key][row], inputs["mask"][row], strict=True) if real)

    loss, slopes = 0.0, [0.0] * (2 * PAIRS)
    for one in range(PAIRS):
        two = one + PAIRS
        policy, reference, previous = (
            total(key, one) - total(key, two) for key in ("logp", "logp_ref", "logp_previous")
        )
        h = policy - TAU / ETA * reference - (ETA - TAU) / ETA * previous
        loss += (h - 1 / (2 * ETA)) ** 2 / PAIRS
        slopes[one] = 2 * (h - 1 / (2 * ETA)) / PAIRS
        slopes[two] = -slopes[one]
    gradient = [[slope * real for real in row] for slope, row in zip(slopes, inputs["mask"], strict=True)]
    peer = by_hand("equation 8", options={}, loss=loss, gradient=gradient)
    write("inpo", "INPO, arXiv 2407.00617", inputs, [peer])


if __name__ == "__main__":
    main()
