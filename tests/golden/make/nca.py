"""NCA on pairs by TRL.

python -m tests.golden.make.nca
"""

from tests.golden.make.pairs import pairs, trl
from tests.golden.make.peers import write


def main() -> None:
    inputs = pairs()
    peer = trl(inputs, ["nca_pair"], [1.0], beta=0.1, smoothing=0.0)
    write("nca", "NCA, arXiv 2402.05369", inputs, [peer | {"options": {}}])


if __name__ == "__main__":
    main()
