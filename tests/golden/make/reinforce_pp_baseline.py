"""REINFORCE++ with the group mean as baseline, by verl."""

from tests.golden.make.peers import write
from tests.golden.make.tokens import COUNT_EPS, Verl, batch


def main() -> None:
    inputs = batch()
    verl = Verl(inputs)
    advantage = verl.advantage("compute_reinforce_plus_plus_baseline_outcome_advantage")
    loss = verl.policy_loss("vanilla", advantage, "token-mean", 0.2, 0.2) + 0.001 * verl.kl_loss("k2", "token-mean")
    citation = "REINFORCE++-baseline, arXiv 2501.03262"
    write("reinforce_pp_baseline", citation, inputs, [verl.answer(advantage, loss, **COUNT_EPS)])


if __name__ == "__main__":
    main()
