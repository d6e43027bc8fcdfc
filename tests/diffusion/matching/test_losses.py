import numpy as np
import pytest
import torch

from diffusion.matching.losses import WEIGHTINGS, nft_loss, nft_weight, pseudo_log_likelihood, stack_timesteps
from diffusion.matching.times import TIME_SAMPLERS, TimestepConfig
from diffusion.matching.times import sample_times as draw
from diffusion.sampling.steps import VELOCITY_KLS, velocity_kl
from mmrl.errors import UserError

GRID = torch.cat([torch.linspace(1, 0.05, 14), torch.zeros(1)])


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def sample_times(kind, draws, source, grid=GRID, **options):
    return draw(TimestepConfig(count=draws, times=kind, **options), grid, source)


def errors(rows=7):
    values = torch.rand(2, rows, generator=generator(), dtype=torch.float64)
    return values[0] * 3, values[1]


NUMPY_WEIGHTINGS = {
    "uniform": lambda e, t: -e,
    "t": lambda e, t: -t * e,
    "t2": lambda e, t: -(t**2) * e,
    "huber": lambda e, t: -t * (np.sqrt(e + 1e-10) - 1e-5),
    "ghuber": lambda e, t: -(t / 0.25) * ((e + 1e-10) ** 0.25 - 1e-10**0.25),
}


@pytest.mark.parametrize("name", WEIGHTINGS)
def test_weightings_are_the_published_ones(name):
    error, sigma = errors()
    found = pseudo_log_likelihood(error, sigma, name)
    np.testing.assert_allclose(found.numpy(), NUMPY_WEIGHTINGS[name](error.numpy(), sigma.numpy()), rtol=1e-12)
    low = pseudo_log_likelihood(error.float(), sigma.float(), name)
    assert (found.dtype, low.dtype) == (torch.float64, torch.float32)
    torch.testing.assert_close(low, found.float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", WEIGHTINGS)
def test_likelihoods_fall_with_the_error_and_end_at_zero(name):
    error = torch.tensor([0.0, 1e-8, 1e-3, 1.0, 50.0])
    likelihood = pseudo_log_likelihood(error, torch.full((5,), 0.6), name)
    assert (likelihood.diff() < 0).all()
    assert likelihood[0] == pytest.approx(0.0, abs=1e-9)


def test_powers_of_the_generalised_huber():
    error, sigma = errors()
    almost = pseudo_log_likelihood(error, sigma, "ghuber", power=1.0)
    torch.testing.assert_close(almost, pseudo_log_likelihood(error, sigma, "t"))
    half = pseudo_log_likelihood(error, sigma, "ghuber", power=0.5)
    torch.testing.assert_close(half, 2 * pseudo_log_likelihood(error, sigma, "huber"))


@pytest.mark.parametrize("name", WEIGHTINGS)
def test_gradients_of_likelihoods_match_finite_differences(name):
    error, sigma = errors()
    leaf = error.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(pseudo_log_likelihood(leaf, sigma, name).sum(), leaf)
    ahead, behind = (pseudo_log_likelihood(error + step, sigma, name) for step in (1e-6, -1e-6))
    torch.testing.assert_close(gradient, (ahead - behind) / 2e-6, rtol=1e-6, atol=1e-8)
    if name == "ghuber":
        torch.testing.assert_close(gradient, -sigma * (error + 1e-10) ** -0.75)


def test_gradients_of_perfect_matches_are_finite():
    for name in WEIGHTINGS:
        error = torch.zeros(1, requires_grad=True)
        (gradient,) = torch.autograd.grad(pseudo_log_likelihood(error, torch.full((1,), 0.5), name).sum(), error)
        assert gradient.isfinite().all()


@pytest.mark.parametrize(("kind", "first"), [("discrete", 0), ("discrete_wo_init", 1), ("discrete_with_init", 0)])
@pytest.mark.parametrize("draws", [1, 3, 6, 11])
def test_discrete_times_are_one_of_each_stratum(kind, first, draws):
    last = 12  # int(0.9 * 14)
    hits = set()
    for seed in range(200):
        times = sample_times(kind, draws, generator(seed))
        index = [int((time == GRID).nonzero()) for time in times]
        assert times.shape == (draws,)
        hits |= set(index)
        if kind == "discrete_with_init":
            assert index[0] == 0
            strata, drawn, start = draws - 1, index[1:], 1
        else:
            strata, drawn, start = draws, index, first
        for k, found in enumerate(drawn):
            low, high = (start + (last - start) * edge / strata for edge in (k, k + 1))
            assert int(low) <= found < max(int(high), int(low) + 1)
    everything = {0} if kind == "discrete_with_init" and draws == 1 else set(range(first, last))
    assert hits == everything


def test_discrete_times_of_a_stratum_are_equally_likely():
    source = generator()
    first = torch.stack([sample_times("discrete_wo_init", 2, source)[0] for _ in range(2000)])
    # Strata 1..6 and 6..12 of the indices: floor(6.5) is 6.
    counts = torch.stack([(first == GRID[index]).sum() for index in range(1, 6)])
    assert counts.sum() == 2000
    assert counts.min() > 330


def test_more_strata_than_times_repeat_times():
    times = sample_times("discrete", 9, generator(), grid=torch.linspace(1, 0, 5), fraction=1.0)
    assert times.tolist() == pytest.approx([1, 1, 1, 0.75, 0.75, 0.5, 0.5, 0.25, 0.25])


def test_logit_normal_times_follow_their_distribution():
    times = sample_times("logit_normal", 4000, generator(), shift=1.0).double()
    assert times.shape == (4000,)
    normal = (times / (1 - times)).log()
    assert normal.mean().item() == pytest.approx(0, abs=0.01)
    assert normal.std().item() == pytest.approx(1, abs=0.01)
    shifted = sample_times("logit_normal", 4000, generator())
    torch.testing.assert_close(shifted.double(), 3 * times / (1 + 2 * times), rtol=1e-5, atol=1e-6)
    few = sample_times("logit_normal", 40, generator(), shift=1.0)
    stratum = (torch.special.ndtr((few / (1 - few)).log()) * 40).floor()
    assert torch.equal(stratum.sort().values, torch.arange(40.0))
    assert not torch.equal(stratum, stratum.sort().values)
    low = sample_times("logit_normal", 4000, generator(), shift=0.01)
    assert low.min() == pytest.approx(0.01)


def test_uniform_times_are_strata_in_random_order():
    source = generator()
    times = torch.stack([sample_times("uniform", 5, source, shift=1.0) for _ in range(300)], 1)
    stratum = ((times - 0.2) / 0.8 * 5).floor()
    assert torch.equal(stratum.sort(0).values, torch.arange(5.0)[:, None].expand(5, 300))
    assert stratum.unique(dim=1).shape[1] > 50
    shifted, unshifted = sample_times("uniform", 5, generator()).double(), times[:, 0].double()
    torch.testing.assert_close(shifted, 3 * unshifted / (1 + 2 * unshifted), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", TIME_SAMPLERS)
def test_times_repeat_with_the_seed_and_fit_the_forward_process(kind):
    first, again, other = (sample_times(kind, 4, generator(s)) for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.dtype == torch.float32
    assert (first > 0).all()
    assert (first <= 1).all()
    noisy = stack_timesteps(torch.zeros(3, 1, 2, 2), 4, generator=generator(), sigma=first)
    assert torch.equal(noisy.sigma.reshape(4, 3), first[:, None].expand(4, 3))


def rows(dtype=torch.float32, seed=0):
    """Noisy rows, their clean images, two velocities and weights."""
    clean = torch.randn(3, 1, 4, 4, generator=generator(seed), dtype=torch.float64).to(dtype)
    noisy = stack_timesteps(clean, 2, generator=generator(seed))
    velocities = torch.randn(2, 6, 1, 4, 4, generator=generator(seed + 1), dtype=torch.float64).to(dtype)
    weight = torch.rand(6, generator=generator(seed), dtype=torch.float64).to(dtype)
    return noisy, clean[noisy.image], *velocities, weight


def numpy_nft(noisy, clean, new, old, r, beta):
    x, t = noisy.latents.double().numpy(), noisy.sigma.double().numpy()[:, None, None, None]
    clean, new, old, r = (y.double().numpy() for y in (clean, new, old, r))
    losses = []
    for mixed in (beta * new + (1 - beta) * old, (1 + beta) * old - beta * new):
        miss = x - t * mixed - clean
        scale = np.maximum(np.abs(miss).mean((1, 2, 3), keepdims=True), 1e-5)
        losses.append((miss**2 / scale).mean((1, 2, 3)))
    return 5 * (r * losses[0] + (1 - r) * losses[1]) / beta


@pytest.mark.parametrize("beta", [1.0, 0.1])
def test_two_sided_loss_is_the_published_one(beta):
    noisy, clean, new, old, weight = rows()
    found = nft_loss(new, old, noisy, clean, weight, beta)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), numpy_nft(noisy, clean, new, old, weight, beta), rtol=1e-6)


def test_two_sided_loss_at_the_old_policy():
    # There v+ = v- = v_old, and the gradient is 10 sigma (1 - 2 r) (x_0 prediction - x_0) / (w D), whatever beta is.
    noisy, clean, _, old, weight = rows()
    for beta in (1.0, 0.1):
        new = old.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(nft_loss(new, old, noisy, clean, weight, beta).sum(), new)
        sigma = noisy.sigma[:, None, None, None]
        miss = noisy.latents - sigma * old - clean
        scale = miss.abs().mean((1, 2, 3), keepdim=True)
        expected = 10 * sigma * (1 - 2 * weight[:, None, None, None]) * miss / scale / 16
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)
        even = nft_loss(new, old, noisy, clean, torch.full((6,), 0.5), beta)
        assert torch.autograd.grad(even.sum(), new)[0].abs().max() < 1e-6


def test_good_images_pull_towards_them_and_bad_ones_push_away():
    noisy, clean, _, old, _ = rows()
    for weight, sign in ((1.0, -1), (0.0, 1)):
        new = old.clone().requires_grad_()
        loss = nft_loss(new, old, noisy, clean, torch.full((6,), weight), 0.5)
        (gradient,) = torch.autograd.grad(loss.sum(), new)
        moved = noisy.matching_error(old - 0.01 * gradient) - noisy.matching_error(old)
        assert (sign * moved > 0).all()


def test_only_the_new_velocity_learns():
    noisy, clean, new, old, weight = rows()
    leaves = [x.clone().requires_grad_() for x in (new, old, clean, weight)]
    loss = nft_loss(leaves[0], leaves[1], noisy, leaves[2], leaves[3], 1.0)
    found = torch.autograd.grad(loss.sum(), leaves, allow_unused=True)
    assert found[0].abs().max() > 0
    assert found[1:] == (None, None, None)


def test_weight_of_an_advantage_by_hand():
    advantage = torch.tensor([-9.0, -5.0, -1.0, 0.0, 2.5, 5.0, 7.0])
    assert nft_weight(advantage).tolist() == pytest.approx([0, 0, 0.4, 0.5, 0.75, 1, 1])


@pytest.mark.parametrize("kind", VELOCITY_KLS)
def test_velocity_divergences_are_the_published_ones(kind):
    noisy, _, new, reference, _ = rows()
    t = noisy.sigma.double().numpy().copy()
    t[0] = 1.0
    sigma = torch.from_numpy(t).float()
    squares = ((new - reference).double().numpy() ** 2).mean((1, 2, 3))
    spread = 0.7 * np.sqrt(t / (1 - np.clip(t, 0, 0.99)))
    expected = squares / (2 * spread**2) if kind == "elbo" else squares
    np.testing.assert_allclose(velocity_kl(new, reference, sigma, kind).numpy(), expected, rtol=1e-4)
    assert (velocity_kl(new, new, sigma, kind) == 0).all()
    leaves = [new.clone().requires_grad_(), reference.clone().requires_grad_()]
    found = torch.autograd.grad(velocity_kl(*leaves, sigma, kind).sum(), leaves, allow_unused=True)
    assert found[0].abs().max() > 0
    assert found[1] is None


def test_elbo_divergence_has_the_noise_of_flow_sde():
    # The same g as the sampler's, away from sigma = 1 where the two cut off differently.
    from diffusion.sampling.steps import FlowSdeStep

    v, reference = rows()[2:4]
    sigma, dt = torch.full((6,), 0.6), 0.1
    _, std = FlowSdeStep(0.9, 0.7).transition(v, reference, sigma, sigma - dt)
    squares = (v - reference).square().mean((1, 2, 3))
    torch.testing.assert_close(velocity_kl(v, reference, sigma, "elbo"), squares * dt / (2 * std.square()))


def test_mistakes_are_named():
    error, sigma = errors()
    noisy, clean, new, old, weight = rows()
    with pytest.raises(ValueError, match=r"error \(7,\) and sigma \(3,\)"):
        pseudo_log_likelihood(error, sigma[:3])
    with pytest.raises(UserError, match="a grid of 2 steps leaves no time"):
        sample_times("discrete_wo_init", 2, generator(), grid=torch.tensor([1.0, 0.5, 0.0]), fraction=0.9)
    with pytest.raises(ValueError, match="must have the same shape"):
        nft_loss(new, old, noisy, clean[:3], weight, 1.0)
    with pytest.raises(ValueError, match=r"weight has the shape \(3,\); must be \(6,\)"):
        nft_loss(new, old, noisy, clean, weight[:3], 1.0)
    with pytest.raises(ValueError, match="must have one number per row"):
        velocity_kl(new, old, noisy.sigma[:2])
