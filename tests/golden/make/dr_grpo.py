"""Dr. GRPO by verl and TRL; the constant length is 3000."""

from tests.golden.make.peers import write
from tests.golden.make.tokens import Trl, Verl, batch


def main() -> None:
    inputs = batch()
    verl = Verl(inputs)
    advantage = verl.advantage("compute_grpo_outcome_advantage", norm_adv_by_std_in_grpo=False)
    loss = verl.policy_loss("vanilla", advantage, "seq-mean-token-sum-norm", 0.2, 0.2, loss_scale_factor=3000)
    trl = Trl(inputs).grpo(advantage[:, 0], "dr_grpo", length=3000)
    write("dr_grpo", "Dr. GRPO, arXiv 2503.20783", inputs, [verl.answer(advantage, loss), trl])


if __name__ == "__main__":
    main()
