"""IPO by TRL, log-probabilities averaged over the tokens of an answer.

python -m tests.golden.make.ipo
"""

from tests.golden.make.pairs import pairs, trl
from tests.golden.make.peers import write


def main() -> None:
    inputs = pairs()
    peer = trl(inputs, ["ipo"], [1.0], beta=0.1, smoothing=0.0)
    write("ipo", "IPO, arXiv 2310.12036", inputs, [peer | {"options": {}}])


if __name__ == "__main__":
    main()
