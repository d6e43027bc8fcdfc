"""DAPO by verl and TRL."""

from tests.golden.make.peers import write
from tests.golden.make.tokens import Trl, Verl, batch


def main() -> None:
    inputs = batch()
    verl = Verl(inputs)
    advantage = verl.advantage("compute_grpo_outcome_advantage")
    loss = verl.policy_loss("vanilla", advantage, "token-mean", 0.2, 0.28)
    trl = Trl(inputs).grpo(advantage[:, 0], "dapo", high=0.28)
    write("dapo", "DAPO, arXiv 2503.14476", inputs, [verl.answer(advantage, loss), trl])


if __name__ == "__main__":
    main()
