"""Preference objectives: pairs of rows, blocks by hand, invariances."""

import math

import pytest
import torch

from mmrl.core import Denominators, PolicyOutputs, PreferenceObjective, Rollouts, all_preferences, get, get_preference
from mmrl.core.blocks import PREFERENCE_BLOCKS, all_kinds
from mmrl.core.blocks.preference import (
    BASELINE,
    CHOSEN,
    OWN,
    PREVIOUS,
    SCORE,
    ChosenLikelihood,
    DecisionScore,
    IpoPair,
    MeanScore,
    NoPairLoss,
    Pairs,
    SigmoidPair,
    SumScore,
    pair_rows,
)
from mmrl.core.objectives.objective import changed


def pairs(seed: int = 0, groups: int = 4, width: int = 5) -> tuple[Rollouts, torch.Tensor]:
    """Pairs of ragged rows, rejected sides first in every second group, with current log-probabilities."""
    g = torch.Generator().manual_seed(seed)
    rows = 2 * groups
    lengths = torch.randint(1, width + 1, (rows,), generator=g)
    mask = (torch.arange(width)[None] < lengths[:, None]).double()

    def noise() -> torch.Tensor:
        return -torch.rand(rows, width, generator=g, dtype=torch.float64) * mask

    chosen = torch.tensor([1.0, 0.0, 0.0, 1.0]).repeat(groups // 2)
    extras = {CHOSEN: chosen, SCORE: torch.rand(rows, generator=g, dtype=torch.float64)}
    extras[PREVIOUS] = -torch.rand(rows, width, generator=g, dtype=torch.float64) * mask
    extras[OWN] = torch.tensor([1.0, 0.0, 1.0, 0.0]).repeat(groups // 2)
    extras[BASELINE] = torch.full((rows,), 0.1, dtype=torch.float64)
    group = torch.arange(groups).repeat_interleave(2)
    rollouts = Rollouts(group, mask, torch.zeros_like(mask), torch.zeros(rows), logp_ref=noise(), extras=extras)
    return rollouts, noise()


def value(objective: PreferenceObjective, rollouts: Rollouts, logp: torch.Tensor) -> torch.Tensor:
    return objective.step_loss(PolicyOutputs(logp), rollouts, objective.denominators(rollouts)).loss


def test_rows_are_valid_cite_their_paper_and_state_their_formula():
    assert {"dpo", "ipo", "slic", "robust_dpo", "rpo", "sppo", "refuel", "diffusion_dpo"} < set(all_preferences())
    for name, objective in all_preferences().items():
        objective.validate()
        assert objective.name == name
        assert "arXiv" in objective.citation
        assert objective.citation in objective.describe()
        assert objective.parts().startswith(objective.loss.kind)


def test_descriptions_show_the_constants():
    for name, text in (
        ("dpo", "mean -log sigmoid(0.1 h)"),
        ("robust_dpo", "[-0.9 log sigmoid(0.1 h) + 0.1 log sigmoid(-0.1 h)] / 0.8"),
        ("ipo", "(h - 5)^2"),
        ("slic", "max(0, 1 - 0.1 h)"),
        ("rpo", "+ 0.005 * mean over preferred answers"),
        ("sppo", "/ 0.001"),
        ("simpo", "h = logp_w - logp_l,"),
        ("simpo", "mean -log sigmoid(2 h - 1)"),
    ):
        assert text in get_preference(name).describe(), name
    smoothed = get_preference("dpo").override({"loss": {"label_smoothing": 0.25}}).describe()
    assert "-0.75 log sigmoid(0.1 h) - 0.25 log sigmoid(-0.1 h)" in smoothed
    assert "h = " not in get_preference("sppo").describe()


@pytest.mark.parametrize("part", PREFERENCE_BLOCKS)
def test_every_block_states_its_formula(part):
    for kind in all_kinds(part):
        made = changed(None, {"kind": kind}, part)
        assert list(made.problems(part)) == []
        assert made.formula() or isinstance(made, NoPairLoss)


def test_dpo_by_hand():
    rollouts = Rollouts(
        torch.tensor([0, 0]),
        torch.tensor([[1.0, 1.0], [1.0, 0.0]]).double(),
        torch.zeros(2, 2).double(),
        torch.zeros(2),
        logp_ref=torch.tensor([[-1.0, -2.0], [-1.0, 9.0]]).double(),
        extras={CHOSEN: torch.tensor([1.0, 0.0])},
    )
    logp = torch.tensor([[-0.5, -1.5], [-2.0, 7.0]]).double()
    margin = (-2.0 - -3.0) - (-2.0 - -1.0)  # 2 nats more than the reference
    found = value(get_preference("dpo"), rollouts, logp)
    assert float(found) == pytest.approx(-math.log(1 / (1 + math.exp(-0.1 * margin))), rel=1e-12)
    output = get_preference("dpo").step_loss(
        PolicyOutputs(logp), rollouts, get_preference("dpo").denominators(rollouts)
    )
    assert output.metrics["rewards/chosen"].value == pytest.approx(0.1)
    assert output.metrics["rewards/rejected"].value == pytest.approx(-0.1)
    assert output.metrics["rewards/accuracies"].value == 1.0
    assert output.metrics["logps/accuracies"].value == 0.0
    assert float(value(PreferenceObjective("mine", IpoPair(0.5), MeanScore()), rollouts, logp)) == pytest.approx(
        ((-1.0 - -1.5) - (-2.0 - -1.0) - 1.0) ** 2
    )


def test_sides_are_found_by_their_mark_not_their_position():
    rollouts, logp = pairs()
    order = torch.tensor([1, 0, 2, 3, 5, 4, 7, 6])
    for objective in all_preferences().values():
        assert float(value(objective, rollouts.select(order), logp[order])) == pytest.approx(
            float(value(objective, rollouts, logp)), rel=1e-12
        )
    assert [side.tolist() for side in pair_rows(rollouts)] == [[0, 3, 4, 7], [1, 2, 5, 6]]


@pytest.mark.parametrize("name", all_preferences())
@pytest.mark.parametrize("likelihood", [None, ChosenLikelihood(0.3), ChosenLikelihood(0.3, "decisions")])
def test_micro_batches_padding_and_tokens_after_an_answer_change_nothing(name, likelihood):
    objective = get_preference(name).replace(likelihood=likelihood)
    rollouts, logp = pairs()
    leaf = logp.clone().requires_grad_()
    whole = value(objective, rollouts, leaf)
    (gradient,) = torch.autograd.grad(whole, leaf)
    counts = objective.denominators(rollouts)
    total, parts = 0.0, []
    for start in range(0, 8, 2):
        rows = torch.arange(start, start + 2)
        part = logp[rows].clone().requires_grad_()
        loss = objective.step_loss(PolicyOutputs(part), rollouts.select(rows), counts).loss
        parts += torch.autograd.grad(loss, part)
        total += float(loss.detach())
    assert total == pytest.approx(float(whole.detach()), rel=1e-12)
    torch.testing.assert_close(torch.cat(parts), gradient, rtol=1e-12, atol=0)
    spoilt = torch.where(rollouts.mask > 0, logp, float("nan"))
    assert float(value(objective, rollouts, spoilt)) == float(whole.detach())
    split = Denominators.total([objective.denominators(rollouts.select_groups(torch.tensor([n]))) for n in range(4)])
    assert split == counts


def test_each_decision_can_be_a_pair_of_its_own():
    rollouts, logp = pairs()
    full = rollouts.replace(mask=torch.ones_like(rollouts.mask))
    objective = get_preference("diffusion_dpo").override({"loss": {"beta": 2.0}})
    chosen, rejected = pair_rows(full)
    margin = (logp - full.logp_ref)[chosen] - (logp - full.logp_ref)[rejected]
    expected = -torch.nn.functional.logsigmoid(2.0 * margin).mean()
    assert float(value(objective, full, logp)) == pytest.approx(float(expected), rel=1e-12)
    assert objective.denominators(full).others["pairs"] == 20
    assert float(value(objective.replace(score=SumScore()), full, logp)) != pytest.approx(float(expected))


def test_the_reference_and_the_scores_are_constants():
    generator, m = torch.Generator().manual_seed(0), 3
    # small, since diffusion_dpo multiplies margins by thousands and a sigmoid that is 1 has no gradient
    leaves = [(-1e-3 * torch.rand(m, generator=generator, dtype=torch.float64)).requires_grad_() for _ in range(4)]
    scores = torch.rand(2, m, generator=generator, dtype=torch.float64)
    for name in all_preferences():
        more = {"previous_w": scores[0], "previous_l": scores[1], "own_w": torch.tensor([True, False, True])}
        more |= {"drift_w": leaves[0], "drift_l": leaves[1]}
        loss = get_preference(name).loss(Pairs(*leaves, *scores, **more)).sum()
        chosen, rejected, *reference = torch.autograd.grad(loss, leaves, allow_unused=True)
        assert float(chosen.abs().sum()) > 0, name
        assert float(rejected.abs().sum()) > 0, name
        assert reference == [None, None], name


@pytest.mark.parametrize("kind", all_kinds("loss"))
def test_pairs_far_from_the_reference_have_finite_losses_where_they_are_right(kind):
    loss = changed(None, {"kind": kind}, "loss")
    certain, hopeless = torch.tensor([0.0, -1e-9, -1.0]), torch.full((3,), -1e5)
    sides = certain.requires_grad_(), hopeless.requires_grad_()
    more = {"previous_w": hopeless, "previous_l": certain, "own_w": torch.tensor([True, False, True])}
    more |= {"drift_w": sides[0], "drift_l": sides[1]}
    found = loss(Pairs(*sides, hopeless, certain, torch.ones(3), torch.zeros(3), **more))
    assert torch.isfinite(found).all()
    if not isinstance(loss, NoPairLoss):
        assert all(torch.isfinite(slope).all() for slope in torch.autograd.grad(found.sum(), sides))


@pytest.mark.parametrize("kind", ["sigmoid", "discopop", "nca", "bco"])
def test_pairs_far_on_the_wrong_side_cost_in_proportion(kind):
    loss = changed(None, {"kind": kind}, "loss")
    chosen = torch.tensor([-1e4, -2e4], dtype=torch.float64).requires_grad_()
    zero = torch.zeros(2, dtype=torch.float64)
    once, twice = loss(Pairs(chosen, zero, zero, zero))
    assert torch.isfinite(torch.autograd.grad(once + twice, chosen)[0]).all()
    assert float(twice.detach()) == pytest.approx(2 * float(once.detach()), rel=0.01)


def test_smoothed_labels_interpolate_and_robust_ones_undo_swaps():
    numbers = Pairs(*torch.randn(4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    swapped = Pairs(numbers.logp_l, numbers.logp_w, numbers.ref_l, numbers.ref_w)
    share = 0.3
    clean, flipped = SigmoidPair(0.5)(numbers), SigmoidPair(0.5)(swapped)
    torch.testing.assert_close(SigmoidPair(0.5, share)(numbers), (1 - share) * clean + share * flipped)
    robust = get_preference("robust_dpo").override({"loss": {"beta": 0.5, "label_smoothing": share}}).loss
    expected = (1 - share) * robust(numbers) + share * robust(swapped)  # over swaps at that rate
    torch.testing.assert_close(expected, clean)


def test_learning_from_preferred_answers_alone_needs_no_reference():
    objective = get_preference("dpo").override({"loss": {"kind": "none"}, "likelihood": {"kind": "nll", "coef": 1}})
    objective.validate()
    assert not objective.needs_reference
    rollouts, logp = pairs()
    chosen, _ = pair_rows(rollouts)
    expected = -(logp[chosen].sum(1) / rollouts.mask[chosen].sum(1)).mean()
    assert float(value(objective, rollouts.replace(logp_ref=None), logp)) == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": {"kind": "dpo"}}, "unknown loss 'dpo'.*sigmoid"),
        ({"loss": {"eta": 1.0}}, "'sigmoid' has no option 'eta'; it has: beta, label_smoothing"),
        ({"clip": {"high": 0.3}}, "no part 'clip'; its parts: loss, score, likelihood"),
        ({"likelihood": {"coef": 0.1}}, "likelihood is not part of this objective.*set its kind: nll"),
        ({"loss": {"beta": "much"}}, r"loss\.beta is 'much'; expected float, positive"),
    ],
)
def test_unknown_options_are_refused(changes, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        get_preference("dpo").override(changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": SigmoidPair(beta=0.0)}, r"loss\.beta is 0\.0; must be positive"),
        ({"loss": SigmoidPair(label_smoothing=0.5)}, r"loss\.label_smoothing is 0\.5; must be in \[0, 0\.5\)"),
        ({"loss": NoPairLoss()}, "nothing is minimised"),
        ({"likelihood": ChosenLikelihood(0.1, "rows")}, "average is 'rows'"),
    ],
)
def test_numbers_out_of_range_are_refused(changes, message):
    with pytest.raises(ValueError, match=f"(?s)preference objective 'dpo' cannot be used.*{message}"):
        get_preference("dpo").replace(**changes).validate()


def test_what_is_missing_is_named():
    rollouts, logp = pairs()
    dpo, refuel = get_preference("dpo"), get_preference("refuel")
    with pytest.raises(ValueError, match="logp_ref is missing"):
        value(dpo, rollouts.replace(logp_ref=None), logp)
    with pytest.raises(ValueError, match=r"extras\['pair_score'\] is missing"):
        value(refuel, rollouts.replace(extras={CHOSEN: rollouts.extras[CHOSEN]}), logp)
    with pytest.raises(ValueError, match=r"extras\['chosen'\].*is missing"):
        value(dpo, rollouts.replace(extras={}), logp)
    with pytest.raises(ValueError, match=r"extras\['kl_baseline'\] is missing"):
        value(get_preference("kto"), rollouts.replace(extras={CHOSEN: rollouts.extras[CHOSEN]}), logp)
    with pytest.raises(ValueError, match="Micro-batches of at least 2 rows"):
        value(dpo, rollouts.select(torch.tensor([0])), logp[:1])


def test_a_preference_objective_is_not_one_for_rewards():
    with pytest.raises(ValueError, match=r"'dpo' learns from pairs of answers.*recipe: preference"):
        get("dpo")
    with pytest.raises(ValueError, match=r"unknown preference objective 'dpoo'; did you mean 'dpo'"):
        get_preference("dpoo")
    assert DecisionScore().formula()
