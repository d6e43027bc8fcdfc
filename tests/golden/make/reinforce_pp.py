"""REINFORCE++ by verl."""

from types import SimpleNamespace

from tests.golden.make.peers import write
from tests.golden.make.tokens import COUNT_EPS, Verl, batch


def main() -> None:
    inputs = batch()
    verl = Verl(inputs)
    name, config = "compute_reinforce_plus_plus_outcome_advantage", SimpleNamespace(gamma=1.0)
    advantage = verl.advantage(name, kl_ratio=0.001, config=config)
    loss = verl.policy_loss("vanilla", advantage, "token-mean", 0.2, 0.2)
    write("reinforce_pp", "REINFORCE++, arXiv 2501.03262", inputs, [verl.answer(advantage, loss, **COUNT_EPS)])


if __name__ == "__main__":
    main()
