"""OPO by verl."""

from tests.golden.make.peers import write
from tests.golden.make.tokens import Verl, batch


def main() -> None:
    inputs = batch()
    verl = Verl(inputs)
    advantage = verl.advantage("compute_opo_outcome_advantage")
    loss = verl.policy_loss("gpg", advantage, "token-mean")
    write("opo", "OPO, arXiv 2505.23585", inputs, [verl.answer(advantage, loss)])


if __name__ == "__main__":
    main()
