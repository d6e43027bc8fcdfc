"""VESPO by TRL."""

from tests.golden.make.peers import write
from tests.golden.make.tokens import Trl, Verl, batch


def main() -> None:
    inputs = batch()
    verl = Verl(inputs)
    advantage = verl.advantage("compute_grpo_outcome_advantage")
    constants = {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}
    trl = Trl(inputs).grpo(advantage[:, 0], "vespo", **constants)
    write("vespo", "VESPO, arXiv 2602.10693", inputs, [trl])


if __name__ == "__main__":
    main()
