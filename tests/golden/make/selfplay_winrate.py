"""SPO's objective: a clipped loss on win rates minus their mean, the win rates being the rewards."""

from tests.golden.make.by_hand import by_hand, clipped, groups, mean, token_loss
from tests.golden.make.peers import write
from tests.golden.make.tokens import batch


def centred(inputs: dict) -> list[float]:
    """Rewards minus the mean of their group."""
    found = [0.0] * 12
    for rows in groups(inputs).values():
        for i in rows:
            found[i] = inputs["reward"][i] - mean([inputs["reward"][j] for j in rows])
    return found


def main() -> None:
    thirds = [1.0, 0.0, 1 / 3, 2 / 3, 0.5, 0.5, 0.5, 0.5, 0.0, 5 / 6, 5 / 6, 1 / 3]
    inputs = batch() | {"reward": thirds}
    answer = token_loss(inputs, centred(inputs), clipped(0.2, 0.2))
    write("selfplay_winrate", "SPO, arXiv 2401.04056", inputs, [by_hand("algorithm 1 of the paper", **answer)])


if __name__ == "__main__":
    main()
