"""KL-Cov by verl, with the penalty on one decision and on a fifth of them."""

from typing import Any

from tests.golden.make.peers import write
from tests.golden.make.tokens import Verl, batch


def main() -> None:
    inputs = batch()
    peers = [peer(inputs, 2e-4), peer(inputs, 0.2) | {"changes": {"clip": {"share": 0.2}}}]
    write("kl_cov", "KL-Cov, arXiv 2505.22617", inputs, peers)


def peer(inputs: dict[str, Any], share: float) -> dict[str, Any]:
    verl = Verl(inputs)
    advantage = verl.advantage("compute_grpo_outcome_advantage")
    mode = {"kl_cov_ratio": share, "ppo_kl_coef": 1.0}
    return verl.answer(advantage, verl.policy_loss("kl_cov", advantage, "token-mean", mode=mode))


if __name__ == "__main__":
    main()
