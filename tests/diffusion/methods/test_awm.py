"""Recipes that learn from finished images: AWM, and properties shared with the others."""

import dataclasses

import numpy as np
import pytest
import torch

from diffusion.sampling.latent_sampler import row_noise, text_of, times_of
from mmrl.core.loss import merge_metrics, metric_values
from mmrl.training.objectives import ObjectiveConfig
from mmrl.training.processes import Streams
from mmrl.training.recipe import Step
from mmrl.training.update import count_denominators
from tests.diffusion.runs import build, collected, disturb, gradients, make_trainer, run_config, trained
from tests.rounding import assert_same_gradient

WANT = frozenset({"logp"})


def velocities(recipe, rollouts):
    """Velocity on the stored noisy versions (B, T, -1) as float64, and the matching error (B, T)."""
    payload, draws = rollouts.payload, recipe.config.timesteps.count
    noise = row_noise(payload.noise_seed, draws, tuple(payload.latents.shape[1:])).double().numpy()
    sigma = payload.sigma.double().numpy()[:, :, None, None, None]
    clean = payload.latents.double().numpy()[:, None]
    noisy = (1 - sigma) * clean + sigma * noise
    text = text_of(recipe.policy, payload.tasks, rollouts.group.repeat_interleave(draws))
    with torch.no_grad():
        x = torch.from_numpy(noisy).float().flatten(0, 1)
        v = recipe.policy(x, payload.sigma.flatten(), text.expanded()).double().numpy().reshape(noisy.shape)
    error = ((v - (noise - clean)) ** 2).mean((2, 3, 4))
    return v, error


def pseudo(error, sigma, weighting, power):
    """The table of weightings, implemented a second time."""
    floor = 1e-10
    return {
        "uniform": -error,
        "t": -sigma * error,
        "t2": -(sigma**2) * error,
        "huber": -sigma * (np.sqrt(error + floor) - np.sqrt(floor)),
        "ghuber": -sigma / power * ((error + floor) ** power - floor**power),
    }[weighting]


def policy_loss(advantage, d, average, clip):
    if average == "sum_first":
        d = np.repeat(d.mean(1, keepdims=True), d.shape[1], 1)
    ratio = np.exp(d)
    if average == "bgpo":
        return (-advantage * np.where(advantage < 0, ratio, 1 + d)).mean()
    return np.maximum(-advantage * ratio, -advantage * ratio.clip(1 - clip, 1 + clip)).mean()


def awm(tmp_path, **settings):
    config = run_config("awm", tmp_path)
    config.awm = dataclasses.replace(config.awm, **settings)
    return config


@pytest.mark.parametrize("average", ["exp_first", "sum_first", "bgpo"])
@pytest.mark.parametrize("weighting", ["uniform", "t", "t2", "huber", "ghuber"])
def test_policy_term_is_that_of_numpy_off_policy(weighting, average, tmp_path):
    """With two updates per step, so that old likelihoods are stored and ratios differ from 1."""
    config = awm(tmp_path, weighting=weighting, average=average, ema_coef=0.0)
    config.trainer.minibatches_per_step = 2
    config.objective.kl = {"coef": 0.0}
    if average != "bgpo":  # which has no bounds
        config.objective.clip = {"low": 0.05, "high": 0.05}
    recipe = build(config)
    rollouts = collected(recipe)
    sigma = rollouts.payload.sigma.double().numpy()
    before = pseudo(velocities(recipe, rollouts)[1], sigma, weighting, config.awm.power)
    np.testing.assert_allclose(rollouts.logp_old.numpy(), before, rtol=1e-4, atol=1e-5)
    disturb(recipe.policy, 0.3)
    after = pseudo(velocities(recipe, rollouts)[1], sigma, weighting, config.awm.power)
    assert np.abs(after - before).max() > 0.01
    reward = rollouts.reward.double().numpy().reshape(2, 4)
    advantage = ((reward - reward.mean(1, keepdims=True)) / (reward.std() + 1e-4)).clip(-5, 5).reshape(-1, 1) / 5
    found, _ = gradients(recipe, rollouts)
    assert found == pytest.approx(policy_loss(advantage, after - before, average, 0.05), rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("kind", ["uniform", "elbo"])
@pytest.mark.parametrize(("beta", "ema"), [(0.0, 0.7), (0.4, 0.0), (0.4, 0.7), (0.0, 0.0)])
def test_each_anchor_is_independent(beta, ema, kind, tmp_path):
    config = awm(tmp_path, ema_coef=ema, kl_kind=kind)
    config.objective.kl = {"coef": beta}
    recipe = build(config)
    rollouts = collected(recipe)
    base, _ = velocities(recipe, rollouts)
    disturb(recipe.policy, 0.1, seed=1)
    if len(recipe.awm.kl_ema):
        recipe.awm.kl_ema.copy_()
    average, _ = velocities(recipe, rollouts)
    disturb(recipe.policy, 0.1, seed=2)
    v, _ = velocities(recipe, rollouts)
    sigma = rollouts.payload.sigma.double().numpy()
    weight = (1 - sigma.clip(0, 0.99)) / (2 * 0.49 * sigma) if kind == "elbo" else np.ones_like(sigma)
    anchors = [((v - other) ** 2).mean((2, 3, 4)) * weight for other in (base, average)]
    zero = rollouts.replace(advantage=torch.zeros_like(rollouts.mask))
    found, _ = gradients(recipe, zero)
    expected = beta * anchors[0].mean() + ema * anchors[1].mean()
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-7)
    assert (expected > 0) == (beta + ema > 0)


def test_the_total_is_the_loss_and_counts_both_anchors(tmp_path):
    config = awm(tmp_path, ema_coef=0.7)
    config.objective.kl = {"coef": 0.4}
    recipe = build(config)
    rollouts = collected(recipe)
    disturb(recipe.policy, 0.1, seed=1)
    output = recipe.loss(recipe.policy, rollouts, count_denominators(recipe, rollouts), Step())
    parts = [output.metrics[name].value for name in ("loss/policy", "loss/kl", "loss/kl_ema")]
    assert parts[2] > 0
    assert output.metrics["loss/total"].value == pytest.approx(float(output.loss.detach()), rel=1e-6)
    assert sum(parts) == pytest.approx(float(output.loss.detach()), rel=1e-5)


def test_gradient_on_policy_is_advantage_times_that_of_the_likelihood(tmp_path):
    config = awm(tmp_path, ema_coef=0.0)
    config.objective.kl = {"coef": 0.0}
    recipe = build(config)
    rollouts = collected(recipe)
    _, found = gradients(recipe, rollouts)
    logp = recipe.scores(recipe.policy, rollouts, WANT).logp
    (-(rollouts.advantage * logp).mean()).backward()
    expected = torch.cat([p.grad.flatten() for p in recipe.policy.parameters() if p.grad is not None])
    assert float((found - expected).norm()) <= 1e-5 * float(expected.norm())
    assert float(rollouts.advantage.abs().max()) <= 1.0


@pytest.mark.parametrize("name", ["awm", "diffusion_nft", "orw_cfm_w2", "ac_flow"])
def test_gradient_does_not_depend_on_the_micro_batch(name, tmp_path):
    config = run_config(name, tmp_path)
    config.objective.kl = {"coef": 0.5}
    if name == "ac_flow":
        config.critic.warmup_updates = 0
    recipe = build(config)
    rollouts = collected(recipe)
    disturb(recipe.policy)
    whole_loss, whole = gradients(recipe, rollouts)
    for rows in (3, 1):
        loss, parts = gradients(recipe, rollouts, rows)
        # terms of size 1 and of both signs, each rounded to 2^-24
        assert loss == pytest.approx(whole_loss, rel=1e-5, abs=2**-22)
        assert_same_gradient(parts, whole)


@pytest.mark.parametrize("name", ["awm", "diffusion_nft", "orw_cfm_w2", "ac_flow"])
def test_metrics_do_not_depend_on_the_micro_batch(name, tmp_path):
    """Processes, too, each measure a part of the rows."""
    config = run_config(name, tmp_path)
    config.objective.kl = {"coef": 0.5}
    if name == "ac_flow":
        config.critic.warmup_updates = 0
    recipe = build(config)
    rollouts = collected(recipe)
    disturb(recipe.policy, 0.3)
    counts = count_denominators(recipe, rollouts)

    def metrics(rows):
        chunks = rollouts.micro_batches(rows)
        with torch.no_grad():
            parts = [recipe.loss(recipe.policy, chunk, counts, Step()).metrics for chunk in chunks]
        return metric_values(merge_metrics(parts))

    whole = metrics(rollouts.num_rows)
    assert ("awm/velocity_norm" in whole) == (name == "awm")
    for rows in (3, 1):
        assert metrics(rows) == pytest.approx(whole, rel=1e-4, abs=1e-5, nan_ok=True)


def test_old_likelihoods_must_be_recomputed(tmp_path):
    with pytest.raises(ValueError, match=r"trainer\.old_logp must be 'recompute'"):
        run_config("awm", tmp_path, old_logp="sampler")


def test_anchor_is_the_last_policy_at_first_and_lags_behind_later(tmp_path):
    config = awm(tmp_path, ema_slope=0.2)
    trainer = make_trainer(config, tmp_path)
    average = trainer.recipe.awm.kl_ema

    def values():
        return torch.cat([value.flatten() for value in average.state_dict().values()])

    start = values()
    trainer.train_step()
    first = trained(trainer.policy)
    assert torch.equal(values(), first)
    assert not torch.equal(first.cpu(), start.cpu())
    trainer.train_step()
    second = trained(trainer.policy)
    torch.testing.assert_close(values(), 0.2 * first + 0.8 * second)
    trainer.recipe.close()


def test_off_policy_images_are_drawn_with_the_average(tmp_path):
    latents = {}
    for off_policy in (False, True):
        recipe = build(awm(tmp_path, off_policy=off_policy, ema_coef=0.0))
        start = collected(recipe).payload.latents
        disturb(recipe.policy, 0.3)
        weights = trained(recipe.policy)
        latents[off_policy] = collected(recipe).payload.latents
        assert torch.equal(trained(recipe.policy), weights)
        assert torch.equal(latents[off_policy], start) == off_policy
    assert not torch.equal(latents[True], latents[False])


@pytest.mark.parametrize(("share", "distinct"), [("batch", 1), ("group", 2), ("image", 8)])
def test_times_are_shared_as_configured(share, distinct, tmp_path):
    config = run_config("awm", tmp_path)
    config.sampler.steps = 60  # so many that no two draws are equal by chance
    config.timesteps = dataclasses.replace(config.timesteps, count=6, fraction=0.9, share_times=share)
    recipe = build(config)
    times = recipe.process.times(2, 4, Streams(0))
    assert times.shape == (8, 6)
    assert len({tuple(row) for row in times.tolist()}) == distinct
    grid = times_of(recipe.policy, 60)
    assert set(times.flatten().tolist()) <= set(grid[1:54].tolist())
    if share == "group":
        assert torch.equal(times[:4], times[:1].expand(4, -1))


def test_noise_is_shared_by_a_group_only_where_asked(tmp_path):
    for shared in (False, True):
        config = run_config("awm", tmp_path)
        config.timesteps.share_noise = shared
        rollouts = collected(build(config))
        assert len(set(rollouts.payload.noise_seed.tolist())) == (2 if shared else 8)


def test_noisy_versions_are_those_of_the_formula_and_follow_the_mask(tmp_path):
    recipe = build(run_config("awm", tmp_path))
    rollouts = collected(recipe)
    mask = torch.ones(8, 3)
    mask[0], mask[2, 1] = 0, 0
    versions = recipe.process.noisy(rollouts.replace(mask=mask))
    noisy, chosen = versions.rows, versions.decisions.index
    assert chosen.tolist() == [n for n in range(24) if n >= 3 and n != 7]
    assert noisy.image.tolist() == [n // 3 for n in chosen.tolist()]
    noise = row_noise(rollouts.payload.noise_seed, 3, (12, 4, 4))[3, 2]
    at = chosen.tolist().index(11)
    sigma, clean = rollouts.payload.sigma[3, 2], rollouts.payload.latents[3]
    torch.testing.assert_close(noisy.latents[at], (1 - sigma) * clean + sigma * noise)
    torch.testing.assert_close(noisy.target[at], noise - clean)


def test_an_averaging_leaves_the_users_own_choice_alone(tmp_path):
    config = awm(tmp_path, average="bgpo")
    assert build(config).objective.clip.kind == "bgpo"
    config.objective = ObjectiveConfig(preset="awm", clip={"kind": "unclipped"})
    assert build(config).objective.clip.kind == "unclipped"
    assert build(awm(tmp_path, average="sum_first")).objective.ratio.kind == "sequence_full"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("weighting", "cubic", "allowed: uniform, t, t2, huber, ghuber"),
        ("average", "mean", "allowed: exp_first, sum_first, bgpo"),
        ("kl_kind", "k3", "allowed: uniform, elbo"),
        ("power", 0.0, "awm.power is 0.0; must be positive"),
        ("ema_limit", 1.0, r"awm.ema_limit is 1.0; must be in \[0, 1\)"),
    ],
)
def test_unknown_choices_list_allowed_values(key, value, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        awm(tmp_path, **{key: value}).validate()
