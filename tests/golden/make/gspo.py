"""GSPO by verl and TRL."""

from tests.golden.make.peers import write
from tests.golden.make.tokens import COUNT_EPS, Trl, Verl, batch


def main() -> None:
    inputs = batch()
    # The bounds are near 1: most rows must stay within them for their gradient to count.
    inputs["logp"] = [
        [round(a + 0.002 * (b - a), 6) for a, b in zip(*rows, strict=True)]
        for rows in zip(inputs["logp_old"], inputs["logp"], strict=True)
    ]
    verl = Verl(inputs)
    advantage = verl.advantage("compute_grpo_outcome_advantage")
    loss = verl.policy_loss("gspo", advantage, "seq-mean-token-mean", 3e-4, 4e-4)
    trl = Trl(inputs).grpo(advantage[:, 0], "grpo", low=3e-4, high=4e-4, level="sequence")
    write("gspo", "GSPO, arXiv 2507.18071", inputs, [verl.answer(advantage, loss, **COUNT_EPS), trl])


if __name__ == "__main__":
    main()
