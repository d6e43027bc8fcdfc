"""RPO by TRL: DPO plus the likelihood of the preferred answers, averaged over a batch's tokens or over answers.

python -m tests.golden.make.rpo
"""

import torch

from tests.golden.make.pairs import pairs, single_pairs, trl
from tests.golden.make.peers import write

LOSSES, WEIGHTS = ["sigmoid", "sft"], [1.0, 0.005]


def main() -> None:
    inputs = pairs()
    batch = trl(inputs, LOSSES, WEIGHTS, beta=0.01, smoothing=0.0)
    # a batch of one pair averages over that answer's tokens
    alone = [trl(pair, LOSSES, WEIGHTS, beta=0.01, smoothing=0.0) for pair in single_pairs(inputs)]
    sides = [torch.stack([pair["gradient"][side] for pair in alone]) for side in (0, 1)]
    answers = {"loss": torch.stack([pair["loss"] for pair in alone]).mean(), "gradient": torch.cat(sides) / len(alone)}
    peers = [batch | {"options": {"average": "decisions"}}, batch | answers | {"options": {"average": "answers"}}]
    write("rpo", "RPO, arXiv 2405.16436", inputs, peers)


if __name__ == "__main__":
    main()
