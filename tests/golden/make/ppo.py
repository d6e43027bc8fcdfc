"""PPO by verl: GAE, dual clip and the clipped loss of the critic."""

from typing import Any

from tests.golden.make.peers import gradient, write
from tests.golden.make.tokens import COUNT_EPS, Verl, batch


def main() -> None:
    inputs = batch()
    write("ppo", "PPO, arXiv 1707.06347", inputs, [peer(inputs, dual) for dual in (3.0, 1.1)])


def peer(inputs: dict[str, Any], dual: float) -> dict[str, Any]:
    """`dual` 3 is the row's, which nothing here reaches."""
    verl = Verl(inputs)
    advantage, returns = verl.gae(1.0, 0.95, kl_ratio=0.05)
    policy = verl.policy_loss("vanilla", advantage, "token-mean", 0.2, 0.2, dual=dual)
    value = verl.value_loss(returns, 0.2)
    more = {"returns": returns, "gradient_values": gradient(0.1 * value, verl.b.values_new)}
    more["changes"] = {"clip": {"dual": dual}}
    return verl.answer(advantage, policy + 0.1 * value.detach(), **more, **COUNT_EPS)


if __name__ == "__main__":
    main()
