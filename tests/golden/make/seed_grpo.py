"""SEED-GRPO by the formulas of its paper: its repository holds a text only."""

import math

from tests.golden.make.by_hand import by_hand, clipped, entropy, groups, mean, token_loss
from tests.golden.make.peers import write
from tests.golden.make.tokens import batch


def main() -> None:
    inputs = batch() | {"extras": {"answer": [0, 1, 2, 0, 0, 0, 0, 0, 3, 1, 1, 0]}}
    peers = []
    for alpha in (0.5, 1.0):
        found = [0.0] * 12
        for rows in groups(inputs).values():
            reward = [inputs["reward"][i] for i in rows]
            scale = 1 - alpha * entropy([inputs["extras"]["answer"][i] for i in rows]) / math.log(len(rows))
            for i, r in zip(rows, reward, strict=True):
                found[i] = scale * (r - mean(reward))
        answer = token_loss(inputs, found, clipped(0.2, 0.2))
        peers.append(by_hand("section 3 of the paper", changes={"advantage": {"alpha": alpha}}, **answer))
    write("seed_grpo", "SEED-GRPO, arXiv 2505.12346", inputs, peers)


if __name__ == "__main__":
    main()
