"""DRO by verl."""

from tests.golden.make.peers import write
from tests.golden.make.tokens import Verl, batch


def main() -> None:
    inputs = batch()
    verl = Verl(inputs)
    advantage = verl.advantage("compute_grpo_outcome_advantage")
    loss = verl.policy_loss("dro", advantage, "token-mean", mode={"dro_beta": 0.05})
    write("dro", "DRO, arXiv 2405.19107", inputs, [verl.answer(advantage, loss)])


if __name__ == "__main__":
    main()
