"""Off-policy sequence masking by TRL, with a threshold that some rows exceed."""

from tests.golden.make.icepop import rollout_logps
from tests.golden.make.peers import write
from tests.golden.make.tokens import Trl, Verl, batch


def main() -> None:
    inputs = batch()
    inputs["logp_rollout"] = rollout_logps(inputs["logp_old"])
    verl = Verl(inputs)
    advantage = verl.advantage("compute_grpo_outcome_advantage", norm_adv_by_std_in_grpo=False)
    peers = [
        Trl(inputs).grpo(advantage[:, 0], "grpo", threshold=limit) | {"changes": {"gate": {"limit": limit}}}
        for limit in (0.5, 0.05)
    ]
    write("off_policy_mask", "DeepSeek-V3.2, arXiv 2512.02556", inputs, peers)


if __name__ == "__main__":
    main()
