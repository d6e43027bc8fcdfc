"""AC-Flow on the states of its sampler: kept states, matching targets, and credit along a path."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from diffusion.families.base import scheduler_grid
from diffusion.matching.times import TimestepConfig
from diffusion.methods.ac_flow import towards
from diffusion.methods.latent_critic import CREDITS
from diffusion.sampling.latent_sampler import sample_latents, sample_states, sample_trajectories, text_of
from diffusion.sampling.schedule import make_solver, trained_steps
from mmrl.core.returns import explained_variance, gae
from mmrl.training.processes import make_accelerator
from mmrl.training.recipe import Step
from mmrl.training.trainer import collect_metrics
from tests.diffusion.methods.test_orw_cfm import without_critic
from tests.diffusion.runs import (
    assert_finite_differences_agree,
    build,
    collected,
    disturb,
    gradients,
    make_trainer,
    run_config,
    trained,
)
from tests.diffusion.sampling.test_schedule import SPREAD, exact_velocity
from tests.rounding import assert_equal_up_to_rounding


def states_config(folder, solver="flow_sde", noise_level=0.7, **trainer):
    """AC-Flow at three states of the paths of six steps; the critic counts from the first step on."""
    config = run_config("ac_flow", folder, **trainer)
    config.states, config.sampler.steps = "trajectory", 6
    config.sampler.solver, config.sampler.noise_level = solver, noise_level
    config.critic.warmup_updates = 0
    config.validate()
    return config


@pytest.mark.parametrize("solver", ["euler", "dpm", "sa_solver", "flow_sde", "cps"])
def test_states_are_those_of_the_solvers_own_images(solver, tmp_path):
    recipe = build(states_config(tmp_path, solver))
    sampler, text = (
        recipe.config.sampler,
        text_of(recipe.policy, recipe.train_tasks[:1], torch.zeros(4, dtype=torch.int64)),
    )
    seeds = torch.tensor([[1, 5], [1, 6], [2, 5], [3, 5]])
    with torch.no_grad():
        run = sample_states(recipe.policy, text, seeds, sampler, torch.arange(6).expand(4, -1))
        assert torch.equal(run.latents, sample_latents(recipe.policy, text, seeds, sampler))
        velocity = recipe.policy(run.states[:, -1], run.sigma[:, -1], text.expanded())
    assert torch.equal(run.states[0, 0], run.states[1, 0])
    assert torch.equal(run.states[0], run.states[1]) == (solver in ("euler", "dpm"))
    # the last step goes straight to the image: there the target is the model's own velocity
    reached = run.states[:, -1] - run.sigma[:, -1, None, None, None] * velocity
    assert_equal_up_to_rounding(run.latents, reached, passes=2)


def test_stochastic_solver_draws_the_images_of_the_trajectory_methods(tmp_path):
    recipe = build(states_config(tmp_path))
    sampler, text = (
        recipe.config.sampler,
        text_of(recipe.policy, recipe.train_tasks[:1], torch.zeros(4, dtype=torch.int64)),
    )
    seeds = torch.arange(8).reshape(4, 2)
    with torch.no_grad():
        run = sample_trajectories(recipe.policy, text, seeds, sampler, trained_steps(sampler.steps))
        kept = torch.arange(5).expand(4, -1)
        states = sample_states(recipe.policy, text, seeds, sampler, kept)
    assert_equal_up_to_rounding(states.states, run.states[:, :5], passes=6)
    assert_equal_up_to_rounding(states.latents, run.latents, passes=6)
    assert torch.equal(states.sigma, run.sigma)


@pytest.mark.parametrize("kind", ["discrete", "discrete_wo_init", "discrete_with_init"])
def test_kept_states_are_different_and_in_the_order_of_the_path(kind, tmp_path):
    config = states_config(tmp_path)
    config.timesteps.times = kind
    payload = collected(build(config)).payload
    assert payload.states.shape == (8, 3, *payload.latents.shape[1:])
    assert bool((payload.sigma[:, 1:] < payload.sigma[:, :-1]).all())
    assert bool((payload.sigma.reshape(2, 4, 3) == payload.sigma.reshape(2, 4, 3)[:, :1]).all())  # shared by a group
    assert bool((payload.sigma[:, 0] == 1).all()) or kind != "discrete_with_init"
    assert bool((payload.sigma[:, 0] < 1).all()) or kind != "discrete_wo_init"


def test_target_is_the_velocity_towards_the_image_of_the_path_by_hand(tmp_path):
    recipe = build(states_config(tmp_path))
    rollouts = collected(recipe)
    payload, noisy = rollouts.payload, recipe.process.noisy(rollouts).rows
    x, clean, t = (v.double().numpy() for v in (payload.states, payload.latents, payload.sigma))
    expected = (x - clean[:, None]) / t[..., None, None, None]
    np.testing.assert_allclose(noisy.target.numpy(), expected.reshape(noisy.target.shape), rtol=1e-4, atol=1e-5)
    assert torch.equal(noisy.latents, payload.states.flatten(0, 1))
    assert noisy.image.tolist() == [row for row in range(8) for _ in range(3)]
    # Euler's step of size t along the target ends in the image
    t = noisy.sigma.reshape(-1, 1, 1, 1)
    assert_equal_up_to_rounding(noisy.latents - t * noisy.target, payload.latents.repeat_interleave(3, 0))


def test_renoised_images_given_as_states_have_the_targets_and_the_loss_of_orw(tmp_path):
    """On a straight path the state's target is noise - x_0, so the loss equals ORW-CFM-W2's."""
    orw = build(run_config("orw_cfm_w2", tmp_path))
    rollouts = collected(orw)
    forward = orw.process.noisy(rollouts).rows
    states = forward.latents.unflatten(0, rollouts.mask.shape)
    config = without_critic(run_config("ac_flow", tmp_path))
    config.states, config.sampler.steps = "trajectory", 6
    recipe = build(config)
    given = rollouts.replace(payload=dataclasses.replace(rollouts.payload, states=states, noise_seed=None))
    found = recipe.process.noisy(given).rows
    smallest = float(forward.sigma.min())  # rounding of x_t and x_0 is divided by t
    torch.testing.assert_close(found.target, forward.target, rtol=0, atol=2**-20 / smallest)
    weighted = recipe.advantages(given, make_accelerator(), Step())
    assert torch.equal(weighted.advantage, rollouts.advantage)
    recipe.reference = recipe.start
    disturb(orw.policy)
    disturb(recipe.policy)
    expected_loss, expected = gradients(orw, rollouts)
    loss, gradient = gradients(recipe, weighted)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert float((gradient - expected).norm()) <= 1e-4 * float(expected.norm())


@pytest.mark.parametrize(
    ("solver", "noise_level"), [("euler", 0.0), ("flow_sde", 0.7), ("flow_sde", 2**0.5)], ids=["ode", "0.7", "sqrt2"]
)
def test_unweighted_targets_have_the_mean_that_theory_says(solver, noise_level):
    """E[u | x_t] on exact paths to N(MEAN, SPREAD^2): mean velocity of the ODE's rest, or the velocity itself."""
    steps, kept = 200, 100
    source = torch.Generator().manual_seed(0)
    made = make_solver(solver, scheduler_grid(FlowMatchEulerDiscreteScheduler(shift=1.0), steps, tokens=1), noise_level)
    x = torch.randn(20000, 1, 1, 1, generator=source)
    for index in range(steps):
        if index == kept:
            state, t = x, made.sigmas[index]
        x = made.step(exact_velocity(x, made.sigmas[index]), index, x, source)
    target = towards(x, state, t.expand(len(x))).flatten().double()
    found = slope(state.flatten().double(), target)
    spread = float(((1 - t) ** 2 * SPREAD**2 + t**2).sqrt())  # of x_t
    velocity = (float(t) - (1 - float(t)) * SPREAD**2) / spread**2
    rest_of_ode = (1 - SPREAD / spread) / float(t)  # x_0 - MEAN = (x_t - (1 - t) MEAN) SPREAD / spread
    assert abs(velocity - rest_of_ode) > 0.15
    if solver == "euler":
        assert found == pytest.approx(rest_of_ode, abs=0.02)
    elif noise_level == 2**0.5:
        assert found == pytest.approx(velocity, abs=0.04)
    else:
        low, high = sorted((velocity, rest_of_ode))
        assert low + 0.03 < found < high - 0.03


def slope(x, y):
    """Coefficients of the regression of y on x."""
    return float(((x - x.mean()) * (y - y.mean())).mean() / x.var(correction=0))


def test_differences_add_up_to_the_surprise_and_are_gae_of_lambda_0():
    values = torch.tensor([[0.1, 0.4, 0.2], [-0.5, 0.0, 1.0]])
    returns = torch.tensor([[1.0], [-2.0]]).expand(2, 3)
    found = CREDITS["difference"](returns, values)
    torch.testing.assert_close(found, torch.tensor([[0.3, -0.2, 0.8], [0.5, 1.0, -3.0]]))
    torch.testing.assert_close(found.sum(1), returns[:, 0] - values[:, 0])
    paid = torch.zeros(2, 3)
    paid[:, -1] = returns[:, -1]
    for name, lam in (("difference", 0.0), ("return", 1.0)):
        expected, _ = gae(paid, values, torch.ones(2, 3), 1.0, lam)
        torch.testing.assert_close(CREDITS[name](returns, values), expected)


@pytest.mark.parametrize("bound", [0.0, 0.05])
def test_weights_of_a_run_are_the_clipped_differences_of_its_critic(bound, tmp_path):
    config = states_config(tmp_path)
    config.credit, config.shaping.kind, config.advantage_bound = "difference", "none", bound
    config.orw.weighting, config.orw.normalize_weights = "advantage", False
    recipe = build(config)
    torch.nn.init.normal_(recipe.critic.critic.head[-1].weight, generator=torch.Generator().manual_seed(0))
    rollouts = collected(recipe)
    values = recipe.values(rollouts)
    assert float((values[:, 1:] - values[:, :-1]).abs().max()) > 0.05
    found = recipe.advantages(rollouts, make_accelerator(), Step()).advantage
    expected = torch.cat([values[:, 1:], rollouts.reward[:, None]], 1) - values
    torch.testing.assert_close(found, expected.clamp(-bound, bound) if bound else expected)


def velocities(recipe, rollouts):
    """Velocity at the kept states (B, T, C, H, W) as float64, and the matching error (B, T)."""
    payload = rollouts.payload
    text = text_of(recipe.policy, payload.tasks, rollouts.group.repeat_interleave(3))
    with torch.no_grad():
        v = recipe.policy(payload.states.flatten(0, 1), payload.sigma.flatten(), text.expanded())
    v = v.double().numpy().reshape(payload.states.shape)
    x, clean, t = (value.double().numpy() for value in (payload.states, payload.latents, payload.sigma))
    target = (x - clean[:, None]) / t[..., None, None, None]
    return v, ((v - target) ** 2).mean((2, 3, 4))


def test_loss_is_that_of_numpy(tmp_path):
    config = states_config(tmp_path)
    config.credit, config.objective.kl = "difference", {"coef": 0.7}
    recipe = build(config)
    rollouts = collected(recipe)
    base, _ = velocities(recipe, rollouts)
    disturb(recipe.policy, 0.2)
    v, error = velocities(recipe, rollouts)
    found, _ = gradients(recipe, rollouts)
    weight = rollouts.advantage.double().numpy()
    assert weight.mean() == pytest.approx(1.0, rel=1e-5)  # normalised
    assert found == pytest.approx((weight * error).mean() + 0.7 * ((v - base) ** 2).mean(), rel=1e-4)


def test_gradient_agrees_with_finite_differences(tmp_path):
    config = states_config(tmp_path)
    config.credit = "difference"
    assert_finite_differences_agree(build(config))


def test_run_trains_critic_and_policy_and_reports_what_the_critic_explains(tmp_path):
    config = states_config(tmp_path)
    config.credit, config.timesteps.times, config.timesteps.count = "difference", "discrete", 5
    trainer = make_trainer(config, tmp_path)
    start = trained(trainer.policy)
    trainer.train_step()
    assert not torch.equal(trained(trainer.policy), start)
    assert trainer.recipe.critic.updates == 4
    assert "mean w |v - (x_t - x_0) / t|^2" in trainer.recipe.describe()
    assert "credit difference" in trainer.recipe.describe()
    metrics = collect_metrics(trainer.recipe, collected(trainer.recipe), Step())
    for name in ("critic/explained", "critic/explained/noisy", "critic/explained/clean"):
        assert metrics[name] <= 1
    trainer.recipe.close()


def test_share_explained_by_hand():
    returns = torch.tensor([0.0, 2.0])
    assert explained_variance(returns, torch.tensor([5.0, 6.0])) == 0.75  # misses of -5 and -4
    assert explained_variance(returns, torch.zeros(2)) == 0.0
    assert explained_variance(returns, -returns) == -3.0
    assert math.isnan(explained_variance(torch.ones(2), returns))
    assert math.isnan(explained_variance(returns[:0], returns[:0]))


def test_what_cannot_be_is_refused(tmp_path):
    config = run_config("ac_flow", tmp_path)
    config.credit = "difference"
    with pytest.raises(ValueError, match="states of an image do not form a path; use states: trajectory"):
        config.validate()
    config.states, config.sampler.steps = "trajectory", 6
    for solver, noise_level in (("euler", 0.7), ("dpm", 0.7), ("sa_solver", 0.0), ("flow_sde", 0.0)):
        config.sampler.solver, config.sampler.noise_level = solver, noise_level
        with pytest.raises(ValueError, match=rf"sampler\.solver '{solver}' with noise_level .* is deterministic"):
            config.validate()
    config.sampler.noise_level = 0.7
    config.validate()
    config.critic.enabled = False
    with pytest.raises(ValueError, match="credit is 'difference', which compares values of the critic"):
        config.validate()
    config.credit = "return"
    config.validate()
    whole, config.timesteps = config.timesteps, TimestepConfig(times="logit_normal")
    with pytest.raises(ValueError, match=r"timesteps\.times is 'logit_normal', but the sampler only has states"):
        config.validate()
    config.timesteps = whole
    config.timesteps.times, config.timesteps.count = "discrete_wo_init", 5
    with pytest.raises(ValueError, match=r"count is 5, but .* leaves 4 states .* use at most 4"):
        config.validate()
    config.timesteps.count, config.timesteps.share_noise = 4, True
    with pytest.raises(ValueError, match="share_noise only applies to re-noised images"):
        config.validate()
    config.timesteps.share_noise, config.sampler.solver, config.sampler.noise_level = False, "cps", 1.5
    with pytest.raises(ValueError, match="must be at most 1 for cps"):
        config.validate()
