"""The hinge loss of SLiC by TRL, margins against a reference.

python -m tests.golden.make.slic
"""

from tests.golden.make.pairs import pairs, trl
from tests.golden.make.peers import write


def main() -> None:
    inputs = pairs()
    peer = trl(inputs, ["hinge"], [1.0], beta=0.1, smoothing=0.0)
    write("slic", "SLiC-HF, arXiv 2305.10425", inputs, [peer | {"options": {}}])


if __name__ == "__main__":
    main()
