"""EGAE of T-PPO: lambda-weighted sums of temporal differences, where a truncated answer keeps its last value.

python -m tests.golden.make.tppo
"""

import math

from tests.golden.make.by_hand import by_hand, clipped
from tests.golden.make.peers import write
from tests.golden.make.tokens import batch

GAMMA, LAMBDA = 1.0, 0.95


def main() -> None:
    inputs = batch()
    truncated = [0, 1, 1, 0, 0, 1, 0, 0, 1, 0, 1, 0]
    inputs["reward"] = [0.0 if cut else r for r, cut in zip(inputs["reward"], truncated, strict=True)]
    inputs["extras"] = {"truncated": truncated}
    advantage, returns, total, gradient = [], [], 0.0, []
    number, loss = sum(map(sum, inputs["mask"])), clipped(0.2, 0.2)
    for row, mask in enumerate(inputs["mask"]):
        length, values = int(sum(mask)), inputs["values"][row]
        after = [*values[1:length], values[length - 1] if truncated[row] else 0.0]
        rewards = [0.0] * (length - 1) + [inputs["reward"][row]]
        delta = [r + GAMMA * v - values[t] for t, (r, v) in enumerate(zip(rewards, after, strict=True))]
        found = [math.fsum((GAMMA * LAMBDA) ** (s - t) * delta[s] for s in range(t, length)) for t in range(length)]
        padding = [0.0] * (6 - length)
        advantage.append(found + padding)
        returns.append([a + v for a, v in zip(found, values, strict=False)] + padding)
        pairs = [loss(a, inputs["logp"][row][t] - inputs["logp_old"][row][t]) for t, a in enumerate(found)]
        gradient.append([slope / number for _, slope in pairs] + padding)
        total += math.fsum(value for value, _ in pairs) / number
        for t, target in enumerate(returns[-1][:length]):
            new = inputs["values_new"][row][t]
            near = values[t] + min(max(new - values[t], -0.2), 0.2)
            total += 0.1 * 0.5 * max((new - target) ** 2, (near - target) ** 2) / number
    answer = {"advantage": advantage, "returns": returns, "loss": total, "gradient": gradient}
    write("tppo", "T-PPO, arXiv 2506.15050", inputs, [by_hand("EGAE of the paper's section 3", **answer)])


if __name__ == "__main__":
    main()
