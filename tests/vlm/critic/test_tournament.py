import itertools

import pytest

from mmrl.vlm.critic.self_critic import Choice, PairVerdict, choose, judgement_metrics, majority

FIRST, SECOND, SPLIT, MUTE = PairVerdict(1, 2), PairVerdict(2, 1), PairVerdict(1, 1), PairVerdict(None, None)


def judge(best_to_worst, asked=None):
    """A judge that knows the order of the answers, for question n if a list of orders is given."""

    def compare(matches):
        if asked is not None:
            asked.append(len(matches))
        return [FIRST if best_to_worst.index(m.a) < best_to_worst.index(m.b) else SECOND for m in matches]

    return compare


def test_a_verdict_reads_both_orders():
    assert [v.wins for v in (FIRST, SECOND, SPLIT, MUTE, PairVerdict(1, None))] == [1.0, 0.0, 0.5, 0.5, 0.75]
    assert [v.agrees for v in (FIRST, SECOND, SPLIT, MUTE, PairVerdict(1, None))] == [True, True, False, False, False]


@pytest.mark.parametrize("protocol", ["round_robin", "knockout"])
def test_a_consistent_judge_finds_the_best_answer_whatever_the_votes(protocol):
    for order in itertools.permutations(range(4)):
        assert choose([[5, 1, 1, 1]], protocol, judge(order)) == [order[0]]


def test_the_round_robin_is_that_of_all_responses():
    """Weighted wins equal those of every response against every other one, equal ones drawn."""
    votes, wins = [3, 2, 2], {(0, 1): FIRST, (0, 2): SECOND, (1, 2): FIRST}
    responses = [answer for answer, count in enumerate(votes) for _ in range(count)]
    total = [0.0] * 3
    for a, b in itertools.permutations(range(7), 2):
        x, y = responses[a], responses[b]
        won = 0.5 if x == y else wins[x, y].wins if x < y else 1 - wins[y, x].wins
        total[x] += won / votes[x]
    assert total == pytest.approx([3.0, 2.5, 3.5])  # 2 + (3 - 1) / 2, 2 + 1 / 2, 3 + 1 / 2
    assert choose([votes], "round_robin", lambda matches: [wins[m.a, m.b] for m in matches]) == [2]


@pytest.mark.parametrize("protocol", ["round_robin", "knockout"])
@pytest.mark.parametrize("verdict", [SPLIT, MUTE])
def test_an_undecided_judge_is_a_majority_vote(protocol, verdict):
    votes = [[1, 4, 3], [2, 2, 1], [3]]
    assert choose(votes, protocol, lambda matches: [verdict] * len(matches)) == [1, 0, 0]
    assert [majority(own) for own in votes] == [1, 0, 0]


def test_comparisons_are_requested_together_and_as_few_as_the_protocol_needs():
    asked = []
    choose([[1] * 4, [1] * 2, [8]], "round_robin", judge([3, 2, 1, 0], asked))
    assert asked == [7]
    asked.clear()
    assert choose([[1] * 5, [1] * 2, [8]], "knockout", judge([4, 3, 2, 1, 0], asked)) == [4, 1, 0]
    assert asked == [3, 1, 1]
    assert choose([[8]], "round_robin", judge([0], asked)) == [0]
    assert asked == [3, 1, 1], "nothing to compare is not asked"


def test_position_bias_is_measured():
    choices = [
        Choice(0, 0, ["7", "3"], [FIRST]),
        Choice(0, 0, ["7", "3"], [SPLIT]),
        Choice(0, 0, ["7", "3"], [PairVerdict(1, None)]),
        Choice(0, 0, ["7"], []),
    ]
    metrics = judgement_metrics(choices)
    assert metrics["self_critic/different"] == 7 / 4
    assert metrics["self_critic/compared"] == 3 / 4
    assert metrics["self_critic/order_agreement"] == pytest.approx(1 / 3)
    assert metrics["self_critic/first_share"] == 4 / 5
    assert metrics["self_critic/unreadable"] == pytest.approx(1 / 6)
    assert set(judgement_metrics(choices[3:])) == {"self_critic/different", "self_critic/compared"}
    assert judgement_metrics([]) == {}
