"""CANON by its public code, by entropy; see canon_length.py.

python -m tests.golden.make.canon_entropy CANON
"""

import sys

from tests.golden.make.canon_length import COMMIT, answers
from tests.golden.make.peers import Clone, numbers, tensors, write
from tests.golden.make.tokens import batch


def main() -> None:
    clone = Clone(sys.argv[1], "biuboomc/CANON", COMMIT)
    inputs = batch() | {"entropy_old": numbers(7, 12, 6, low=0.0, high=2.0)}
    name = "compute_dr_entropy_per_token_group_outcome_advantage"
    peers = answers(clone, inputs, name, entropy=tensors(inputs).entropy_old)
    write("canon_entropy", "CANON, arXiv 2509.23962", inputs, peers, clone)


if __name__ == "__main__":
    main()
