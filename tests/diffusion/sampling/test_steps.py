import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from diffusion.sampling.steps import (
    STEPS,
    CpsStep,
    DanceSdeStep,
    DdimStep,
    FlowSdeStep,
    LinearSdeStep,
    OdeStep,
    flow_grpo_head_kl,
    gaussian_kl,
    guard_log_ratio,
    sample_step,
)
from mmrl.errors import UserError

SHAPE = (3, 2, 4, 4)
SIGMA_MAX = 0.960129
OPTIONS = {
    "ode": {},
    "flow_sde": {"noise_level": 0.7, "sigma_max": SIGMA_MAX},
    "dance_sde": {"eta": 0.3},
    "cps": {"noise_level": 0.8},
    "ddim": {"eta": 0.9},
    "linear_sde": {"noise_level": 0.9, "sigma_max": SIGMA_MAX},
}
RANDOM = sorted(set(OPTIONS) - {"ode"})
TIMES = [(1.0, SIGMA_MAX), (0.707278, 0.602151), (0.278049, 0.008929)]


def drawn(seed=0, dtype=torch.float32, shape=SHAPE):
    """Velocity, latents and noise."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3)]


def kernel(name):
    return STEPS[name](**OPTIONS[name])


def times(name, index=1, dtype=torch.float32):
    return [torch.tensor(time, dtype=dtype) for time in TIMES[index]]


def numpy_transition(name, v, x, s, n):
    """The published formulas in numpy float64."""
    dt = n - s
    if name == "ode":
        return x + dt * v, 0.0
    if name == "flow_sde":
        std = 0.7 * np.sqrt(s / (1 - (SIGMA_MAX if s == 1 else s)))
        mean = x * (1 + std**2 / (2 * s) * dt) + v * (1 + std**2 * (1 - s) / (2 * s)) * dt
        return mean, std * np.sqrt(-dt)
    if name == "linear_sde":
        std = 0.9 * SIGMA_MAX * s
        mean = x * (1 + std**2 / (2 * s) * dt) + v * (1 + std**2 * (1 - s) / (2 * s)) * dt
        return mean, std * np.sqrt(-dt)
    if name == "dance_sde":
        score = -(x - (1 - s) * (x - s * v)) / s**2
        return x + dt * v - 0.5 * 0.3**2 * score * dt, 0.3 * np.sqrt(-dt)
    if name == "cps":
        std = n * np.sin(0.8 * np.pi / 2)
        return (1 - n) * (x - s * v) + np.sqrt(n**2 - std**2) * (x + (1 - s) * v), std
    a, b = ((1 - t) ** 2 / ((1 - t) ** 2 + t**2) for t in (s, n))  # of x_0 and noise, before and after
    std = 0.9 * np.sqrt((1 - b) / (1 - a) * (1 - a / b))
    scale = np.sqrt(b) + np.sqrt(1 - b)
    return (np.sqrt(b) * (x - s * v) + np.sqrt(1 - b - std**2) * (x + (1 - s) * v)) / scale, std / scale


def numpy_log_prob(name, previous, mean, std):
    if name == "cps":
        return -((previous - mean) ** 2).mean((1, 2, 3))
    density = np.exp(-((previous - mean) ** 2) / (2 * std**2)) / (std * np.sqrt(2 * np.pi))
    return np.log(density).mean((1, 2, 3))


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("name", OPTIONS)
def test_transitions_are_the_published_ones(name, index):
    v, x, _ = drawn()
    s, n = times(name, index)
    mean, std = kernel(name).transition(v, x, s, n)
    # float32 rounds the times first, which 1 - sigma amplifies near 1
    expected = numpy_transition(
        name, v.double().numpy(), x.double().numpy(), *[float(np.float32(t)) for t in TIMES[index]]
    )
    np.testing.assert_allclose(mean.numpy(), expected[0], rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(std.numpy(), np.full(3, expected[1]), rtol=2e-6, atol=0)
    assert mean.dtype == std.dtype == torch.float32


@pytest.mark.parametrize("name", RANDOM)
def test_log_probabilities_are_those_of_the_density(name):
    v, x, z = drawn(dtype=torch.float64)
    s, n = times(name, dtype=torch.float64)
    result = sample_step(kernel(name), v, x, s, n, z)
    expected = numpy_log_prob(name, *(y.numpy() for y in (result.previous, result.mean)), float(result.std[0]))
    np.testing.assert_allclose(result.logp.numpy(), expected, rtol=1e-12)
    torch.testing.assert_close(result.previous, result.mean + result.std[:, None, None, None] * z)


@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
def test_ddim_steps_are_those_of_diffusers(eta):
    from diffusers import DDIMScheduler

    scheduler = DDIMScheduler(clip_sample=False, set_alpha_to_one=False, steps_offset=1, beta_schedule="scaled_linear")
    scheduler.set_timesteps(20)
    predicted, x, z = drawn()
    for t in (scheduler.timesteps[0], scheduler.timesteps[9], scheduler.timesteps[-2]):
        alphas = torch.stack([scheduler.alphas_cumprod[t], scheduler.alphas_cumprod[t - 50]]).double()
        scale = alphas.sqrt() + (1 - alphas).sqrt()
        sigma = (1 - alphas).sqrt() / scale
        clean = (x - (1 - alphas[0]).sqrt() * predicted) / alphas[0].sqrt()
        result = sample_step(DdimStep(eta), predicted - clean, x / scale[0], *sigma, z)
        expected = scheduler.step(predicted, int(t), x, eta=eta, variance_noise=z if eta else None).prev_sample
        torch.testing.assert_close((result.previous * scale[1]).float(), expected, rtol=1e-5, atol=1e-4)


def test_euler_steps_are_those_of_diffusers():
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(10)
    v, x, z = drawn()
    result = sample_step(OdeStep(), v, x, scheduler.sigmas[0], scheduler.sigmas[1], z)
    torch.testing.assert_close(result.previous, scheduler.step(v, scheduler.timesteps[0], x).prev_sample)
    assert (result.std == 0).all()
    assert result.logp.isnan().all()


@pytest.mark.parametrize("quiet", [FlowSdeStep(SIGMA_MAX, 0.0), DanceSdeStep(0.0), CpsStep(0.0), DdimStep(0.0)])
def test_without_noise_every_kernel_is_the_ode(quiet):
    v, x, _ = drawn()
    for s, n in ([torch.tensor(t) for t in pair] for pair in TIMES):
        mean, std = quiet.transition(v, x, s, n)
        torch.testing.assert_close(mean, OdeStep().transition(v, x, s, n)[0], rtol=1e-5, atol=1e-5)
        assert (std == 0).all()


def gaussian_velocity(x, sigma, mean=0.7, spread=0.5):
    """Exact velocity for x_0 ~ N(mean, spread^2)."""
    signal = 1 - sigma
    variance = signal**2 * spread**2 + sigma**2
    centred = x - signal * mean
    return sigma / variance * centred - mean - signal * spread**2 / variance * centred


@pytest.mark.parametrize(("name", "tolerance"), [("flow_sde", 0.06), ("dance_sde", 0.03)])
def test_sde_steps_keep_the_marginals(name, tolerance):
    generator = torch.Generator().manual_seed(3)
    grid = torch.linspace(1, 0.04, 49)
    x = torch.randn(4000, 1, 2, 2, generator=generator)
    step = STEPS[name](**OPTIONS[name] | ({"sigma_max": float(grid[1])} if name == "flow_sde" else {}))
    for s, n in pairwise(grid):
        x = sample_step(step, gaussian_velocity(x, s), x, s, n, torch.randn(x.shape, generator=generator)).previous
    signal, sigma = 0.96, 0.04
    assert x.mean().item() == pytest.approx(signal * 0.7, abs=0.02)
    assert x.std().item() == pytest.approx(math.hypot(signal * 0.5, sigma), rel=tolerance)


def test_coefficient_preserving_steps_lose_the_spread_that_the_prediction_averages_out():
    # For a Gaussian the predictions are linear in x, so the variance follows a recursion in numpy.
    generator = torch.Generator().manual_seed(3)
    grid, x, variance = torch.linspace(1, 0.04, 11), torch.randn(20000, 1, 2, 2, generator=generator), 1.0
    for s, n in pairwise(grid):
        x = sample_step(
            CpsStep(0.8), gaussian_velocity(x, s), x, s, n, torch.randn(x.shape, generator=generator)
        ).previous
        t, u = float(s), float(n)
        total = (1 - t) ** 2 * 0.25 + t**2
        slope = (1 - u) * (1 - t) * 0.25 / total + u * np.cos(0.4 * np.pi) * t / total
        variance = slope**2 * variance + (u * np.sin(0.4 * np.pi)) ** 2
    assert x.mean().item() == pytest.approx(0.96 * 0.7, abs=0.01)
    assert x.std().item() == pytest.approx(variance**0.5, rel=0.01)
    assert x.std() < 0.9 * math.hypot(0.96 * 0.5, 0.04)


def test_a_coefficient_preserving_step_keeps_the_noise_of_the_path_exactly():
    # With the true x_0 known, one step of any length lands on the path: variance sigma'^2 around (1 - sigma') x_0.
    noise, _, fresh = drawn(shape=(50, 1, 32, 32))
    clean = torch.full_like(noise, 2.0)
    s, n = torch.tensor(0.9), torch.tensor(0.3)
    previous = sample_step(CpsStep(0.8), noise - clean, (1 - s) * clean + s * noise, s, n, fresh).previous
    assert previous.mean().item() == pytest.approx(0.7 * 2.0, abs=0.005)
    assert previous.std().item() == pytest.approx(0.3, rel=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", RANDOM)
def test_evaluating_stored_latents_again_gives_ratio_one(name, dtype):
    v, x, z = drawn(dtype=dtype)
    s, n = times(name)
    step = kernel(name)
    result = sample_step(step, v, x, s, n, z)
    assert result.previous.dtype == dtype
    assert result.logp.dtype == torch.float32
    again = step.log_prob(result.previous, *step.transition(v, x, s, n))
    assert torch.equal((again - result.logp).exp(), torch.ones(3))
    if dtype != torch.float32:
        unrounded = step.log_prob(result.mean + result.std[:, None, None, None] * z, result.mean, result.std)
        assert not torch.equal(unrounded, result.logp)


@pytest.mark.parametrize("name", OPTIONS)
def test_rows_may_have_their_own_times(name):
    v, x, z = drawn()
    pairs = [times(name, index) for index in range(3)]
    s, n = (torch.stack(column) for column in zip(*pairs, strict=True))
    together = sample_step(kernel(name), v, x, s, n, z)
    for row, pair in enumerate(pairs):
        alone = sample_step(kernel(name), v[row, None], x[row, None], *pair, z[row, None])
        for field in ("mean", "std", "previous", "logp"):
            torch.testing.assert_close(getattr(together, field)[row, None], getattr(alone, field), equal_nan=True)


@pytest.mark.parametrize("name", RANDOM)
def test_gradients_match_finite_differences_with_constant_samples(name):
    v, x, z = drawn(dtype=torch.float64, shape=(2, 1, 2, 2))
    s, n = times(name, dtype=torch.float64)
    step = kernel(name)
    v.requires_grad_()
    result = sample_step(step, v, x, s, n, z)
    assert not result.previous.requires_grad
    (gradient,) = torch.autograd.grad(result.logp.sum(), v)

    def logp(velocity):
        return step.log_prob(result.previous, *step.transition(velocity, x, s, n)).sum()

    flat = v.detach().flatten()
    for i in range(len(flat)):
        bump = torch.zeros_like(flat)
        bump[i] = 1e-6
        slope = (logp((flat + bump).view_as(v)) - logp((flat - bump).view_as(v))) / 2e-6
        assert gradient.flatten()[i].item() == pytest.approx(slope.item(), rel=1e-6, abs=1e-8)
    previous = result.previous.clone().requires_grad_()
    mean = result.mean.detach().requires_grad_()
    through = torch.autograd.grad(step.log_prob(previous, mean, result.std).sum(), [previous, mean], allow_unused=True)
    assert through[0] is None
    assert through[1].abs().max() > 0


def two_steps(name="flow_sde"):
    v, x, z = drawn(dtype=torch.float64)
    s, n = times(name, dtype=torch.float64)
    old = sample_step(kernel(name), v, x, s, n, z)
    mean, std = kernel(name).transition(v + 0.01 * drawn(7, torch.float64)[0], x, s, n)
    return old, mean, std, z, s, n


def test_divergence_is_that_of_two_gaussians():
    old, mean, std, _, s, n = two_steps()
    normal = torch.distributions.Normal
    exact = torch.distributions.kl_divergence(normal(mean, std[0]), normal(old.mean, std[0])).mean((1, 2, 3))
    torch.testing.assert_close(gaussian_kl(mean, old.mean, std), exact)
    spread = 0.7 * math.sqrt(0.707278 / (1 - 0.707278))
    head = ((mean - old.mean) ** 2).mean((1, 2, 3)) / (2 * spread**2)
    torch.testing.assert_close(flow_grpo_head_kl(mean, old.mean, std, s, n), head)
    assert (gaussian_kl(mean, mean, std) == 0).all()


def test_divergence_of_flow_sde_in_terms_of_velocities():
    # |dt| / 2 (std_t (1 - s) / (2 s) + 1 / std_t)^2 mean((v - v_ref)^2), as the paper writes it
    v, x, _ = drawn(dtype=torch.float64)
    reference = drawn(7, torch.float64)[0]
    s, n = times("flow_sde", dtype=torch.float64)
    (mean, std), (mean_ref, _) = (kernel("flow_sde").transition(u, x, s, n) for u in (v, reference))
    spread = 0.7 * (s / (1 - s)).sqrt()
    factor = (s - n) / 2 * (spread * (1 - s) / (2 * s) + 1 / spread) ** 2
    torch.testing.assert_close(gaussian_kl(mean, mean_ref, std), factor * (v - reference).square().mean((1, 2, 3)))


def test_divergences_pull_on_the_policy_only():
    old, mean, std, _, s, n = two_steps()
    policy, reference = mean.clone().requires_grad_(), old.mean.clone().requires_grad_()
    for value in (gaussian_kl(policy, reference, std), flow_grpo_head_kl(policy, reference, std, s, n)):
        found = torch.autograd.grad(value.sum(), [policy, reference], allow_unused=True)
        assert found[1] is None
        assert found[0].abs().max() > 0


def test_a_grid_that_begins_just_below_1_has_the_same_first_step():
    # UniPC's flow times begin at 0.999999, where the plain noise would be 700 times as large
    velocity, latents, _ = drawn(dtype=torch.float64)
    step, after = kernel("flow_sde"), torch.tensor(SIGMA_MAX, dtype=torch.float64)
    first, below = (
        step.transition(velocity, latents, torch.tensor(s, dtype=torch.float64), after) for s in (1.0, 1 - 1e-6)
    )
    for one, other in zip(first, below, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", sorted(set(RANDOM) - {"cps"}))
def test_gradient_scale_is_the_gradient_of_the_log_density(name):
    velocity, latents, noise = drawn(dtype=torch.float64)
    velocity.requires_grad_()
    step, (sigma, sigma_next) = kernel(name), times(name, dtype=torch.float64)
    mean, std = step.transition(velocity, latents, sigma, sigma_next)
    previous = (mean + std.reshape(-1, 1, 1, 1) * noise).detach()
    step.log_prob(previous, mean, std).sum().backward()
    size = velocity[0].numel()
    scale = step.gradient_scale(sigma.expand(3), sigma_next.expand(3))
    assert scale.shape == (3,)
    found = (velocity.grad.flatten(1).norm(dim=1) * size / noise.flatten(1).norm(dim=1)).numpy()
    np.testing.assert_allclose(scale.numpy(), found, rtol=1e-5)


def test_weights_of_flash_grpo():
    # the table in Shredded-Pork/Flash-GRPO scripts/train_wanx2_1_flash.py, whose grid is rounded otherwise
    table = [7.4770, 7.0414, 6.6112, 6.1867, 5.7682, 5.3559, 4.9502, 4.5513, 4.1596, 3.7754]
    plain = torch.linspace(1, 1 / 1000, 21, dtype=torch.float64)[:-1]
    grid = 3 * plain / (1 + 2 * plain)
    scale = LinearSdeStep(float(grid[1])).gradient_scale(grid[:10], grid[1:11])
    np.testing.assert_allclose(1 / scale.numpy(), table, rtol=3e-3)


def test_guarded_log_ratio_is_the_product_of_noise_and_move():
    old, mean, std, z, _, _ = two_steps()
    logp = kernel("flow_sde").log_prob(old.previous, mean, std)
    guarded = guard_log_ratio(logp, old.logp, mean, old.mean, std)
    torch.testing.assert_close(guarded, (z * (mean - old.mean)).mean((1, 2, 3)))
    expected = (logp - old.logp).numpy() * std.numpy()
    expected += ((mean - old.mean) ** 2).mean((1, 2, 3)).numpy() / (2 * std.numpy())
    np.testing.assert_allclose(guarded.numpy(), expected, rtol=1e-10)
    assert (guard_log_ratio(old.logp, old.logp, old.mean, old.mean, std) == 0).all()


def test_guarded_log_ratio_is_unbiased_where_the_plain_one_is_not():
    shape = (4000, 1, 2, 2)
    z = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mean_old, mean, std = torch.zeros_like(z), torch.full_like(z, 0.3), torch.full((4000,), 0.5, dtype=torch.float64)
    step = DanceSdeStep(0.5)
    previous = 0.5 * z
    logp_old, logp = (step.log_prob(previous, m, std) for m in (mean_old, mean))
    assert (logp - logp_old).mean().item() == pytest.approx(-(0.3**2) / (2 * 0.5**2), abs=0.02)
    assert guard_log_ratio(logp, logp_old, mean, mean_old, std).mean().item() == pytest.approx(0.0, abs=0.01)


@pytest.mark.parametrize(
    ("name", "options", "culprit"),
    [
        ("flow_sde", {"sigma_max": 1.0}, "sigma_max is 1.0"),
        ("flow_sde", {"sigma_max": 0.9, "noise_level": -1}, "noise_level is -1"),
        ("dance_sde", {"eta": -0.1}, "eta is -0.1"),
        ("cps", {"noise_level": 1.2}, r"noise_level is 1\.2; must be in \[0, 1\]"),
        ("ddim", {"eta": float("nan")}, "eta is nan"),
    ],
)
def test_impossible_noise_levels_are_refused(name, options, culprit):
    with pytest.raises(UserError, match=culprit):
        STEPS[name](**options)


def test_shapes_that_do_not_fit_are_named():
    v, x, _ = drawn()
    one = torch.tensor(0.5)
    with pytest.raises(ValueError, match=r"velocity \(2, 2, 4, 4\) and latents \(3, 2, 4, 4\)"):
        OdeStep().transition(v[:2], x, one, one)
    with pytest.raises(ValueError, match=r"shape \(2,\); must be \(\) or \(3,\)"):
        OdeStep().transition(v, x, one, torch.rand(2))
