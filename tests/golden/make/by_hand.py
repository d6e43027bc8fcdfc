"""Formulas of papers without public code, in plain Python loops over lists of float64 numbers.

Nothing of the suite is used. `token_loss` and its gradient by the log-probabilities are written out as well.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations
from typing import Any

import mpmath

from tests.golden.make.pairs import PAIRS, TOKENS, pairs
from tests.golden.make.peers import Made, numbers
from tests.golden.make.tokens import batch, far, far_reference

BY_HAND = "hand computation"
Numbers = list[float]


def mean(xs: Sequence[float]) -> float:
    return math.fsum(xs) / len(xs)


def deviation(xs: Sequence[float]) -> float:
    return math.sqrt(math.fsum((x - mean(xs)) ** 2 for x in xs) / (len(xs) - 1)) if len(xs) > 1 else 0.0


def standardised(xs: Sequence[float], eps: float = 1e-6) -> Numbers:
    return [(x - mean(xs)) / (deviation(xs) + eps) for x in xs]


def groups(inputs: dict[str, Any]) -> dict[int, list[int]]:
    """Rows of each group."""
    found: dict[int, list[int]] = {}
    for row, group in enumerate(inputs["group"]):
        found.setdefault(group, []).append(row)
    return found


def entropy(answers: Sequence[int]) -> float:
    """Entropy in nats of a list of answers."""
    shares = [answers.count(each) / len(answers) for each in set(answers)]
    return -math.fsum(p * math.log(p) for p in shares)


def spread(inputs: dict[str, Any], rows: Numbers) -> list[Numbers]:
    """The number of a row at each of its tokens."""
    return [[x * m for m in mask] for x, mask in zip(rows, inputs["mask"], strict=True)]


def clipped(low: float, high: float, dual: float = math.inf) -> Callable[[float, float], tuple[float, float]]:
    """Clipped loss of an advantage and a log-ratio, and its derivative by the log-ratio."""

    def loss(a: float, d: float) -> tuple[float, float]:
        ratio = math.exp(d)
        value, slope = -a * ratio, -a * ratio
        bounded = -a * min(max(ratio, 1 - low), 1 + high)
        if bounded > value:
            value, slope = bounded, 0.0
        return (-a * dual, 0.0) if a < 0 and value > -a * dual else (value, slope)

    return loss


def token_loss(inputs: dict[str, Any], rows: Numbers, loss: Callable[[float, float], tuple[float, float]]) -> dict:
    """Advantages, and the mean of the loss over all tokens with its gradient."""
    number = sum(map(sum, inputs["mask"]))
    total, gradient = 0.0, []
    for a, mask, new, old in zip(rows, inputs["mask"], inputs["logp"], inputs["logp_old"], strict=True):
        found = [loss(a, n - o) if m else (0.0, 0.0) for m, n, o in zip(mask, new, old, strict=True)]
        total += math.fsum(value for value, _ in found) / number
        gradient.append([slope / number for _, slope in found])
    return {"advantage": spread(inputs, rows), "loss": total, "gradient": gradient}


def by_hand(calls: str, script: str = "by_hand", **answer: Any) -> dict[str, Any]:
    """The recorded entry of a computation, and the script that makes it."""
    how = f"evaluated in float64 by tests/golden/make/{script}.py, in plain Python without the suite"
    return {"program": BY_HAND, "calls": [calls, how], "relative": 1e-12} | answer


BETA = 0.1


def direct_advantage() -> Made:
    """The regression of direct advantage policy optimisation by its formula, in Python's floats."""
    inputs, loss, gradient = pairs(), 0.0, []
    columns = (inputs[key] for key in ("logp", "logp_ref", "mask", "score"))
    for new, reference, mask, advantage in zip(*columns, strict=True):
        ratio = sum(n - f for n, f, real in zip(new, reference, mask, strict=True) if real)
        loss += 0.5 * (BETA * ratio - advantage) ** 2 / len(inputs["score"])
        slope = BETA * (BETA * ratio - advantage) / len(inputs["score"])
        gradient.append([slope * real for real in mask])
    peer = by_hand("0.5 (beta log-ratio - A)^2", options={}, loss=loss, gradient=gradient)
    return "Direct Advantage Policy Optimization, arXiv 2412.18279", inputs, [peer]


ETA = 0.0075

TAU = ETA / 3


def inpo() -> Made:
    """INPO, equation 8 of the paper, in Python's floats: no public code of its authors was found."""
    inputs = pairs() | {"logp_previous": numbers(26, 2 * PAIRS, TOKENS, low=-3.0, high=0.0)}

    def total(key: str, row: int) -> float:
        return sum(value for value, real in zip(inputs[key][row], inputs["mask"][row], strict=True) if real)

    loss, slopes = 0.0, [0.0] * (2 * PAIRS)
    for one in range(PAIRS):
        two = one + PAIRS
        policy, reference, previous = (
            total(key, one) - total(key, two) for key in ("logp", "logp_ref", "logp_previous")
        )
        h = policy - TAU / ETA * reference - (ETA - TAU) / ETA * previous
        loss += (h - 1 / (2 * ETA)) ** 2 / PAIRS
        slopes[one] = 2 * (h - 1 / (2 * ETA)) / PAIRS
        slopes[two] = -slopes[one]
    gradient = [[slope * real for real in row] for slope, row in zip(slopes, inputs["mask"], strict=True)]
    peer = by_hand("equation 8", options={}, loss=loss, gradient=gradient)
    return "INPO, arXiv 2407.00617", inputs, [peer]


def aspo_tir() -> Made:
    """ASPO by the formulas of Understanding Tool-Integrated Reasoning, which has no public code of it."""
    rewards = [1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0]
    inputs = batch() | {"reward": rewards, "extras": {"code_start": [4, 1, -1, 0, 0, 1, 1, 3, 2, 0, 1, -1]}}
    found = [0.0] * 12
    for rows in groups(inputs).values():
        for i, a in zip(rows, standardised([rewards[i] for i in rows]), strict=True):
            found[i] = a
        start = {i: inputs["extras"]["code_start"][i] for i in rows}
        coded = [i for i in rows if rewards[i] == 1.0 and start[i] >= 0]
        length = mean([sum(inputs["mask"][i]) for i in coded])
        for i in coded:
            bonus = -2.0 * (start[i] - mean([start[j] for j in coded])) / length
            found[i] += min(max(bonus, -0.7 * abs(found[i])), 0.7 * abs(found[i]))
    answer = token_loss(inputs, found, clipped(0.2, 0.28))
    return "ASPO, arXiv 2508.19201", inputs, [by_hand("section 3, equation 2, of the paper", **answer)]


def variance(xs: tuple[float, ...]) -> float:
    return mean([(x - mean(xs)) ** 2 for x in xs])


def d3s() -> Made:
    """D3S by the formulas of its paper: the subset of largest variance of all, and the best decisions."""
    # no subset but one has the largest variance
    rewards = [1.0, 0.0, 0.1, 0.7, 0.3, 0.2, 0.9, 0.75, 0.0, 1.0, 0.95, 0.25]
    inputs = batch() | {"reward": rewards, "entropy_old": numbers(8, 12, 6, low=0.1, high=2.0)}
    # a group of twelve, after an earlier step; the decisions of highest entropy have ratios below the lower bound
    high = [[2.0 if place == 2 else x for place, x in enumerate(row)] for row in inputs["entropy_old"]]
    other = far(inputs) | {"group": [0] * 12, "entropy_old": high, "before": [rewards]}
    peers = [of_best(inputs, 2), {"inputs": other} | of_best(inputs | other, 6)]
    return "D3S, arXiv 2509.22115", inputs, peers


def of_best(inputs: dict[str, Any], size: int) -> dict[str, Any]:
    """Advantages, and the loss of the best decisions of `size` rows of each group."""
    rewards = inputs["reward"]
    mask, entropy, found, kept = inputs["mask"], inputs["entropy_old"], [0.0] * 12, set()
    for rows in groups(inputs).values():
        for i, a in zip(rows, standardised([rewards[i] for i in rows]), strict=True):
            found[i] = a
        kept |= set(max(combinations(rows, size), key=lambda pair: variance(tuple(found[i] for i in pair))))
    places = [(i, t) for i in sorted(kept) for t in range(6) if mask[i][t]]
    score = {(i, t): abs(found[i]) * entropy[i][t] for i, t in places}
    # a fifth of the decisions, as the quantile that interpolates linearly has it
    best = sorted(places, key=score.__getitem__)[int(0.8 * (len(places) - 1)) + 1 :]
    chosen = [[float((i, t) in best) for t in range(6)] for i in range(12)]
    answer = token_loss(inputs | {"mask": chosen}, found, clipped(0.2, 0.28))
    return by_hand("section 3 of the paper", **answer)


def centred(inputs: dict) -> list[float]:
    """Rewards minus the mean of their group."""
    found = [0.0] * 12
    for rows in groups(inputs).values():
        for i in rows:
            found[i] = inputs["reward"][i] - mean([inputs["reward"][j] for j in rows])
    return found


def selfplay_winrate() -> Made:
    """SPO's objective: a clipped loss on win rates minus their mean, the win rates being the rewards."""
    thirds = [1.0, 0.0, 1 / 3, 2 / 3, 0.5, 0.5, 0.5, 0.5, 0.0, 5 / 6, 5 / 6, 1 / 3]
    inputs = batch() | {"reward": thirds}
    answer = token_loss(inputs, centred(inputs), clipped(0.2, 0.2))
    return "SPO, arXiv 2401.04056", inputs, [by_hand("algorithm 1 of the paper", **answer)]


def demo_regularised() -> Made:
    """Demonstration-regularised RL: a clipped loss and 0.05 times the divergence k3 from the cloned policy."""
    inputs, peers = batch(), []
    for changed in ({}, far_reference(inputs)):
        given = inputs | changed
        answer = token_loss(given, centred(given), clipped(0.2, 0.2))
        number = sum(map(sum, given["mask"]))
        for i, mask in enumerate(given["mask"]):
            for t, trained in enumerate(mask):
                d = given["logp_ref"][i][t] - given["logp"][i][t]
                answer["loss"] += 0.05 * trained * (math.exp(d) - d - 1) / number
                answer["gradient"][i][t] += 0.05 * trained * (1 - math.exp(d)) / number
        peer = by_hand("section 3 of the paper", **answer)
        peers.append(({"inputs": changed} if changed else {}) | peer)
    return "Demonstration-regularised RL, arXiv 2310.17303", inputs, peers


def fapo() -> Made:
    """FAPO's objective: DAPO's loss with a dual clip of 10, on the rewards 1, 0 (flawed) and -1."""
    inputs = batch() | {"reward": [1.0, 0.0, -1.0, -1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.0, -1.0]}
    inputs["logp"][9][0] = inputs["logp_old"][9][0] + 2.5
    inputs["logp"][11][1] = inputs["logp_old"][11][1] + 2.5
    found = [0.0] * 12
    for rows in groups(inputs).values():
        for i, a in zip(rows, standardised([inputs["reward"][i] for i in rows]), strict=True):
            found[i] = a
    answer = token_loss(inputs, found, clipped(0.2, 0.28, 10.0))
    return "FAPO, arXiv 2510.22543", inputs, [by_hand("section 4 of the paper", **answer)]


BETA, COEF = 0.1, 0.01


def gepo() -> Made:
    """GRPO with the group preference of OORL by the formula of its paper."""
    inputs = batch()
    rewards, mask, surrogate = inputs["reward"], inputs["mask"], clipped(0.2, 0.2)
    scores = [
        BETA * math.fsum((n - f) * m for n, f, m in zip(new, ref, row, strict=True))
        for new, ref, row in zip(inputs["logp"], inputs["logp_ref"], mask, strict=True)
    ]
    total, slopes, rows = 0.0, [0.0] * 12, [0.0] * 12
    for members in groups(inputs).values():
        level = mean([rewards[i] for i in members])
        for i, a in zip(members, standardised([rewards[i] for i in members]), strict=True):
            rows[i] = a
        good, bad = ([i for i in members if sign * (rewards[i] - level) > 0] for sign in (1, -1))
        if not good or not bad:
            continue
        best, worst = mean([scores[i] for i in good]), mean([scores[i] for i in bad])
        wrong = 1 / (1 + math.exp(best - worst))
        share = COEF * len(members) / 12
        total += share * (math.log1p(math.exp(worst - best)) + mean([(scores[i] - best) ** 2 for i in good]))
        for i in good:
            slopes[i] += share * BETA * (2 * (scores[i] - best) - wrong) / len(good)
        for i in bad:
            slopes[i] += share * BETA * wrong / len(bad)
    gradient = spread(inputs, slopes)
    for i, row in enumerate(mask):
        for t, real in enumerate(row):
            if real:
                value, slope = surrogate(rows[i], inputs["logp"][i][t] - inputs["logp_old"][i][t])
                total += value / sum(row) / 12
                gradient[i][t] += slope / sum(row) / 12
    answer = {"advantage": spread(inputs, rows), "loss": total, "gradient": gradient}
    return "GEPO in OORL, arXiv 2505.12723", inputs, [by_hand("the paper's formula", **answer)]


def p3o_joint() -> Made:
    """P3O with joint clipping by the formula of its paper, for all pairs of a group in both orders."""
    inputs = batch()
    rewards, mask = inputs["reward"], inputs["mask"]
    sums = [
        math.fsum((n - o) * m for n, o, m in zip(new, old, row, strict=True))
        for new, old, row in zip(inputs["logp"], inputs["logp_old"], mask, strict=True)
    ]
    total, slopes, rows = 0.0, [0.0] * 12, [0.0] * 12
    for members in groups(inputs).values():
        for i in members:
            rows[i] = rewards[i] - mean([rewards[j] for j in members])
            for j in members:
                a, ratio = (rewards[i] - rewards[j]) / 2, math.exp(sums[i] - sums[j])
                bounded = min(max(ratio, 0.8), 1.2)
                weight = 0.0 if i == j else 1 / (len(members) - 1) / 12
                total += weight * max(-a * ratio, -a * bounded)
                if -a * ratio >= -a * bounded:
                    slopes[i] -= weight * a * ratio
                    slopes[j] += weight * a * ratio
    answer = {"advantage": spread(inputs, rows), "loss": total, "gradient": spread(inputs, slopes)}
    return "P3O, arXiv 2310.00212", inputs, [by_hand("section 4 of the paper", **answer)]


def p3o_separate() -> Made:
    """P3O with separate clipping by the formula of its paper: groups of two answers."""
    inputs = batch() | {"group": [row // 2 for row in range(12)]}
    total, rows, slopes = 0.0, [0.0] * 12, [0.0] * 12
    for pair in groups(inputs).values():
        for i, j in (pair, pair[::-1]):
            rows[i] = (inputs["reward"][i] - inputs["reward"][j]) / 2
            found = zip(inputs["logp"][i], inputs["logp_old"][i], inputs["mask"][i], strict=True)
            value, slope = clipped(0.2, 0.2)(rows[i], math.fsum((n - o) * m for n, o, m in found))
            total, slopes[i] = total + value / 12, slope / 12
    answer = {"advantage": spread(inputs, rows), "loss": total, "gradient": spread(inputs, slopes)}
    return "P3O, arXiv 2310.00212", inputs, [by_hand("section 4 of the paper", **answer)]


def seed_grpo() -> Made:
    """SEED-GRPO by the formulas of its paper: its repository holds a text only."""
    inputs = batch() | {"extras": {"answer": [0, 1, 2, 0, 0, 0, 0, 0, 3, 1, 1, 0]}}
    answer, peers = inputs["extras"]["answer"], []
    # the length-normalised likelihood of each row
    likely = [
        math.exp(math.fsum(x * m for x, m in zip(logp, mask, strict=True)) / sum(mask))
        for logp, mask in zip(inputs["logp_old"], inputs["mask"], strict=True)
    ]
    for alpha, weights, estimate in ((0.5, [1.0] * 12, "counts"), (1.0, [1.0] * 12, "counts"), (0.5, likely, "")):
        found = [0.0] * 12
        for rows in groups(inputs).values():
            total, reward = sum(weights[i] for i in rows), [inputs["reward"][i] for i in rows]
            share = [sum(weights[i] for i in rows if answer[i] == a) / total for a in {answer[i] for i in rows}]
            scale = 1 + alpha * math.fsum(p * math.log(p) for p in share) / math.log(len(rows))
            for i, r in zip(rows, reward, strict=True):
                found[i] = scale * (r - mean(reward))
        changes = {"advantage": {"alpha": alpha, "estimate": estimate}} if estimate else {}
        loss = token_loss(inputs, found, clipped(0.2, 0.2))
        peers.append(by_hand("section 3 of the paper", changes=changes, **loss))
    return "SEED-GRPO, arXiv 2505.12346", inputs, peers


GAMMA, LAMBDA = 1.0, 0.95


def tppo() -> Made:
    """EGAE of T-PPO: lambda-weighted sums of temporal differences, where a truncated answer keeps its last value."""
    inputs = batch()
    truncated = [0, 1, 1, 0, 0, 1, 0, 0, 1, 0, 1, 0]
    inputs["reward"] = [0.0 if cut else r for r, cut in zip(inputs["reward"], truncated, strict=True)]
    inputs["extras"] = {"truncated": truncated}
    advantage, returns, total, gradient = [], [], 0.0, []
    number, loss = sum(map(sum, inputs["mask"])), clipped(0.2, 0.2)
    for row, mask in enumerate(inputs["mask"]):
        length, values = int(sum(mask)), inputs["values"][row]
        after = [*values[1:length], values[length - 1] if truncated[row] else 0.0]
        rewards = [0.0] * (length - 1) + [inputs["reward"][row]]
        delta = [r + GAMMA * v - values[t] for t, (r, v) in enumerate(zip(rewards, after, strict=True))]
        found = [math.fsum((GAMMA * LAMBDA) ** (s - t) * delta[s] for s in range(t, length)) for t in range(length)]
        padding = [0.0] * (6 - length)
        advantage.append(found + padding)
        returns.append([a + v for a, v in zip(found, values, strict=False)] + padding)
        pairs = [loss(a, inputs["logp"][row][t] - inputs["logp_old"][row][t]) for t, a in enumerate(found)]
        gradient.append([slope / number for _, slope in pairs] + padding)
        total += math.fsum(value for value, _ in pairs) / number
        for t, target in enumerate(returns[-1][:length]):
            new = inputs["values_new"][row][t]
            near = values[t] + min(max(new - values[t], -0.2), 0.2)
            total += 0.1 * 0.5 * max((new - target) ** 2, (near - target) ** 2) / number
    answer = {"advantage": advantage, "returns": returns, "loss": total, "gradient": gradient}
    return "T-PPO, arXiv 2506.15050", inputs, [by_hand("EGAE of the paper's section 3", **answer)]


def reg_grpo() -> Made:
    """Regressive GRPO by section 3.2 of its paper and the k3 estimator; slopes are differences at 40 digits."""
    inputs, peers = batch(), []
    for changed in ({}, far_reference(inputs)):
        given = inputs | changed
        rows = [0.0] * 12
        for own in groups(given).values():
            for i, a in zip(own, standardised([given["reward"][i] for i in own], 1e-4), strict=True):
                rows[i] = a
        answer = {"advantage": spread(given, rows)} | with_slopes(partial(regression, given, rows), given)
        calls = "section 3.2 of the paper, with deviations as in TRL, and 0.1 k3"
        peers.append(({"inputs": changed} if changed else {}) | by_hand(calls, **answer))
    return "DeepVideo-R1, arXiv 2506.07464", inputs, peers


def with_slopes(function: Callable[[list[list[Any]]], Any], inputs: dict[str, Any]) -> dict[str, Any]:
    """A loss of log-probabilities, and its derivative by each trained one: the difference of both sides."""
    with mpmath.workdps(40):
        at, width = [[mpmath.mpf(x) for x in row] for row in inputs["logp"]], mpmath.mpf("1e-15")
        answer: dict[str, Any] = {"loss": float(function(at)), "gradient": [[0.0] * len(row) for row in at]}
        for i, t in ((i, t) for i, mask in enumerate(inputs["mask"]) for t, trained in enumerate(mask) if trained):
            middle, sides = at[i][t], []
            for move in (width, -width):
                at[i][t] = middle + move
                sides.append(function(at))
            at[i][t] = middle
            answer["gradient"][i][t] = float((sides[0] - sides[1]) / (2 * width))
    return answer


def regression(inputs: dict[str, Any], rows: Numbers, new: list[list[Any]]) -> Any:
    """Mean over answers of (A - (rho - mean rho) / (std rho + eps))^2 and of 0.1 k3, rho the log-ratio of an answer."""
    mask, total = inputs["mask"], mpmath.mpf(0)
    rho = [
        sum((n - o) for n, o, m in zip(*row, strict=True) if m)
        for row in zip(new, inputs["logp_old"], mask, strict=True)
    ]
    for own in groups(inputs).values():
        centre = sum(rho[i] for i in own) / len(own)
        deviation = mpmath.sqrt(sum((rho[i] - centre) ** 2 for i in own) / (len(own) - 1))
        total += sum((rows[i] - (rho[i] - centre) / (deviation + mpmath.mpf(1e-4))) ** 2 for i in own) / 12
    for row in zip(inputs["logp_ref"], new, mask, strict=True):
        apart = [f - n for f, n, m in zip(*row, strict=True) if m]
        total += mpmath.mpf(0.1) * sum(mpmath.exp(d) - d - 1 for d in apart) / len(apart) / 12
    return total


ROWS = {
    row.__name__: row
    for row in (
        *(direct_advantage, inpo, aspo_tir, d3s, selfplay_winrate, demo_regularised),
        *(fapo, gepo, p3o_joint, p3o_separate, seed_grpo, tppo, reg_grpo),
    )
}
"""Golden files that are computed here."""
