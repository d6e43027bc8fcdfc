"""GMPO by verl and TRL."""

from tests.golden.make.peers import write
from tests.golden.make.tokens import COUNT_EPS, Trl, Verl, batch


def main() -> None:
    from trl.experimental.gmpo import GMPOTrainer

    inputs = batch()
    verl = Verl(inputs)
    advantage = verl.advantage("compute_grpo_outcome_advantage")
    loss = verl.policy_loss("geo_mean", advantage, "unused", 0.4, 0.4)
    trl = Trl(inputs).grpo(advantage[:, 0], "grpo", low=0.4, high=0.4, kind=GMPOTrainer)
    write(
        "gmpo", "GMPO, arXiv 2507.20673", inputs, [verl.answer(advantage, loss, **COUNT_EPS | {"relative": 3e-8}), trl]
    )


if __name__ == "__main__":
    main()
