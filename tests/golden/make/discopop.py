"""DiscoPOP's log-ratio modulated loss by TRL.

python -m tests.golden.make.discopop
"""

from tests.golden.make.pairs import pairs, trl
from tests.golden.make.peers import write


def main() -> None:
    inputs = pairs()
    peer = trl(inputs, ["discopop"], [1.0], beta=0.1, smoothing=0.0)
    write("discopop", "DiscoPOP, arXiv 2406.08414", inputs, [peer | {"options": {}}])


if __name__ == "__main__":
    main()
