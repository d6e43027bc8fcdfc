"""D3S by the formulas of its paper: the subset of largest variance by trying all of them, and the best decisions."""

from itertools import combinations

from tests.golden.make.by_hand import by_hand, clipped, groups, mean, spread, standardised, token_loss
from tests.golden.make.peers import numbers, write
from tests.golden.make.tokens import batch


def variance(xs: tuple[float, ...]) -> float:
    return mean([(x - mean(xs)) ** 2 for x in xs])


def main() -> None:
    # no subset but one has the largest variance
    rewards = [1.0, 0.0, 0.1, 0.7, 0.3, 0.2, 0.9, 0.75, 0.0, 1.0, 0.95, 0.25]
    inputs = batch() | {"reward": rewards, "entropy_old": numbers(8, 12, 6, low=0.1, high=2.0)}
    mask, entropy, found, kept = inputs["mask"], inputs["entropy_old"], [0.0] * 12, set()
    for rows in groups(inputs).values():
        for i, a in zip(rows, standardised([rewards[i] for i in rows]), strict=True):
            found[i] = a
        kept |= set(max(combinations(rows, 2), key=lambda pair: variance(tuple(found[i] for i in pair))))
    places = [(i, t) for i in sorted(kept) for t in range(6) if mask[i][t]]
    score = {(i, t): abs(found[i]) * entropy[i][t] for i, t in places}
    # a fifth of the decisions, as the quantile that interpolates linearly has it
    best = sorted(places, key=score.__getitem__)[int(0.8 * (len(places) - 1)) + 1 :]
    chosen = [[float((i, t) in best) for t in range(6)] for i in range(12)]
    answer = token_loss(inputs | {"mask": chosen}, found, clipped(0.2, 0.28))
    answer["advantage"] = spread(inputs, found)
    write("d3s", "D3S, arXiv 2509.22115", inputs, [by_hand("section 3 of the paper", **answer)])


if __name__ == "__main__":
    main()
