import pytest
import torch

from mmrl.core import Objective, Rollouts, decision_rewards, gae, masked_whiten, returns_to_go, turn_means, turn_starts
from mmrl.core.blocks import all_kinds
from mmrl.core.blocks.advantage import AdvantageScaling
from mmrl.core.catalogue import all_objectives
from mmrl.core.rollouts import SAMPLED
from mmrl.training.objectives import check_group_size
from tests.core.builders import random_rollouts

GROUP_CONSTANT = ("group_mean_std", "group_mean", "leave_one_out")


def rows(reward, group=None, mask=None, dtype=torch.float64):
    reward = torch.tensor(reward, dtype=dtype)
    group = torch.zeros(len(reward), dtype=torch.int64) if group is None else torch.tensor(group)
    mask = torch.ones(len(reward), 2, dtype=dtype) if mask is None else torch.tensor(mask, dtype=dtype)
    return Rollouts(group=group, mask=mask, logp_old=torch.zeros_like(mask), reward=reward)


def estimate(name, rollouts, **options):
    return all_kinds("advantage")[name](**options)(rollouts)


def test_group_mean_std_by_hand():
    # Rewards 1, 0, 0, 1: mean 1/2; squared deviations sum to 1, so the unbiased variance is 1/3.
    advantage = estimate("group_mean_std", rows([1, 0, 0, 1]), eps=0.0)
    assert advantage[:, 0].tolist() == pytest.approx([0.5 * 3**0.5, -0.5 * 3**0.5, -0.5 * 3**0.5, 0.5 * 3**0.5])
    # The population variance is 1/4, so the advantages are +-1.
    assert estimate("group_mean_std", rows([1, 0, 0, 1]), eps=0.0, ddof=0)[:, 1].tolist() == [1, -1, -1, 1]


def test_group_mean_global_std_by_hand():
    # Groups 1, 3 and 0, 8: deviations +-1 and +-4 from their means; all four have mean 3 and variance 38/4.
    advantage = estimate("group_mean_global_std", rows([1, 3, 0, 8], group=[0, 0, 1, 1]), eps=0.0)
    expected = [x / 9.5**0.5 for x in (-1, 1, -4, 4)]
    assert advantage[:, 1].tolist() == pytest.approx(expected)
    # eps is added to the deviation.
    shrunk = estimate("group_mean_global_std", rows([1, 3, 0, 8], group=[0, 0, 1, 1]), eps=9.5**0.5)
    assert shrunk[:, 0].tolist() == pytest.approx([x / 2 for x in expected])


def test_group_mean_global_std_keeps_the_proportions_between_groups():
    r = random_rollouts(groups=5, samples=4)
    scaled = estimate("group_mean", r) / r.reward.std(correction=0)
    torch.testing.assert_close(estimate("group_mean_global_std", r, eps=0.0), scaled)
    moved = r.replace(reward=3.0 * r.reward + 7.0)
    torch.testing.assert_close(estimate("group_mean_global_std", moved, eps=0.0), scaled)


def test_group_mean_global_std_of_equal_rewards_is_exactly_zero():
    assert (estimate("group_mean_global_std", rows([0.1] * 3), eps=0.0) == 0).all()
    mixed = estimate("group_mean_global_std", rows([0.1] * 3 + [0.7] * 7, group=[0] * 3 + [1] * 7), eps=0.0)
    assert (mixed == 0).all()


def test_group_outcome_std_by_hand():
    # Success alone: mean 1/4, std 1/2 (ddof 1), so 1.5 and -0.5; failures 0.2, 0.5, 0.2 deviate by -0.1, 0.2, -0.1.
    advantage = estimate("group_outcome_std", rows([1, 0.2, 0.5, 0.2]), eps=0.0)[:, 0].tolist()
    assert advantage == pytest.approx([1.5, (-0.25 - 0.1) / 0.5, (-0.25 + 0.2) / 0.5, (-0.25 - 0.1) / 0.5])
    # All fail: the deviation of one success among four, 1/2, stands in; 0.1 and 0.3 deviate by 0.1 from their mean.
    failed = estimate("group_outcome_std", rows([0.1, 0.3, 0.1, 0.3]), eps=0.0)[:, 1].tolist()
    assert failed == pytest.approx([-0.2, 0.2, -0.2, 0.2])
    # With ddof 0 that deviation is sqrt(3) / 4.
    wide = estimate("group_outcome_std", rows([0.1, 0.3, 0.1, 0.3]), eps=0.0, ddof=0)[:, 0].tolist()
    assert wide == pytest.approx([x * 2 / 3**0.5 for x in failed])


def test_group_outcome_std_keeps_the_weight_of_a_lone_success():
    reward = [1.0, *torch.linspace(0.02, 0.6, 15, dtype=torch.float64).tolist()]
    alone = estimate("group_mean_std", rows([1.0] + [0.0] * 15), eps=0.0)[:, 0]
    assert alone[0] == pytest.approx(3.75)
    assert estimate("group_mean_std", rows(reward), eps=0.0)[0, 0] < 2.7
    kept = estimate("group_outcome_std", rows(reward), eps=0.0)[:, 0]
    assert kept[0] == pytest.approx(3.75)
    assert kept.sum() == pytest.approx(0, abs=1e-12)
    assert kept[1:].tolist() == sorted(kept[1:].tolist())


def test_group_outcome_std_of_outcomes_alone_is_group_mean_std():
    rewards, group = [1.0, 0, 0, 1, 0, 1, 1, 0, 0, 0], [0] * 4 + [1] * 6
    usual = estimate("group_mean_std", rows(rewards, group=group))
    torch.testing.assert_close(estimate("group_outcome_std", rows(rewards, group=group)), usual)
    # with another bound for success
    halved = rows([x / 2 for x in rewards], group=group)
    torch.testing.assert_close(estimate("group_outcome_std", halved, solved=0.5), usual)


def test_leave_one_out_by_hand():
    # 3 against the mean of 1 and 2, and so on.
    assert estimate("leave_one_out", rows([3, 1, 2]))[:, 0].tolist() == [1.5, -1.5, 0.0]


def test_returns_to_go_by_hand():
    rewards, mask = torch.tensor([[1.0, 2.0, 9.0, 4.0]]), torch.tensor([[1.0, 1.0, 0.0, 1.0]])
    # The decision with mask 0 costs no discount and its reward is ignored.
    assert returns_to_go(rewards, mask, 0.5).tolist() == [[1 + 0.5 * (2 + 0.5 * 4), 2 + 0.5 * 4, 0, 4]]
    assert returns_to_go(rewards, mask, 0.5, "reset").tolist() == [[1 + 0.5 * 2, 2, 0, 4]]


def test_gae_by_hand():
    rewards, values = torch.tensor([[0.0, 0.0, 7.0, 1.0]]), torch.tensor([[0.5, 0.25, 100.0, 0.75]])
    mask = torch.tensor([[1.0, 1.0, 0.0, 1.0]])
    advantages, returns = gae(rewards, values, mask, gamma=1.0, lam=0.5)
    # Last: 1 - 0.75. Second: the tool column with value 100 is skipped, 0.75 - 0.25 + 0.5 * 0.25.
    assert advantages.tolist() == [[0.25 - 0.5 + 0.5 * 0.625, 0.625, 0.0, 0.25]]
    assert returns.tolist() == [[0.0625 + 0.5, 0.875, 0.0, 1.0]]


def test_gae_with_lambda_one_is_return_minus_value():
    r = random_rollouts()
    rewards = decision_rewards(r)
    advantages, returns = gae(rewards, r.values, r.mask, 0.9, 1.0)
    torch.testing.assert_close(returns, returns_to_go(rewards, r.mask, 0.9))
    torch.testing.assert_close(advantages, (returns - r.values) * r.mask)


def test_turn_gae_with_one_decision_a_turn_is_token_gae():
    r = random_rollouts()
    r = r.replace(turn=torch.where(r.mask > 0, torch.arange(r.num_decisions)[None], -1))
    options = {"gamma": 0.9, "lam": 0.7}
    torch.testing.assert_close(estimate("gae_turn", r, **options), estimate("gae", r, **options))


def test_turn_gae_by_hand():
    r = Rollouts(
        group=torch.zeros(1, dtype=torch.int64),
        mask=torch.tensor([[1.0, 1.0, 0.0, 1.0, 1.0]]),
        logp_old=torch.zeros(1, 5),
        reward=torch.tensor([2.0]),
        values=torch.tensor([[1.0, 50.0, 60.0, 0.5, 70.0]]),
        turn=torch.tensor([[0, 0, 0, 1, 1]]),
    )
    assert turn_starts(r).tolist() == [[True, False, False, True, False]]
    # Turn 1: 2 - 0.5. Turn 0: 0.5 * 0.5 - 1 + 0.5 * 1 * 1.5; values inside a turn are not looked at.
    first, second = 0.25 - 1 + 0.75, 1.5
    assert estimate("gae_turn", r, gamma=0.5, lam=1.0).tolist() == [[first, first, 0.0, second, second]]


def test_rewards_of_decisions_replace_the_reward_of_the_row():
    r = random_rollouts()
    given = torch.arange(r.mask.numel(), dtype=torch.float64).reshape(r.mask.shape)
    r = r.replace(extras={"decision_reward": given})
    assert torch.equal(decision_rewards(r), given * r.mask)


def test_terminal_reward_lands_on_the_last_trained_decision():
    r = rows([5.0, 7.0], mask=[[1, 0, 1, 0], [0, 0, 0, 0]])
    assert decision_rewards(r).tolist() == [[0, 0, 5, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize("name", GROUP_CONSTANT)
def test_equal_rewards_give_exactly_zero(name):
    # 0.1 + 0.1 + 0.1 is not 0.3 in binary, so a mean that is rounded would not cancel.
    options = {"eps": 0.0} if "eps" in all_kinds("advantage")[name].options() else {}
    advantage = estimate(name, rows([0.1] * 3 + [0.7] * 7, group=[0] * 3 + [1] * 7), **options)
    assert (advantage == 0).all()


@pytest.mark.parametrize("name", GROUP_CONSTANT)
def test_shifting_the_rewards_of_a_group_changes_nothing(name):
    r = random_rollouts()
    shifted = r.replace(reward=r.reward + 10.0 * r.group)
    torch.testing.assert_close(estimate(name, shifted), estimate(name, r), rtol=1e-9, atol=1e-9)


def test_scaling_the_rewards_cancels_only_with_a_standard_deviation():
    r = random_rollouts()
    scaled = r.replace(reward=3.0 * r.reward)
    torch.testing.assert_close(estimate("group_mean_std", scaled, eps=0.0), estimate("group_mean_std", r, eps=0.0))
    torch.testing.assert_close(estimate("group_mean", scaled), 3.0 * estimate("group_mean", r))


def test_leave_one_out_is_a_multiple_of_the_group_mean():
    r = random_rollouts(samples=5)
    torch.testing.assert_close(estimate("leave_one_out", r), 5 / 4 * estimate("group_mean", r))


@pytest.mark.parametrize("name", all_kinds("advantage"))
def test_unscored_rows_count_nowhere(name):
    r = random_rollouts(groups=3, samples=4)
    reward = r.reward.clone()
    reward[5] = float("nan")
    with_nan = estimate(name, r.replace(reward=reward))
    kept = torch.arange(12) != 5
    assert (with_nan[5] == 0).all()
    torch.testing.assert_close(with_nan[kept], estimate(name, r.select(kept)))


@pytest.mark.parametrize("name", all_kinds("advantage"))
def test_untrained_decisions_get_zero(name):
    r = random_rollouts()
    off = r.mask == 0
    poisoned = r.replace(values=torch.where(off, torch.nan, r.values))
    advantage = estimate(name, poisoned)
    assert (advantage[off] == 0).all()
    torch.testing.assert_close(advantage, estimate(name, r))


@pytest.mark.parametrize("name", ["group_mean_std", "group_mean", "leave_one_out", "group_mean_global_std"])
def test_a_group_of_one_scored_row(name):
    r = rows([2.0, float("nan"), 1.0, 3.0], group=[0, 0, 1, 1])
    assert (estimate(name, r)[:2] == 0).all()
    kept = estimate(name, r, singleton="keep")
    assert kept[0, 0].item() == pytest.approx(2.0, rel=1e-5)
    assert (kept[1] == 0).all()
    assert torch.equal(kept[2:], estimate(name, r)[2:])


def test_group_order_does_not_matter():
    r = random_rollouts(groups=5, samples=4)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(3))
    by_place = {"regrouped_by_length", "bundled_risk"}  # halves of rows of one length, bundles of neighbours
    for name in all_kinds("advantage").keys() - by_place:
        torch.testing.assert_close(estimate(name, r.select(order)), estimate(name, r)[order])


def test_whitening():
    r = random_rollouts()
    white = masked_whiten(r.values, r.mask)
    kept = white[r.mask > 0]
    assert kept.mean().item() == pytest.approx(0.0, abs=1e-12)
    assert kept.std().item() == pytest.approx(1.0, rel=1e-6)
    assert (white[r.mask == 0] == 0).all()
    assert (masked_whiten(torch.full_like(r.values, 0.5), r.mask) == 0).all()
    single = torch.zeros_like(r.mask)
    single[0, 0] = 1
    assert (masked_whiten(r.values, single) == 0).all()


@pytest.mark.parametrize("name", [name for name, block in all_kinds("advantage").items() if "samples" in block.needs])
def test_group_estimators_refuse_one_sample(name):
    objective = Objective("mine", all_kinds("advantage")[name]())
    everything = ("values", "turns")
    with pytest.raises(ValueError, match=f"samples_per_task is 1.*'{name}'.*gae, gae_turn,.* whitened_returns"):
        check_group_size(1, objective, everything)
    check_group_size(2, objective, everything)


def test_one_sample_advises_only_what_the_domain_can_score():
    for scores, advised in (
        ((), "whitened_returns, tracked_value"),
        (("values",), "gae, whitened_returns, tracked_value"),
    ):
        with pytest.raises(ValueError, match=f"works with one sample: {advised}$"):
            check_group_size(1, Objective("mine"), scores)


@pytest.mark.parametrize("name", ["whitened_returns", "gae", "gae_turn"])
def test_other_estimators_work_with_one_sample(name):
    check_group_size(1, Objective("mine", all_kinds("advantage")[name]()), ())


def test_missing_values_and_turns_are_named():
    r = random_rollouts()
    with pytest.raises(ValueError, match="value head"):
        estimate("gae", r.replace(values=None))
    with pytest.raises(ValueError, match=r"rollouts\.turn"):
        estimate("gae_turn", r.replace(turn=None))
    with pytest.raises(ValueError, match="decreases along a row"):
        estimate("gae_turn", r.replace(mask=torch.ones_like(r.mask), turn=-torch.arange(6).expand(12, 6) + 9))


def test_gae_bootstraps_rows_that_were_cut_off():
    # One step with reward 1 and value 0.5, cut off in a state of value 4: delta = 1 + 0.9 * 4 - 0.5.
    rewards, values, mask = torch.tensor([[1.0], [1.0]]), torch.tensor([[0.5], [0.5]]), torch.ones(2, 1)
    advantages, returns = gae(rewards, values, mask, 0.9, 0.95, torch.tensor([4.0, 0.0]))
    assert advantages.flatten().tolist() == pytest.approx([4.1, 0.5])
    assert returns.flatten().tolist() == pytest.approx([4.6, 1.0])
    # An endless episode of reward 1 with the exact value 1 / (1 - gamma) has no advantage anywhere, however it is cut.
    endless = torch.full((1, 7), 10.0, dtype=torch.float64)
    cut = gae(torch.ones_like(endless), endless, torch.ones_like(endless), 0.9, 0.7, endless[:, 0])[0]
    torch.testing.assert_close(cut, torch.zeros_like(cut), atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", ["gae", "gae_turn"])
def test_critics_read_the_bootstrap_value_of_the_rollouts(name):
    r = random_rollouts()
    zero, one = (r.replace(extras={"bootstrap_value": torch.full_like(r.reward, v)}) for v in (0.0, 1.0))
    assert torch.equal(estimate(name, zero), estimate(name, r.replace(extras={})))
    lam_one = {"gamma": 1.0, "lam": 1.0}
    # With gamma = lambda = 1 the value after the end is a constant that every decision receives.
    torch.testing.assert_close(estimate(name, one, **lam_one), estimate(name, zero, **lam_one) + r.mask)


def cut_off_episode():
    """Two turns of two decisions, with the time limit after the second: rewards 1 and 2, values 0.5 and 3."""
    episode = rows([3.0], mask=[[1, 1, 1, 1]]).replace(
        turn=torch.tensor([[0, 0, 1, 1]]), values=torch.tensor([[0.5, 9.0, 3.0, 9.0]], dtype=torch.float64)
    )
    rewards = torch.tensor([[0.0, 1.0, 0.0, 2.0]], dtype=torch.float64)
    return episode.replace(extras={"decision_reward": rewards, "truncated": torch.ones(1)})


@pytest.mark.parametrize(
    ("truncation", "value", "expected"),
    [
        # gamma 0.9, lambda 0.5. The end of the task: 2 - 3 = -1, then 1 + 0.9 * 3 - 0.5 + 0.45 * -1.
        ("terminate", 4.0, (2.75, -1.0)),
        # A value of 4 behind the limit: 2 + 0.9 * 4 - 3 = 2.6, then 3.2 + 0.45 * 2.6.
        ("bootstrap", 4.0, (4.37, 2.6)),
        # Masked: 0, then 1 + 0.9 * 3 - 0.5.
        ("mask", 4.0, (3.2, 0.0)),
        # A value that is not known is masked, and none at all is the end of the task.
        ("bootstrap", float("nan"), (3.2, 0.0)),
        ("bootstrap", None, (2.75, -1.0)),
    ],
)
def test_a_time_limit_by_hand(truncation, value, expected):
    r = cut_off_episode()
    if value is not None:
        r = r.replace(extras=r.extras | {"bootstrap_value": torch.tensor([value], dtype=torch.float64)})
    found = estimate("gae_turn", r, gamma=0.9, lam=0.5, truncation=truncation)
    assert found[0].tolist() == pytest.approx([expected[0]] * 2 + [expected[1]] * 2)
    # a decision a turn: the same numbers from the estimator over decisions
    few = r.replace(
        **{name: getattr(r, name)[:, ::2] for name in ("mask", "logp_old", "turn", "values")},
        extras=r.extras | {"decision_reward": torch.tensor([[1.0, 2.0]], dtype=torch.float64)},
    )
    assert estimate("gae", few, gamma=0.9, lam=0.5, truncation=truncation)[0].tolist() == pytest.approx(list(expected))


def test_masking_leaves_rows_that_terminated_as_they_are():
    r = random_rollouts()
    marked = r.replace(extras={"truncated": torch.zeros_like(r.reward)})
    assert torch.equal(estimate("gae_turn", marked, truncation="mask"), estimate("gae_turn", r))


def test_turn_means_by_hand():
    r = random_rollouts(groups=1, samples=1, width=4).replace(
        mask=torch.tensor([[1.0, 1.0, 0.0, 1.0]], dtype=torch.float64), turn=torch.tensor([[0, 0, 1, 2]])
    )
    means, trained = turn_means(r, torch.tensor([[1.0, 3.0, 50.0, 7.0]], dtype=torch.float64))
    assert means[trained].tolist() == [2.0, 7.0]


def test_whitening_counts_decisions_rows_or_turns():
    r = rows([0.0] * 3, mask=[[1, 1, 1], [1, 0, 0], [1, 1, 0]]).replace(turn=torch.tensor([[0, 0, 1]] * 3))
    x = torch.tensor([[1.0, 1.0, 1.0], [4.0, 0.0, 0.0], [7.0, 7.0, 0.0]], dtype=torch.float64)
    # As samples: decisions 1 1 1 4 7 7; rows 1 4 7; turns (1 1) (1) (4) (7 7).
    samples = {"decisions": [1, 1, 1, 4, 7, 7], "rows": [1, 4, 7], "turns": [1, 1, 4, 7]}
    for kind, of in samples.items():
        values = torch.tensor(of, dtype=torch.float64)
        expected = (x - values.mean()) / values.std() * r.mask
        torch.testing.assert_close(AdvantageScaling(whiten=kind)(x, r), expected)
        near = AdvantageScaling(whiten=kind, eps_to="deviation")(x * 1e-8, r)  # where the two differ
        torch.testing.assert_close(near, expected * values.std() / (values.std() + 1))
    assert torch.equal(AdvantageScaling()(x, r), x)


READING = {name: one for name, one in all_objectives().items() if one.compares != "rewards"}
READING["grpo"] = all_objectives()["grpo"].override({"kl": {"kind": "k1", "coef": 0.5, "in_reward": True}})


@pytest.mark.parametrize("name", READING)
def test_rows_that_leave_the_update_count_in_their_group(name):
    objective = READING[name].replace(scaling=AdvantageScaling(), weight=None)
    whole = random_rollouts(groups=3, samples=4)
    stays = torch.arange(12) % 4 != 1
    left = whole.replace(mask=whole.mask * stays[:, None], extras=whole.extras | {SAMPLED: whole.mask})
    expected, found = (objective.compute_advantages(each) for each in (whole, left))
    assert torch.equal(found.mask, left.mask)
    torch.testing.assert_close(found.advantage[stays], expected.advantage[stays])
    assert not found.advantage[~stays].any()
    assert SAMPLED not in found.extras


def test_the_optimal_baseline_ignores_untrained_decisions():
    clean = random_rollouts()
    clean.mask[:, 1] = 0.0
    fill = {"logp_old": torch.where(clean.mask > 0, clean.logp_old, torch.nan)}
    fill["extras"] = clean.extras | {"collision": torch.where(clean.mask > 0, clean.extras["collision"], torch.nan)}
    assert torch.equal(estimate("optimal_token", clean.replace(**fill)), estimate("optimal_token", clean))
