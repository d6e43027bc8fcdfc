"""CISPO by verl and TRL, the ratio at most 5; by verl also with bounds on both sides."""

from tests.golden.make.peers import write
from tests.golden.make.tokens import Trl, Verl, batch


def main() -> None:
    inputs = batch()
    found = []
    for low, high in ((1.0, 4.0), (0.2, 0.3)):
        verl = Verl(inputs)
        advantage = verl.advantage("compute_grpo_outcome_advantage")
        loss = verl.policy_loss("cispo", advantage, "token-mean", low, high)
        found.append(verl.answer(advantage, loss, changes={"clip": {"low": low, "high": high}}))
    trl = Trl(inputs).grpo(advantage[:, 0], "cispo", high=5.0)
    write("cispo", "CISPO, arXiv 2506.13585", inputs, [found[0], trl, found[1]])


if __name__ == "__main__":
    main()
