"""BCO on pairs by TRL.

python -m tests.golden.make.bco
"""

from tests.golden.make.pairs import pairs, trl
from tests.golden.make.peers import write


def main() -> None:
    inputs = pairs()
    peer = trl(inputs, ["bco_pair"], [1.0], beta=0.1, smoothing=0.0)
    write("bco", "BCO, arXiv 2404.04656", inputs, [peer | {"options": {}}])


if __name__ == "__main__":
    main()
