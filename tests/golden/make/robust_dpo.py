"""Robust DPO by TRL.

python -m tests.golden.make.robust_dpo
"""

from tests.golden.make.pairs import pairs, trl
from tests.golden.make.peers import write


def main() -> None:
    inputs = pairs()
    peer = trl(inputs, ["robust"], [1.0], beta=0.1, smoothing=0.1)
    write("robust_dpo", "robust DPO, arXiv 2403.00409", inputs, [peer | {"options": {}}])


if __name__ == "__main__":
    main()
