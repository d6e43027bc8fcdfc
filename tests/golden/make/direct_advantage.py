"""The regression of direct advantage policy optimisation by its formula, in Python's floats.

python -m tests.golden.make.direct_advantage
"""

from tests.golden.make.by_hand import by_hand
from tests.golden.make.pairs import pairs
from tests.golden.make.peers import write

BETA = 0.1


def main() -> None:
    inputs, loss, gradient = pairs(), 0.0, []
    columns = (inputs[key] for key in ("logp", "logp_ref", "mask", "score"))
    for new, reference, mask, advantage in zip(*columns, strict=True):
        ratio = sum(n - f for n, f, real in zip(new, reference, mask, strict=True) if real)
        loss += 0.5 * (BETA * ratio - advantage) ** 2 / len(inputs["score"])
        slope = BETA * (BETA * ratio - advantage) / len(inputs["score"])
        gradient.append([slope * real for real in mask])
    peer = by_hand("0.5 (beta log-ratio - A)^2", options={}, loss=loss, gradient=gradient)
    write("direct_advantage", "Direct Advantage Policy Optimization, arXiv 2412.18279", inputs, [peer])


if __name__ == "__main__":
    main()
