import pytest
import torch

from mmrl.contrib.rows.adaptive import ENTROPY_LEVEL, HapoClip
from mmrl.contrib.rows.bgpo import Bgpo
from mmrl.contrib.rows.estimators import GROUP_ADVANTAGE, OWN_WEIGHT, ConsistencyBlend
from mmrl.core import Denominators, Objective, PolicyOutputs, all_objectives, get, merge_metrics
from mmrl.core.blocks.advantage import AdvantageScaling, GroupMean, GroupMeanGlobalStd
from mmrl.core.blocks.clip import (
    Cispo,
    GroupRegression,
    PolicyGradient,
    PpoClip,
    SequenceFullRatio,
    SequenceProductRatio,
    SequenceRatio,
    Unclipped,
    group_deviations,
)
from mmrl.core.blocks.credit import Gae, TurnGae, ValueLoss
from mmrl.core.blocks.divergence import K1, K3, ExactKl, FullEntropy, SampledEntropy
from mmrl.core.blocks.mismatch import GeometricGate, Truncated
from mmrl.core.blocks.turns import Duration, TopEntropy
from mmrl.core.loss import SequenceMean, SequenceSum, metric_values
from tests.core.builders import random_rollouts, widened

EXTRA = {
    "everything": Objective(
        "everything", clip=PpoClip(dual=2.0), kl=K3(0.3, aggregation=SequenceMean()), entropy=FullEntropy(0.01)
    ),
    "turn critic": Objective(
        "turn critic",
        advantage=TurnGae(),
        value=ValueLoss(0.5),
        entropy=SampledEntropy(0.1),
        aggregation=SequenceMean(),
    ),
    "row sums": Objective("row sums", ratio=SequenceFullRatio(), aggregation=SequenceSum(), clip=PpoClip(high=0.05)),
    "exact divergence": Objective("exact divergence", kl=ExactKl(0.1), clip=Unclipped()),
    "linear bound": Objective(
        "linear bound", clip=Bgpo(), advantage=GroupMeanGlobalStd(), scaling=AdvantageScaling(clip=1.0, scale=0.5)
    ),
    "mismatch": Objective(
        "mismatch", correction=Truncated(level="sequence", high=3.0), gate=GeometricGate(low=0.5, high=2.0)
    ),
    "highest entropies": Objective("highest entropies", weight=TopEntropy(0.5), correction=Truncated()),
    "durations": Objective("durations", weight=Duration(), aggregation=SequenceMean()),
    "score function": Objective("score function", clip=PolicyGradient(), advantage=GroupMean()),
}
OBJECTIVES = all_objectives() | EXTRA
OF_A_PASS = {"clip_cov", "kl_cov"}
"""Rows with a rule on the decisions that pass the policy together, as in their code: micro-batches change it."""
SHARED_OUT = [name for name in OBJECTIVES if name not in OF_A_PASS]
OWN_FIRST_STEP = {
    "vespo",
    "clip_cov",
    "p3o_joint",
    "disco",
    "decoupled_reward",
    "inpainting_guided",
    "step_nft",
    "gepo",
}
"""Rows whose gradient on policy is not that of -A logp; their golden files have it."""
DETACHED = {"dppo_tv", "dppo_kl", "prime_rl", "vespo", "disco", "decoupled_reward", "agentic_entropy_balanced"}
"""Rows with a factor that has no gradient, which differences see; their golden files have the gradient."""


def noise(like, seed):
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed), dtype=like.dtype)


def scored(objective, rollouts, move=0.3):
    """Rollouts with advantages, and a policy whose parameters are the scores of every decision."""
    rollouts = objective.compute_advantages(rollouts)
    base = rollouts.logp_old
    tensors = {
        "logp": base + move * noise(base, 1),
        "entropy": noise(base, 2).abs(),
        "values": rollouts.values + move * noise(base, 3),
        "kl_ref": noise(base, 4).abs(),
        "kl_old": 1e-5 * noise(base, 5).exp(),
    }
    if objective.surveys:
        rollouts = objective.settled([objective.survey(scores_of(tensors), rollouts)], rollouts)
    return rollouts, {name: tensor.requires_grad_() for name, tensor in tensors.items()}


def scores_of(tensors, rows=slice(None), width=None):
    return PolicyOutputs(**{name: tensor[rows, :width] for name, tensor in tensors.items()})


def gradients(loss, tensors):
    found = torch.autograd.grad(loss, list(tensors.values()), allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for g, t in zip(found, tensors.values(), strict=True)]


def batch():
    r = random_rollouts(seed=5, groups=5, samples=3)
    reward = r.reward.clone()
    reward[4] = float("nan")
    mask = r.mask.clone()
    mask[7] = 0.0
    mask[9, 0] = 0.0
    return r.replace(reward=reward, mask=mask, turn=torch.where(mask > 0, r.turn, -1))


@pytest.mark.parametrize("name", SHARED_OUT)
@pytest.mark.parametrize("size", [1, 4, 7])
def test_micro_batches_add_up_to_the_whole(name, size):
    objective = OBJECTIVES[name]
    rollouts, tensors = scored(objective, batch())
    denominators = objective.denominators(rollouts)
    whole = objective.loss(scores_of(tensors), rollouts, denominators)
    outputs, start = [], 0
    for part in rollouts.micro_batches(size, whole_groups=objective.compares_rows):
        rows = slice(start, start + part.num_rows)
        outputs.append(objective.loss(scores_of(tensors, rows, part.num_decisions), part, denominators))
        start += part.num_rows
    total = sum(output.loss for output in outputs)
    torch.testing.assert_close(total, whole.loss, rtol=1e-12, atol=1e-14)
    for split, together in zip(gradients(total, tensors), gradients(whole.loss, tensors), strict=True):
        torch.testing.assert_close(split, together, rtol=1e-12, atol=1e-14)
    merged = metric_values(merge_metrics([output.metrics for output in outputs]))
    assert merged == pytest.approx(metric_values(whole.metrics), rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("name", SHARED_OUT)
def test_ranks_add_up_to_the_whole(name):
    objective = OBJECTIVES[name]
    rollouts, tensors = scored(objective, batch())
    whole = objective.loss(scores_of(tensors), rollouts, objective.denominators(rollouts)).loss
    ranks = [rollouts.select_groups(torch.tensor(groups)) for groups in ([0, 1], [2, 3, 4])]
    shared = Denominators.total([objective.denominators(rank) for rank in ranks])
    rows = [slice(0, 6), slice(6, 15)]
    parts = [objective.loss(scores_of(tensors, r), rank, shared).loss for r, rank in zip(rows, ranks, strict=True)]
    torch.testing.assert_close(sum(parts), whole, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_padding_changes_nothing(name):
    objective = OBJECTIVES[name]
    rollouts, tensors = scored(objective, batch())
    expected = objective.loss(scores_of(tensors), rollouts, objective.denominators(rollouts)).loss
    pad = {key: torch.nn.functional.pad(value, (0, 3), value=float("nan")) for key, value in tensors.items()}
    wide = objective.compute_advantages(widened(batch(), 9))
    loss = objective.loss(scores_of(pad), wide, objective.denominators(wide)).loss
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-14)
    for wide_gradient, gradient in zip(gradients(loss, tensors), gradients(expected, tensors), strict=True):
        torch.testing.assert_close(wide_gradient, gradient, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_what_stands_on_untrained_decisions_does_not_matter(name):
    objective = OBJECTIVES[name]
    rollouts, tensors = scored(objective, batch())
    counts = objective.denominators(rollouts)
    clean = objective.loss(scores_of(tensors), rollouts, counts).loss
    off = rollouts.loss_mask == 0
    nan = float("nan")
    poison = {key: tensor.detach().masked_fill(off, nan).requires_grad_() for key, tensor in tensors.items()}
    filled = {
        key: getattr(rollouts, key).masked_fill(off, nan)
        for key in ("logp_old", "logp_ref", "values", "returns", "advantage")
        if getattr(rollouts, key) is not None
    }
    loss = objective.loss(scores_of(poison), rollouts.replace(**filled), counts).loss
    torch.testing.assert_close(loss, clean)
    for poisoned, gradient in zip(gradients(loss, poison), gradients(clean, tensors), strict=True):
        torch.testing.assert_close(poisoned, gradient)


def in_turn(rollouts):
    """(B, T), trained decisions of the turn that each decision belongs to."""
    same = (rollouts.turn[:, :, None] == rollouts.turn[:, None]).to(rollouts.mask.dtype)
    return (same * rollouts.loss_mask[:, None]).sum(2).clamp(min=1)


def per_decision_divisor(objective, rollouts):
    counts = objective.denominators(rollouts)
    lengths = rollouts.loss_mask.sum(1, keepdim=True).clamp(min=1)
    return {
        "token_mean": torch.full_like(lengths, counts.tokens),
        "sequence_mean": lengths * counts.rows,
        "sequence_sum": torch.full_like(lengths, counts.rows),
        "turn_mean": in_turn(rollouts) * counts.turns,
        "fixed_length": torch.full_like(lengths, counts.rows * (objective.fixed_length or 1)),
    }[objective.aggregation.kind]


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name not in OWN_FIRST_STEP])
def test_the_first_step_is_the_plain_policy_gradient(name):
    # No other term than the policy's: its gradient must be -A / denominator for every clipping rule.
    objective = OBJECTIVES[name].replace(kl=None, entropy=None, correction=None, gate=None)
    rollouts, tensors = scored(objective, batch())
    logp = tensors["logp"]
    rollouts = rollouts.replace(logp_old=logp.detach())
    output = objective.loss(scores_of(tensors), rollouts, objective.denominators(rollouts))
    (gradient,) = torch.autograd.grad(output.loss, logp)
    weight = rollouts.extras.get("weight", torch.ones_like(rollouts.mask))
    expected = -weight * rollouts.advantage / per_decision_divisor(objective, rollouts)
    if isinstance(objective.clip, GroupRegression):  # less the mean over the trained rows, which leave one out here
        trained = rollouts.loss_mask.any(1)
        row = rollouts.advantage.sum(1) / rollouts.lengths.clamp(min=1)
        shift = row - group_deviations(row, rollouts.group, trained)[0]
        expected = expected + shift[:, None] * rollouts.loss_mask / per_decision_divisor(objective, rollouts)
        expected = 2 / objective.clip.eps * expected
    if isinstance(objective.ratio, SequenceProductRatio):
        expected = expected * rollouts.loss_mask.sum(1, keepdim=True)
    if isinstance(objective.clip, ConsistencyBlend):  # part of it is the group's advantage
        own = rollouts.extras[OWN_WEIGHT][:, None]
        level = torch.where(rollouts.loss_mask > 0, rollouts.extras[GROUP_ADVANTAGE][:, None], 0.0)
        expected = own * expected - (1 - own) * level / per_decision_divisor(objective, rollouts)
    if isinstance(objective.clip, HapoClip):  # inside the bounds, advantages of low entropy shrink
        expected = expected * (1 + rollouts.extras[ENTROPY_LEVEL].clamp(max=0))
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-15)
    values = metric_values(output.metrics)
    assert values["policy/ratio_mean"] == values["policy/ratio_max"] == 1.0
    assert values["policy/kl_old"] == 0.0
    assert values.get("policy/clip_fraction_low", 0.0) == values.get("policy/clip_fraction_high", 0.0) == 0.0


@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradients_match_finite_differences(name):
    objective = OBJECTIVES[name]
    rollouts, tensors = scored(objective, random_rollouts(seed=6, groups=2, samples=2, width=3))
    counts = objective.denominators(rollouts)
    base = {key: tensor.detach().clone() for key, tensor in tensors.items()}

    def loss(moved):
        return objective.loss(PolicyOutputs(**moved), rollouts, counts).loss

    detached = isinstance(objective.clip, Cispo) or isinstance(objective.ratio, SequenceRatio) or name in DETACHED
    for key, gradient in zip(tensors, gradients(loss(tensors), tensors), strict=True):
        if key == "logp" and detached:
            continue  # stop-gradients are invisible to differences; test_ratios.py holds them fixed
        for i, t in torch.nonzero(rollouts.mask).tolist():
            step = torch.zeros_like(base[key])
            step[i, t] = 1e-6
            slope = (loss(base | {key: base[key] + step}) - loss(base | {key: base[key] - step})) / 2e-6
            assert gradient[i, t].item() == pytest.approx(slope.item(), rel=1e-5, abs=1e-8)


def test_advantages_of_rloo_are_a_multiple_of_dr_grpo():
    r = random_rollouts(samples=4)
    rloo = get("rloo").replace(kl=None)
    torch.testing.assert_close(
        rloo.compute_advantages(r).advantage, 4 / 3 * get("dr_grpo").compute_advantages(r).advantage
    )


def test_advantages_returns_and_weights_are_constants():
    r = random_rollouts()
    attached = {
        name: getattr(r, name).clone().requires_grad_() for name in ("reward", "values", "logp_ref", "logp_old")
    }
    weight = r.extras["kl_weight"].clone().requires_grad_()
    objective = get("ppo").replace(kl=K3(0.05))
    rollouts = objective.compute_advantages(r.replace(**attached, extras={"kl_weight": weight}))
    assert not rollouts.advantage.requires_grad
    assert not rollouts.returns.requires_grad
    logp = r.logp_old.clone().requires_grad_()
    loss = objective.loss(PolicyOutputs(logp, values=r.values), rollouts, objective.denominators(rollouts)).loss
    assert all(g is None for g in torch.autograd.grad(loss, [*attached.values(), weight], allow_unused=True))


def test_loss_is_the_sum_of_its_terms():
    objective = EXTRA["everything"].replace(advantage=Gae(), value=ValueLoss(0.7, clip=0.1))
    objective.validate()
    rollouts, tensors = scored(objective, batch())
    output = objective.loss(scores_of(tensors), rollouts, objective.denominators(rollouts))
    values = metric_values(output.metrics)
    parts = [values[f"loss/{term}"] for term in ("policy", "kl", "entropy", "value")]
    assert sum(parts) == pytest.approx(values["loss/total"])
    assert values["loss/total"] == pytest.approx(output.loss.item())
    assert all(part != 0 for part in parts)


def test_divergence_weights_scale_each_row():
    objective = Objective("weighted", kl=K3(0.5, clamp=False, aggregation=SequenceMean()))
    rollouts, tensors = scored(objective, batch())
    counts = objective.denominators(rollouts)
    value = objective.loss(scores_of(tensors), rollouts, counts).metrics["loss/kl"].value
    logp, ref, mask = tensors["logp"].detach(), rollouts.logp_ref, rollouts.loss_mask
    terms = torch.exp(ref - logp) - (ref - logp) - 1
    rows = mask.sum(1) > 0
    means = ((terms * mask).sum(1) / mask.sum(1))[rows]
    assert value == pytest.approx(0.5 * (rollouts.extras["kl_weight"][rows] * means).mean().item())


def test_divergence_in_the_reward_by_hand():
    r = random_rollouts(groups=1, samples=2, width=2, seed=1)
    r = r.replace(
        mask=torch.tensor([[1.0, 1.0], [1.0, 0.0]], dtype=torch.float64),
        reward=torch.tensor([1.0, 0.0], dtype=torch.float64),
        logp_old=torch.tensor([[-1.0, -1.0], [-1.0, 9.0]], dtype=torch.float64),
        logp_ref=torch.tensor([[-1.5, -2.0], [-1.0, 7.0]], dtype=torch.float64),
        turn=None,
        extras={},
    )
    objective = Objective("shaped", advantage=GroupMean(), kl=K1(0.1, in_reward=True))
    out = objective.compute_advantages(r)
    # The first row pays 0.1 * (0.5 + 1.0); the mean of 0.85 and 0 is 0.425.
    assert out.advantage.tolist() == [pytest.approx([0.425, 0.425]), pytest.approx([-0.425, 0.0])]
    assert torch.equal(out.reward, r.reward)
    assert out.extras == {}
    critic = objective.replace(advantage=Gae(), value=ValueLoss(1.0))
    no_values = critic.compute_advantages(r.replace(values=torch.zeros_like(r.logp_old)))
    # Each decision pays its own share, the reward comes at the end.
    assert no_values.advantage[0].tolist() == pytest.approx([0.85, 0.9])


def test_divergence_weights_scale_the_reward_too():
    r = batch()
    objective = Objective("shaped", advantage=Gae(), value=ValueLoss(1.0), kl=K1(0.1, in_reward=True))
    free = objective.with_kl_coef(0.0).compute_advantages(r).advantage
    for weight in (0.0, 2.0):
        weighted = r.replace(extras={"kl_weight": torch.full_like(r.reward, weight)})
        plain = objective.with_kl_coef(0.1 * weight).compute_advantages(r.replace(extras={})).advantage
        torch.testing.assert_close(objective.compute_advantages(weighted).advantage, plain)
    assert not torch.allclose(plain, free)


def test_entropy_is_rewarded_by_a_positive_weight():
    for term, key in ((FullEntropy(0.5), "entropy"), (SampledEntropy(0.5), "logp")):
        objective = Objective("entropic", entropy=term)
        rollouts, tensors = scored(objective, batch())
        output = objective.loss(scores_of(tensors), rollouts, objective.denominators(rollouts))
        kept = tensors[key].detach()[rollouts.loss_mask > 0]
        mean = kept.mean() if key == "entropy" else -kept.mean()
        assert output.metrics["loss/entropy"].value == pytest.approx(-0.5 * mean.item())
        full = tensors["entropy"].detach()[rollouts.loss_mask > 0].mean().item()
        assert output.metrics["policy/entropy"].value == pytest.approx(full)


def test_turn_critic_learns_at_the_first_decision_of_each_turn():
    objective = EXTRA["turn critic"].replace(entropy=None)
    rollouts, tensors = scored(objective, batch())
    counts = objective.denominators(rollouts)
    output = objective.loss(scores_of(tensors), rollouts, counts)
    errors = []
    for i, t in torch.nonzero(rollouts.loss_mask).tolist():
        earlier = rollouts.turn[i, :t][rollouts.loss_mask[i, :t] > 0]
        if rollouts.turn[i, t] not in earlier:
            errors.append((tensors["values"][i, t] - rollouts.returns[i, t]).item() ** 2)
    assert counts.turns == len(errors)
    assert output.metrics["loss/value"].value == pytest.approx(0.5 * 0.5 * sum(errors) / len(errors))


def test_returns_are_taken_before_whitening():
    rollouts = get("ppo").compute_advantages(batch())
    raw = get("ppo").replace(scaling=AdvantageScaling()).compute_advantages(batch())
    torch.testing.assert_close(rollouts.returns, raw.returns)
    mask = rollouts.loss_mask > 0
    torch.testing.assert_close(rollouts.returns[mask], (raw.advantage + raw.values)[mask])
    assert rollouts.advantage[mask].std().item() == pytest.approx(1.0, rel=1e-6)
    assert not torch.allclose(raw.advantage[mask].std(), torch.ones((), dtype=torch.float64))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_advantages_are_clipped_and_then_scaled_for_every_estimator(name):
    # without weights, some of which choose decisions by the size of their advantages
    scaling = OBJECTIVES[name].scaling.replace(clip=None, scale=1.0)
    objective = OBJECTIVES[name].replace(weight=None, scaling=scaling)
    free = objective.compute_advantages(batch())
    limit = float(free.advantage.abs().max()) / 2
    scaling = objective.scaling.replace(clip=limit, scale=0.2 / limit)
    bounded = objective.replace(scaling=scaling).compute_advantages(batch())
    expected = [[max(-limit, min(limit, a)) * 0.2 / limit for a in row] for row in free.advantage.tolist()]
    torch.testing.assert_close(bounded.advantage, torch.tensor(expected, dtype=torch.float64))
    assert bounded.advantage.abs().max().item() == pytest.approx(0.2)
    assert (bounded.returns is None) == (free.returns is None)
    if free.returns is not None:
        assert torch.equal(bounded.returns, free.returns)


def test_a_batch_without_any_signal_gives_a_zero_gradient():
    r = random_rollouts()
    flat = r.replace(reward=torch.full_like(r.reward, 0.1))
    objective = get("dapo")
    rollouts, tensors = scored(objective, flat)
    loss = objective.loss(scores_of(tensors), rollouts, objective.denominators(rollouts)).loss
    assert loss.item() == 0.0
    assert (torch.autograd.grad(loss, tensors["logp"])[0] == 0).all()


def test_a_batch_without_any_scored_row_gives_a_finite_zero():
    r = random_rollouts()
    unscored = r.replace(reward=torch.full_like(r.reward, float("nan")))
    for name in all_objectives():
        rollouts, tensors = scored(get(name), unscored)
        loss = get(name).loss(scores_of(tensors), rollouts, get(name).denominators(rollouts)).loss
        assert loss.item() == 0.0
        assert (torch.autograd.grad(loss, tensors["logp"])[0] == 0).all()


def test_what_is_missing_is_named():
    r = random_rollouts()
    ready = get("grpo").compute_advantages(r)
    counts = get("grpo").denominators(ready)

    def loss(objective, rollouts, **scores):
        return objective.loss(PolicyOutputs(**({"logp": r.logp_old} | scores)), rollouts, counts)

    with pytest.raises(ValueError, match=r"rollouts\.advantage is missing: compute_advantages"):
        loss(get("grpo"), r)
    with pytest.raises(ValueError, match=r"rollouts\.logp_ref is missing.*coef to 0"):
        loss(get("grpo"), ready.replace(logp_ref=None))
    with pytest.raises(ValueError, match=r"scores\.entropy is missing"):
        loss(EXTRA["everything"], ready)
    with pytest.raises(ValueError, match=r"scores\.kl_ref is missing"):
        loss(EXTRA["exact divergence"], ready)
    with pytest.raises(ValueError, match=r"scores\.values is missing"):
        loss(get("ppo"), ready)
    with pytest.raises(ValueError, match=r"rollouts\.returns is missing"):
        loss(get("ppo"), ready, values=r.values)
    with pytest.raises(ValueError, match=r"scores\.logp must have the shape of the mask, \(12, 6\)"):
        loss(get("grpo"), ready, logp=r.logp_old[:, :2])
    with pytest.raises(ValueError, match=r"scores\.logp must be float32 or float64"):
        loss(get("grpo"), ready, logp=r.logp_old.bfloat16())
