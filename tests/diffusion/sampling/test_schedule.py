import copy
from collections import Counter

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SASolverScheduler

from diffusion.families.base import dynamic_shift, scheduler_grid
from diffusion.sampling.latent_sampler import euler_ode
from diffusion.sampling.schedule import SOLVERS, make_solver, sa_solver_grid, sde_window, shift_sigmas, trained_steps
from mmrl.errors import UserError

SD3 = FlowMatchEulerDiscreteScheduler(shift=3.0)
FLUX = FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
MEAN, SPREAD = 0.7, 0.5


def sigma_grid(scheduler, steps, tokens=1, **options):
    return scheduler_grid(scheduler, steps, tokens=tokens, **options)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_ten_steps_of_stable_diffusion_3():
    # The shift is applied twice at the noisy end of the scheduler's own range, hence the tiny last time.
    published = [1, 0.960129, 0.913349, 0.857692, 0.790368, 0.707278, 0.602151, 0.464876, 0.278049, 0.008929, 0]
    grid = sigma_grid(SD3, 10)
    assert grid.dtype == torch.float32
    assert grid.tolist() == pytest.approx(published, abs=1e-6)
    even = np.linspace(1, 3 / 1000 / (1 + 2 / 1000), 10)
    np.testing.assert_allclose(grid[:-1].numpy(), 3 * even / (1 + 2 * even), rtol=1e-6)


@pytest.mark.parametrize("steps", [1, 4, 28])
@pytest.mark.parametrize("tokens", [16, 1024, 4096])
@pytest.mark.parametrize("even", [True, False])
def test_grid_that_depends_on_the_image_size_is_the_pipelines(steps, tokens, even):
    # The pipeline's line through (256, 0.5) and (4096, 1.15), and exp(mu) as the shift of even times.
    slope, offset = np.polyfit([256, 4096], [0.5, 1.15], 1)
    mu = slope * tokens + offset
    # Stable Diffusion 3 leaves the spacing to the scheduler, whose own range ends at its last training time
    spaced = np.linspace(1.0, 1 / steps if even or steps == 1 else FLUX.sigma_min, steps)
    grid = sigma_grid(FLUX, steps, tokens, even=even)
    np.testing.assert_allclose(grid[:-1].numpy(), np.exp(mu) / (np.exp(mu) + (1 / spaced - 1)), rtol=1e-6)
    scheduler = copy.deepcopy(FLUX)
    scheduler.set_timesteps(sigmas=spaced, mu=mu)
    torch.testing.assert_close(grid, scheduler.sigmas)
    assert dynamic_shift(FLUX, tokens) == pytest.approx(mu)


def test_the_schedulers_of_the_caller_stay_as_they_are():
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(7)
    before = scheduler.sigmas.clone()
    grid = sigma_grid(scheduler, 5)
    sa_solver_grid(grid)[0] = 5.0
    for name in SOLVERS:
        solver = make_solver(name, grid)
        for index in range(5):
            solver.step(torch.ones(1, 1, 2, 2), index, torch.ones(1, 1, 2, 2))
    assert torch.equal(scheduler.sigmas, before)
    assert scheduler.num_inference_steps == 7
    assert scheduler.step_index is None
    assert torch.equal(grid, sigma_grid(scheduler, 5))


def test_a_shift_set_later_counts():
    scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0)
    scheduler.set_shift(3.0)
    plain = np.linspace(1, 0.001, 4)
    np.testing.assert_allclose(sigma_grid(scheduler, 4)[:-1].numpy(), 3 * plain / (1 + 2 * plain), rtol=1e-6)


def test_grid_of_sa_solver_by_hand():
    grid = torch.tensor([1.0, 0.8, 0.4, 0.01, 0.0])
    assert sa_solver_grid(grid).tolist() == pytest.approx([0.999, 0.8, 0.4, 0.2, 0.0])
    assert grid[0] == 1
    # the first time of a grid that begins below it is one of the model's, such as Stable Diffusion's
    assert sa_solver_grid(torch.tensor([0.9, 0.8, 0.3, 0.01])).tolist() == pytest.approx([0.9, 0.8, 0.4, 0.01])
    with pytest.raises(UserError, match="has 1 steps"):
        sa_solver_grid(torch.tensor([1.0, 0.0]))


def test_shifts_undo_each_other_and_keep_the_ends():
    times = torch.linspace(0, 1, 11, dtype=torch.float64)
    torch.testing.assert_close(shift_sigmas(shift_sigmas(times, 3.0), 1 / 3), times)
    assert shift_sigmas(times, 3.0)[[0, 5, 10]].tolist() == pytest.approx([0, 0.75, 1])


def test_every_position_of_the_window_is_equally_likely():
    source = generator()
    places = Counter(sde_window(10, 3, 1, 6, source) for _ in range(3000))
    assert set(places) == {range(1, 4), range(2, 5), range(3, 6)}
    assert all(900 < number < 1100 for number in places.values())
    assert sde_window(4, 4, 0, 4, source) == range(4)
    assert sde_window(10, 2, 0, 5, generator(4)) == sde_window(10, 2, 0, 5, generator(4))


@pytest.mark.parametrize(
    ("steps", "size", "low", "high"), [(10, 6, 0, 5), (10, 2, -1, 5), (10, 2, 4, 11), (10, 0, 0, 5)]
)
def test_windows_without_a_position_are_refused(steps, size, low, high):
    with pytest.raises(UserError, match=f"a window of {size} steps within {low}..{high} of {steps} steps"):
        sde_window(steps, size, low, high, generator())


def test_trained_steps():
    assert trained_steps(10) == range(9)
    assert trained_steps(40) == range(39)
    assert trained_steps(16, 0.6) == range(9)
    assert trained_steps(5, 1.0) == range(5)
    for steps, fraction in ((1, 0.99), (10, 0.0), (10, 1.1)):
        with pytest.raises(UserError, match="trains none"):
            trained_steps(steps, fraction)


def exact_velocity(x, sigma):
    """Velocity of the flow from noise to N(MEAN, SPREAD^2)."""
    signal = 1 - float(sigma)
    variance = signal**2 * SPREAD**2 + float(sigma) ** 2
    centred = x - signal * MEAN
    return float(sigma) / variance * centred - MEAN - signal * SPREAD**2 / variance * centred


def sampled(name, steps, noise_level=0.0, shift=3.0, seed=1):
    """Mean and standard deviation of samples; their starting noise has exactly mean 0 and deviation 1."""
    solver = make_solver(name, sigma_grid(FlowMatchEulerDiscreteScheduler(shift=shift), steps), noise_level)
    x = torch.randn(20000, 1, 2, 1, generator=generator())
    x, source = (x - x.mean()) / x.std(), generator(seed)
    for index in range(steps):
        x = solver.step(exact_velocity(x, solver.sigmas[index]), index, x, source)
    return x.mean().item(), x.std().item()


@pytest.mark.parametrize("name", SOLVERS)
def test_solvers_reach_the_target_distribution(name):
    mean, spread = sampled(name, 100)
    assert mean == pytest.approx(MEAN, abs=0.002)
    assert spread == pytest.approx(SPREAD, abs=0.02)


def test_random_solver_reaches_the_target_distribution_too():
    mean, spread = sampled("sa_solver", 100, noise_level=0.8)
    assert mean == pytest.approx(MEAN, abs=0.01)
    assert spread == pytest.approx(SPREAD, abs=0.02)


@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize("name", ["sa_solver", "dpm"])
def test_second_order_beats_euler_at_ten_steps(name, shift):
    euler, better = (sampled(solver, 10, shift=shift) for solver in ("euler", name))
    assert abs(better[1] - SPREAD) < 0.8 * abs(euler[1] - SPREAD)
    assert better[0] == pytest.approx(MEAN, abs=0.001)


def test_euler_is_the_schedulers_and_ours():
    scheduler, x = copy.deepcopy(SD3), torch.randn(2, 1, 2, 2, generator=generator())
    scheduler.set_timesteps(6)
    solver, expected = make_solver("euler", sigma_grid(SD3, 6)), x
    followed = euler_ode(exact_velocity, x, solver.sigmas)
    for index, t in enumerate(scheduler.timesteps):
        sigma = solver.sigmas[index]
        x = solver.step(exact_velocity(x, sigma), index, x)
        expected = scheduler.step(exact_velocity(expected, sigma), t, expected).prev_sample
    torch.testing.assert_close(x, expected)
    torch.testing.assert_close(x, followed)


def numpy_multistep(x, grid):
    """DPM-Solver++ 2M in its own coordinates, half log-SNR, with x_0 predictions."""
    old = None
    for i in range(len(grid) - 1):
        s, t = grid[i], grid[i + 1]
        clean = x - s * exact_velocity(x, s)
        direction = clean
        if old is not None and t > 0 and grid[i - 1] < 1:
            half = [np.log((1 - time) / time) for time in (grid[i - 1], s, t)]
            direction = clean + (half[2] - half[1]) / (2 * (half[1] - half[0])) * (clean - old)
        # exp(-h) = (alpha_s sigma_t) / (alpha_t sigma_s)
        x = t / s * x + ((1 - t) - (1 - s) * t / s) * direction
        old = clean
    return x


@pytest.mark.parametrize("steps", [1, 2, 10, 20])
def test_dpm_is_the_multistep_rule_of_the_paper(steps):
    solver = make_solver("dpm", sigma_grid(SD3, steps))
    x = torch.randn(3, 1, 2, 2, generator=generator())
    expected = numpy_multistep(x.double().numpy(), solver.sigmas.double().numpy())
    for index in range(steps):
        x = solver.step(exact_velocity(x, solver.sigmas[index]), index, x)
    np.testing.assert_allclose(x.numpy(), expected, rtol=0, atol=2e-5)
    assert solver.sigmas[0] == 1
    if steps > 2:
        assert solver.sigmas[-2] == solver.sigmas[-3] / 2


def run(solver, seed=None, dtype=torch.float32):
    x = torch.randn(2, 1, 4, 4, generator=generator()).to(dtype)
    source = None if seed is None else generator(seed)
    for index in range(len(solver.sigmas) - 1):
        x = solver.step(exact_velocity(x, solver.sigmas[index]).to(dtype), index, x, source)
    return x


@pytest.mark.parametrize("name", SOLVERS)
def test_one_solver_serves_many_rollouts_and_leaves_the_global_generator_alone(name):
    solver = make_solver(name, sigma_grid(SD3, 6))
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = run(solver)
    assert torch.equal(first, run(solver))
    assert torch.equal(first, run(make_solver(name, sigma_grid(SD3, 6)), seed=5))
    assert torch.equal(before, torch.get_rng_state())
    low = run(solver, dtype=torch.bfloat16)
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), first, rtol=0.1, atol=0.1)


def test_noise_comes_from_the_generator_and_only_in_the_middle():
    solver = make_solver("sa_solver", sigma_grid(SD3, 14), noise_level=0.4)
    assert torch.equal(run(solver, 1), run(solver, 1))
    assert (run(solver, 1) - run(solver, 2)).abs().max() > 0.05
    noiseless = make_solver("sa_solver", sigma_grid(SD3, 14))
    x = torch.randn(2, 1, 4, 4, generator=generator())
    for index in range(13):
        v, sigma = exact_velocity(x, solver.sigmas[index]), float(solver.sigmas[index])
        random = solver.step(v, index, x, generator(index))
        quiet = noiseless.step(v, index, x)
        # The correction repeats the noise of the step before, so a step is quiet only after a quiet one.
        earlier = float(solver.sigmas[max(index - 1, 0)])
        if not any(0.3 <= time <= 0.9 for time in (sigma, earlier)):
            torch.testing.assert_close(random, quiet)
        if 0.3 <= sigma <= 0.9:
            assert (random - quiet).abs().max() > 0.01
        x = random


def test_rows_with_their_own_generators_do_not_depend_on_the_batch():
    def sample(rows):
        solver, sources = (
            make_solver("sa_solver", sigma_grid(SD3, 8), noise_level=0.4),
            [generator(row) for row in rows],
        )
        x = torch.stack([torch.randn(1, 4, 4, generator=source) for source in sources])
        for index in range(8):
            x = solver.step(exact_velocity(x, solver.sigmas[index]), index, x, sources)
        return x

    together = sample([0, 1, 2])
    assert torch.equal(together, torch.cat([sample([0]), sample([1, 2])]))


def test_all_steps_but_the_first_and_the_last_are_corrected(monkeypatch):
    corrected, correct = [], SASolverScheduler.stochastic_adams_moulton_update

    def recorded(scheduler, **arguments):
        corrected.append((scheduler.step_index - 1, arguments["order"]))
        return correct(scheduler, **arguments)

    monkeypatch.setattr(SASolverScheduler, "stochastic_adams_moulton_update", recorded)
    run(make_solver("sa_solver", sigma_grid(SD3, 6)))
    assert corrected == [(1, 2), (2, 2), (3, 2)]


def test_what_a_solver_cannot_do_is_named():
    x = torch.ones(1, 1, 2, 2)
    for name in ("euler", "dpm"):
        with pytest.raises(UserError, match=f"noise_level is 0.4, but the solver '{name}' adds no noise"):
            make_solver(name, sigma_grid(SD3, 4), 0.4)
    with pytest.raises(UserError, match="every step needs a generator"):
        make_solver("sa_solver", sigma_grid(SD3, 4), 0.4).step(x, 0, x)
    solver = make_solver("dpm", sigma_grid(SD3, 4))
    solver.step(x, 0, x)
    with pytest.raises(ValueError, match="step 2 does not follow step 0"):
        solver.step(x, 2, x)
