"""Pass@k by verl."""

from tests.golden.make.peers import write
from tests.golden.make.tokens import Verl, batch


def main() -> None:
    inputs = batch()
    inputs["reward"][10] = 0.9  # with two best rows of a question, none has a lead
    verl = Verl(inputs)
    advantage = verl.advantage("compute_grpo_passk_outcome_advantage", config={})
    loss = verl.policy_loss("vanilla", advantage, "token-mean")
    write("pass_at_k", "Pass@k policy optimisation, arXiv 2503.19595", inputs, [verl.answer(advantage, loss)])


if __name__ == "__main__":
    main()
