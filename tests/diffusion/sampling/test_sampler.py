"""From seeds to latents."""

import pytest
import torch

from diffusion.sampling.latent_sampler import (
    LatentSamplerConfig,
    euler_ode,
    guided,
    row_noise,
    sample_latents,
    sample_trajectories,
    times_of,
    trained_window,
)
from mmrl.fields import check_config
from tests.diffusion.runs import build, run_config
from tests.rounding import assert_equal_up_to_rounding


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return build(run_config("awm", tmp_path_factory.mktemp("sampler"))).policy


def text_of(policy, rows):
    return policy.embeddings.rows(["a red circle"], rows)


def test_noise_depends_on_the_rows_own_seed():
    noise = row_noise(torch.tensor([3, 2**62 - 1, 3]), 2, (4, 5, 5))
    assert noise.shape == (3, 2, 4, 5, 5)
    assert torch.equal(noise[0], noise[2])
    assert torch.equal(row_noise(torch.tensor([2**62 - 1]), 2, (4, 5, 5))[0], noise[1])
    assert not torch.equal(noise[0], noise[1])
    assert not torch.equal(noise[0, 0], noise[0, 1])
    assert row_noise(torch.zeros(0, dtype=torch.int64), 2, (4,)).shape == (0, 2, 4)


def test_euler_is_the_ode_from_the_rows_noise(policy):
    seeds = torch.tensor([[1, 9], [2, 9]])
    config = LatentSamplerConfig(steps=4, guidance=3.0, solver="euler")
    found = sample_latents(policy, text_of(policy, 2), seeds, config)
    start = row_noise(seeds[:, 0], 1, policy.latent_shape)[:, 0]
    grid = times_of(policy, 4)
    velocity = guided(policy, policy, text_of(policy, 2), 3.0, "")
    with torch.no_grad():
        assert_equal_up_to_rounding(found, euler_ode(velocity, start, grid), passes=2 * config.steps)


@pytest.mark.parametrize("solver", ["euler", "sa_solver", "dpm"])
def test_each_row_is_a_function_of_its_seeds(solver, policy):
    config = LatentSamplerConfig(steps=6, guidance=1.0, solver=solver, noise_level=0.4)
    seeds = torch.tensor([[1, 1], [1, 2], [2, 1], [1, 1]])
    with torch.no_grad():
        whole = sample_latents(policy, text_of(policy, 4), seeds, config)
        alone = sample_latents(policy, text_of(policy, 1), seeds[2:3], config)
    assert_equal_up_to_rounding(alone[0], whole[2], passes=config.steps)
    assert_equal_up_to_rounding(whole[3], whole[0], passes=config.steps)
    later_noise = bool((whole[0] - whole[1]).abs().max() > 1e-3)
    assert later_noise == (solver == "sa_solver")  # the others use none after the start
    assert not torch.equal(whole[0], whole[2])


def test_single_seeds_give_two_streams(policy):
    config = LatentSamplerConfig(steps=3, guidance=1.0)
    seeds = torch.tensor([7])
    with torch.no_grad():
        run = sample_trajectories(policy, text_of(policy, 1), seeds, config, range(2))
        again = sample_trajectories(policy, text_of(policy, 1), seeds, config, range(2))
    assert torch.equal(run.latents, again.latents)
    start = row_noise(seeds, 1, policy.latent_shape)[:, 0]
    assert torch.equal(run.states[:, 0], start)
    assert run.mean is None


def test_means_are_kept_where_asked(policy):
    config = LatentSamplerConfig(steps=3, guidance=1.0)
    with torch.no_grad():
        run = sample_trajectories(policy, text_of(policy, 3), torch.tensor([1, 2, 3]), config, range(2), keep_mean=True)
    assert run.mean.shape == (3, 2, *policy.latent_shape)
    noise = (run.states[:, 1:] - run.mean).flatten(2).std(2)
    assert bool((noise > 0.05).all())


def test_guidance_of_one_costs_one_row_a_step(policy):
    for scale, rows in ((1.0, 6), (2.0, 12)):
        before = policy.cost["forward_rows"]
        with torch.no_grad():
            sample_latents(
                policy, text_of(policy, 2), torch.tensor([1, 2]), LatentSamplerConfig(steps=3, guidance=scale)
            )
        assert policy.cost["forward_rows"] - before == rows


def test_window_and_fraction():
    generator = torch.Generator().manual_seed(0)
    assert trained_window(LatentSamplerConfig(steps=10), generator) == range(9)
    assert trained_window(LatentSamplerConfig(steps=10, fraction=1.0), generator) == range(10)
    places = {trained_window(LatentSamplerConfig(steps=10, window=3), generator).start for _ in range(60)}
    assert places == {0, 1, 2}
    config = LatentSamplerConfig(steps=10, window=2, window_low=6)
    assert trained_window(config, generator) == range(6, 8)
    config.window_high = 10
    config.validate()
    assert {trained_window(config, generator).start for _ in range(60)} == {6, 7, 8}


@pytest.mark.parametrize(
    "change",
    [
        {"steps": 0},
        {"eval_steps": 0},
        {"batch_rows": 0},
        {"fraction": 0.0},
        {"random_share": 1.5},
        {"window": 11},
        {"window": 3, "window_low": 8},
        {"window": 3, "window_high": 2},
        {"window": 3, "window_high": 11},
        {"guidance": -1.0},
        {"noise_level": -0.1},
    ],
)
def test_numbers_out_of_range_are_refused(change):
    with pytest.raises(ValueError, match=rf"sampler\.{list(change)[-1]} is"):
        check_config(LatentSamplerConfig(**change), "sampler")
