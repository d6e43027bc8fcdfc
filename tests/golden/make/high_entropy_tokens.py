"""DAPO on the tokens of the highest entropy, by TRL."""

from tests.golden.make.peers import numbers, write
from tests.golden.make.tokens import Trl, Verl, batch


def main() -> None:
    inputs = batch() | {"entropy_old": numbers(11, 12, 6, low=0.0, high=2.0)}
    advantage = Verl(inputs).advantage("compute_grpo_outcome_advantage")
    peers = [
        Trl(inputs).grpo(advantage[:, 0], "dapo", high=high, top_entropy=share)
        | {"changes": {"clip": {"high": high}, "weight": {"share": share}}}
        for high, share in ((0.28, 0.2), (0.05, 0.45))
    ]
    write("high_entropy_tokens", "Beyond the 80/20 Rule, arXiv 2506.01939", inputs, peers)


if __name__ == "__main__":
    main()
