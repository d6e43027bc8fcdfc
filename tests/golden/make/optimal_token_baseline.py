"""The optimal token baseline by verl, with and without tool output between the tokens."""

from typing import Any

from tests.golden.make.peers import numbers, tensors, write
from tests.golden.make.tokens import Verl, batch

CLAMPED = "it adds 1e-8 to the sum of the norms"


def main() -> None:
    inputs: dict[str, Any] = batch() | {"extras": {"collision": numbers(12, 12, 6, low=0.2, high=1.0)}}
    for row in (0, 9):  # tool output
        inputs["mask"][row][2] = 0.0
    verl = Verl(inputs)
    options = {"old_log_probs": verl.b.logp_old, "sum_pi_squared": tensors(inputs["extras"]).collision}
    advantage = verl.advantage("compute_multi_turn_optimal_token_baseline_advantage", **options)
    loss = verl.policy_loss("vanilla", advantage, "token-mean")
    peer = verl.answer(advantage, loss) | {"relative": 1e-7, "because": CLAMPED}
    write("optimal_token_baseline", "OTB, arXiv 2602.07078", inputs, [peer])


if __name__ == "__main__":
    main()
