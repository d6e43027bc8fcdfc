"""Length-normalised DPO by TRL.

python -m tests.golden.make.length_normalised_dpo
"""

from tests.golden.make.pairs import pairs, trl
from tests.golden.make.peers import write


def main() -> None:
    inputs = pairs()
    peer = trl(inputs, ["sigmoid_norm"], [1.0], beta=5.0, smoothing=0.0)
    write("length_normalised_dpo", "length-normalised DPO, arXiv 2411.15124", inputs, [peer | {"options": {}}])


if __name__ == "__main__":
    main()
