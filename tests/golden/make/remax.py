"""ReMax by verl."""

from tests.golden.make.peers import write
from tests.golden.make.tokens import Verl, batch


def main() -> None:
    inputs = batch()
    greedy = [0.2] * 4 + [0.5] * 4 + [1.0] * 4
    verl = Verl(inputs)
    given = {"token_level_rewards": verl.token_rewards(), "response_mask": verl.b.mask}
    found = verl._call("compute_remax_outcome_advantage", reward_baselines=verl.b.mask.new_tensor(greedy), **given)
    advantage = found[0] * verl.b.mask
    loss = verl.policy_loss("gpg", advantage, "seq-mean-token-sum")
    inputs["extras"] = {"greedy_reward": greedy}
    write("remax", "ReMax, arXiv 2310.10505", inputs, [verl.answer(advantage, loss)])


if __name__ == "__main__":
    main()
