"""APO-zero by TRL.

python -m tests.golden.make.anchored_zero
"""

from tests.golden.make.pairs import pairs, trl
from tests.golden.make.peers import write


def main() -> None:
    inputs = pairs()
    peer = trl(inputs, ["apo_zero"], [1.0], beta=0.1, smoothing=0.0)
    write("anchored_zero", "APO-zero, arXiv 2408.06266", inputs, [peer | {"options": {}}])


if __name__ == "__main__":
    main()
