"""EXO by TRL.

python -m tests.golden.make.exo
"""

import torch

from tests.golden.make.pairs import pairs, trl
from tests.golden.make.peers import write


def main() -> None:
    torch.set_default_dtype(torch.float64)  # TRL makes the smoothing a tensor
    inputs = pairs()
    peer = trl(inputs, ["exo_pair"], [1.0], beta=0.1, smoothing=0.001)
    torch.set_default_dtype(torch.float32)
    write("exo", "EXO, arXiv 2402.00856", inputs, [peer | {"options": {}}])


if __name__ == "__main__":
    main()
