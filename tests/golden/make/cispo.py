"""CISPO by verl and TRL, the ratio at most 5."""

from tests.golden.make.peers import write
from tests.golden.make.tokens import Trl, Verl, batch


def main() -> None:
    inputs = batch()
    verl = Verl(inputs)
    advantage = verl.advantage("compute_grpo_outcome_advantage")
    loss = verl.policy_loss("cispo", advantage, "token-mean", 1.0, 4.0)
    trl = Trl(inputs).grpo(advantage[:, 0], "cispo", high=5.0)
    write("cispo", "CISPO, arXiv 2506.13585", inputs, [verl.answer(advantage, loss), trl])


if __name__ == "__main__":
    main()
