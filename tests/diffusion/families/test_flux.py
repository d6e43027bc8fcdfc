import copy

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from diffusion.families.base import pack_latents, unpack_latents
from diffusion.families.table import family_of
from diffusion.models.conditioning import PromptEmbeddings
from diffusion.models.diffusion_policy import PipelineConfig, load_policy
from diffusion.models.pipelines import load_pipeline
from diffusion.sampling.latent_sampler import LatentSamplerConfig, row_noise, sample_latents
from mmrl.errors import UserError
from tests.diffusion.builders import CAPTIONS, FLUX_SIZES, T5_TOKENS
from tests.diffusion.tiny_flux import TinyFluxSizes, build_tiny_flux
from tests.rounding import assert_equal_up_to_rounding

STEPS = 3
ONE, TWO = "a red circle", "a blue square"


@pytest.fixture(scope="module")
def flux(tmp_path_factory):
    return load_pipeline(build_tiny_flux(tmp_path_factory.mktemp("flux") / "model", corpus=CAPTIONS, sizes=FLUX_SIZES))


@pytest.fixture(scope="module")
def cache(flux):
    return PromptEmbeddings(family_of(flux, max_sequence_length=T5_TOKENS))


def noise(rows, height=8, width=8, seed=0):
    shape = (rows, FLUX_SIZES.latent_channels, height, width)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def packed_by_hand(latents):
    rows, channels, height, width = latents.shape
    tokens = np.zeros((rows, height // 2 * (width // 2), 4 * channels), dtype=latents.dtype)
    for y in range(height):
        for x in range(width):
            token = y // 2 * (width // 2) + x // 2
            for channel in range(channels):
                tokens[:, token, 4 * channel + 2 * (y % 2) + x % 2] = latents[:, channel, y, x]
    return tokens


@pytest.mark.parametrize(("height", "width"), [(4, 6), (2, 2), (6, 2)])
def test_packing_puts_each_pixel_where_it_belongs_and_back(height, width):
    latents = noise(2, height, width)
    tokens = pack_latents(latents)
    np.testing.assert_array_equal(tokens.numpy(), packed_by_hand(latents.numpy()))
    assert torch.equal(unpack_latents(tokens, height, width), latents)


def test_shapes_that_cannot_be_packed_are_named():
    with pytest.raises(UserError, match="3 x 4"):
        pack_latents(noise(1, 3, 4))
    with pytest.raises(ValueError, match="4 x 6"):
        unpack_latents(torch.zeros(1, 5, 16), 4, 6)


def test_guidance_embedding_is_an_input_of_distilled_transformers_only(flux, cache, tmp_path):
    sizes = TinyFluxSizes(layers=1, single_layers=1, guidance=False)
    plain = load_pipeline(build_tiny_flux(tmp_path / "model", corpus=CAPTIONS, sizes=sizes))
    rows = cache.rows([ONE]).expanded()

    def found(pipeline, scale):
        with torch.no_grad():
            return family_of(pipeline, guidance_embedding=scale).model()(noise(1), torch.tensor([0.5]), rows)

    assert (found(flux, 1.0) - found(flux, 8.0)).abs().max() > 1e-3
    assert torch.equal(found(plain, 1.0), found(plain, 8.0))


def test_each_row_has_its_own_time_and_index(flux, cache):
    model, latents, sigma = family_of(flux).model(), noise(2, 4, 6), torch.tensor([0.2, 0.9])
    with torch.no_grad():
        both = model(latents, sigma, cache.rows([ONE], samples=2).expanded())
        alone = [model(latents[[row]], sigma[[row]], cache.rows([ONE]).expanded()) for row in range(2)]
        turned = model(latents.mT, sigma, cache.rows([ONE], samples=2).expanded())
    assert_equal_up_to_rounding(both, torch.cat(alone))
    assert both.shape == latents.shape
    assert (turned.mT - both).abs().max() > 1e-3


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("family", ["sd3", "flux"])
def test_times_are_those_of_the_pipeline_with_either_shift(flux, shared_pipeline, family, dynamic):
    # FLUX.1-schnell has a fixed shift, later releases of Stable Diffusion 3 one that depends on the size
    pipeline = copy.copy(flux if family == "flux" else shared_pipeline)
    pipeline.scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=dynamic)
    family = family_of(pipeline)
    pipeline(ONE, num_inference_steps=STEPS, height=16, width=32, max_sequence_length=T5_TOKENS, output_type="latent")
    assert torch.equal(family.sigma_grid(STEPS, family.latent_shape(16, 32)), pipeline.scheduler.sigmas)


@pytest.mark.parametrize(("height", "width"), [(32, 32), (16, 32)])
def test_stable_diffusion_3_with_a_shift_by_size_draws_the_images_of_its_pipeline(folder, height, width):
    policy = load_policy(PipelineConfig(path=str(folder), height=height, width=width, max_sequence_length=T5_TOKENS))
    policy.pipeline.scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    text, seeds = policy.embeddings.rows([ONE], samples=3), torch.arange(3)
    with torch.no_grad():
        latents = sample_latents(policy, text, seeds, LatentSamplerConfig(steps=STEPS))
    expected = policy.pipeline(
        ONE,
        num_images_per_prompt=3,
        latents=row_noise(seeds, 1, policy.latent_shape)[:, 0],
        height=height,
        width=width,
        num_inference_steps=STEPS,
        guidance_scale=LatentSamplerConfig.guidance,
        max_sequence_length=T5_TOKENS,
        output_type="latent",
    ).images
    assert_equal_up_to_rounding(latents, expected, passes=2 * STEPS)
