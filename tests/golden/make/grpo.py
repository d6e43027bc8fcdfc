"""GRPO by verl and TRL."""

from tests.golden.make.peers import write
from tests.golden.make.tokens import COUNT_EPS, Trl, Verl, batch


def main() -> None:
    inputs = batch()
    verl = Verl(inputs)
    advantage = verl.advantage("compute_grpo_outcome_advantage")
    loss = verl.policy_loss("vanilla", advantage, "seq-mean-token-mean", 0.2, 0.2)
    loss = loss + 0.04 * verl.kl_loss("k3", "seq-mean-token-mean")
    trl = Trl(inputs).grpo(advantage[:, 0], "grpo", beta=0.04)
    write("grpo", "GRPO, arXiv 2402.03300", inputs, [verl.answer(advantage, loss, **COUNT_EPS), trl])


if __name__ == "__main__":
    main()
