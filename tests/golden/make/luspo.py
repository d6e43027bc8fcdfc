"""LUSPO by TRL."""

from tests.golden.make.peers import write
from tests.golden.make.tokens import Trl, Verl, batch


def main() -> None:
    inputs = batch()
    # The bounds are near 1: most rows must stay within them for their gradient to count.
    inputs["logp"] = [
        [round(a + 0.002 * (b - a), 6) for a, b in zip(*rows, strict=True)]
        for rows in zip(inputs["logp_old"], inputs["logp"], strict=True)
    ]
    advantage = Verl(inputs).advantage("compute_grpo_outcome_advantage")
    trl = Trl(inputs).grpo(advantage[:, 0], "luspo", low=3e-4, high=4e-4, level="sequence")
    write("luspo", "LUSPO, arXiv 2602.05261", inputs, [trl])


if __name__ == "__main__":
    main()
