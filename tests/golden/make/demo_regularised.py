"""Demonstration-regularised RL: a clipped loss and 0.05 times the divergence k3 from the cloned policy."""

import math

from tests.golden.make.by_hand import by_hand, clipped, token_loss
from tests.golden.make.peers import write
from tests.golden.make.selfplay_winrate import centred
from tests.golden.make.tokens import batch


def main() -> None:
    inputs = batch()
    answer = token_loss(inputs, centred(inputs), clipped(0.2, 0.2))
    number = sum(map(sum, inputs["mask"]))
    for i, mask in enumerate(inputs["mask"]):
        for t, trained in enumerate(mask):
            d = inputs["logp_ref"][i][t] - inputs["logp"][i][t]
            answer["loss"] += 0.05 * trained * (math.exp(d) - d - 1) / number
            answer["gradient"][i][t] += 0.05 * trained * (1 - math.exp(d)) / number
    peers = [by_hand("section 3 of the paper", **answer)]
    write("demo_regularised", "Demonstration-regularised RL, arXiv 2310.17303", inputs, peers)


if __name__ == "__main__":
    main()
