import pytest
import torch

from diffusion.families.table import family_of
from diffusion.matching.losses import mix, stack_timesteps
from diffusion.matching.times import TimestepConfig
from diffusion.matching.velocity import FlowMatching
from diffusion.models.conditioning import PromptEmbeddings
from diffusion.models.diffusion_policy import PipelineConfig, load_policy
from diffusion.sampling.latent_sampler import GuidedVelocity, LatentSamplerConfig
from mmrl.errors import UserError
from mmrl.training.processes import Streams
from tests.diffusion.builders import SIZES, T5_TOKENS, RowCounter, load_sd3
from tests.diffusion.families.cases import CASES
from tests.rounding import assert_equal_up_to_rounding


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def images(count, seed=5):
    shape = (count, SIZES.latent_channels, SIZES.latent_size, SIZES.latent_size)
    return torch.randn(shape, generator=generator(seed))


def test_rows_lie_on_the_line_from_image_to_noise():
    clean = images(3)
    noisy = stack_timesteps(clean, 4, generator=generator())
    assert len(noisy) == 12
    assert noisy.image.tolist() == [0, 1, 2] * 4
    sigma = noisy.sigma[:, None, None, None]
    torch.testing.assert_close(noisy.latents - sigma * noisy.target, clean.repeat(4, 1, 1, 1))
    noise = noisy.latents + (1 - sigma) * noisy.target
    assert noise.mean().abs() < 0.05
    assert noise.std() == pytest.approx(1.0, abs=0.05)
    assert torch.unique(noise.flatten(1), dim=0).shape[0] == 12


def test_noisy_latents_are_those_of_the_scheduler():
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(6)
    clean = images(2)
    noisy = stack_timesteps(clean, 3, generator=generator(), sigma=scheduler.sigmas[1:4])
    noise = noisy.latents + (1 - noisy.sigma[:, None, None, None]) * noisy.target
    expected = scheduler.scale_noise(clean.repeat(3, 1, 1, 1), scheduler.timesteps[1:4].repeat_interleave(2), noise)
    assert_equal_up_to_rounding(noisy.latents, expected)


def test_times_are_one_of_each_interval_unless_given():
    times = stack_timesteps(images(50), 4, generator=generator()).sigma.reshape(4, 50)
    assert ((times * 4).floor() == torch.arange(4)[:, None]).all()
    assert torch.unique(times).numel() == 200
    given = torch.rand(4, 2, generator=generator())
    assert torch.equal(stack_timesteps(images(2), 4, generator=generator(), sigma=given).sigma, given.flatten())


def test_same_seed_same_draws_and_smaller_batches_change_nothing():
    clean = images(4)
    whole, again, other = (stack_timesteps(clean, 3, generator=generator(seed)) for seed in (1, 1, 2))
    assert torch.equal(whole.latents, again.latents)
    assert not torch.equal(whole.latents, other.latents)
    parts = [whole.select(slice(start, start + 5)) for start in range(0, 12, 5)]
    assert torch.equal(torch.cat([part.latents for part in parts]), whole.latents)
    assert torch.equal(torch.cat([part.image for part in parts]), whole.image)


def test_matching_error_is_the_mean_square_by_row():
    noisy = stack_timesteps(images(2), 2, generator=generator())
    assert torch.equal(noisy.matching_error(noisy.target), torch.zeros(4))
    shifted = noisy.target + torch.tensor([1.0, 2.0, 3.0, 4.0])[:, None, None, None]
    torch.testing.assert_close(noisy.matching_error(shifted), torch.tensor([1.0, 4.0, 9.0, 16.0]))


@pytest.fixture
def trained(folder):
    pipeline = load_sd3(folder)
    cache = PromptEmbeddings(family_of(pipeline, max_sequence_length=T5_TOKENS))
    return pipeline.transformer, family_of(pipeline).model(), cache.rows(["a red circle", "a blue square"])


def test_stacked_draws_equal_one_call_for_each(trained):
    transformer, model, text = trained
    noisy = stack_timesteps(images(2), 3, generator=generator())
    weights = list(transformer.parameters())
    weights = [weight for weight in weights if weight.requires_grad]

    def error_and_gradient(rows):
        velocity = GuidedVelocity(model, text.select(rows.image))(rows.latents, rows.sigma)
        error = rows.matching_error(velocity)
        return error.detach(), torch.autograd.grad(error.sum(), weights, allow_unused=True)

    with RowCounter([transformer]) as counter:
        stacked, gradient = error_and_gradient(noisy)
    assert (counter.calls, counter.rows) == (1, 6)
    parts = [error_and_gradient(noisy.select(slice(2 * k, 2 * k + 2))) for k in range(3)]
    assert_equal_up_to_rounding(stacked, torch.cat([error for error, _ in parts]))
    summed = [None if g[0] is None else sum(g) for g in zip(*(gradients for _, gradients in parts), strict=True)]
    for one, other in zip(gradient, summed, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert (one - other).norm() <= 1e-4 * other.norm() + 1e-7


@pytest.mark.parametrize(
    ("options", "culprit"),
    [
        ({"draws": 0}, "draws=0"),
        ({"sigma": torch.rand(2)}, r"sigma has the shape \(2,\); must be \(3,\) or \(3, 4\)"),
        ({"sigma": torch.tensor([0.1, 0.5, 1.5])}, "ranges from 0.1 to 1.5"),
        ({"sigma": torch.tensor([0.1, 0.5, float("nan")])}, "between 0 and 1"),
    ],
)
def test_draws_that_do_not_fit_are_named(options, culprit):
    with pytest.raises(UserError, match=culprit):
        stack_timesteps(images(4), **({"draws": 3, "generator": generator()} | options))


def test_a_perfect_prediction_of_the_noise_has_no_error_at_any_drawn_time(tmp_path):
    policy = load_policy(PipelineConfig(path=str(CASES["stable_diffusion"].build(tmp_path / "pipeline"))))
    process = FlowMatching(policy, LatentSamplerConfig(), TimestepConfig(count=1, times="uniform"))
    sigma = process.times(64, 1, Streams(0))[:, 0]
    clean, noise = torch.randn(2, 64, *policy.latent_shape, generator=generator())
    noisy = mix(clean, noise, sigma, torch.arange(64))
    text = {"tokens": torch.zeros(64, 1, 1)}
    velocity = policy.family.velocity(lambda *args, **options: (noise,), noisy.latents, sigma, text)
    assert noisy.matching_error(velocity).max() < 1e-8
    assert sigma.max() == pytest.approx(policy.family.max_time)  # the model's schedule ends before pure noise
