import math

import pytest
import torch

from diffusion.families.table import family_of
from diffusion.models.conditioning import PromptEmbeddings
from diffusion.sampling.latent_sampler import GuidedVelocity, euler_ode
from mmrl.errors import UserError
from tests.diffusion.builders import SIZES, T5_TOKENS, RowCounter, load_sd3
from tests.rounding import assert_equal_up_to_rounding, assert_same_gradient

STEPS = 3
ONE, TWO = "a red circle", "a blue square"


@pytest.fixture
def cache(sd3):
    return PromptEmbeddings(family_of(sd3, max_sequence_length=T5_TOKENS))


@pytest.fixture
def model(sd3):
    return family_of(sd3).model()


def noise(rows, seed=0):
    shape = (rows, SIZES.latent_channels, SIZES.latent_size, SIZES.latent_size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def sigmas_of(pipeline):
    pipeline.scheduler.set_timesteps(STEPS)
    return pipeline.scheduler.sigmas


def drawn_by_pipeline(pipeline, scale, **options):
    return pipeline(
        num_inference_steps=STEPS,
        guidance_scale=scale,
        max_sequence_length=T5_TOKENS,
        **({"output_type": "latent"} | options),
    ).images


@pytest.mark.parametrize("scale", [1.0, 4.5])
def test_cached_path_gives_the_pipelines_own_latents(sd3, cache, model, scale):
    start = noise(4)
    expected = drawn_by_pipeline(sd3, scale, prompt=ONE, num_images_per_prompt=4, latents=start.clone())
    velocity = GuidedVelocity(model, cache.rows([ONE], samples=4), cache.negative(), scale)
    with torch.no_grad():
        latents = euler_ode(velocity, start, sigmas_of(sd3))
    assert_equal_up_to_rounding(latents, expected, passes=2 * STEPS)
    assert (latents - start).abs().max() > 0.1


def test_cached_path_gives_the_pipelines_own_images_from_a_generator(sd3, cache, model):
    prompts, scale = [ONE, TWO, ONE], 3.0
    expected = drawn_by_pipeline(
        sd3,
        scale,
        prompt=prompts,
        negative_prompt=["a square"] * 3,
        generator=torch.Generator().manual_seed(7),
        output_type="pt",
    )
    velocity = GuidedVelocity(model, cache.rows(prompts), cache.negative("a square"), scale)
    with torch.no_grad():
        latents = euler_ode(velocity, noise(3, seed=7), sigmas_of(sd3))
        images = sd3.vae.decode(latents / sd3.vae.config.scaling_factor + sd3.vae.config.shift_factor).sample
    # the pipeline encodes the three prompts as one batch, so the text may differ in its last bit
    assert_equal_up_to_rounding((images / 2 + 0.5).clamp(0, 1), expected, passes=2 * STEPS + 1)


def test_one_call_of_both_halves_equals_two_calls(cache, model, sd3):
    text, latents, sigma = cache.rows([ONE, TWO], samples=2), noise(4), torch.tensor([0.9, 0.5, 0.3, 0.7])
    found = {}
    for together in (True, False):
        velocity = GuidedVelocity(model, text, cache.negative(), 4.5, together=together)
        with torch.no_grad(), RowCounter([sd3.transformer]) as counter:
            found[together] = velocity(latents, sigma)
        assert (counter.calls, counter.rows) == ((1, 8) if together else (2, 8))
    # guidance multiplies the rounding of each half
    assert_equal_up_to_rounding(found[True], found[False], passes=2 * 5)
    with torch.no_grad():
        by_hand = [model(latents, sigma, rows.expanded()) for rows in (cache.negative(rows=4), text)]
    assert_equal_up_to_rounding(found[False], by_hand[0] + 4.5 * (by_hand[1] - by_hand[0]), passes=2 * 5)


@pytest.mark.parametrize(("scale", "side"), [(1.0, "positive"), (0.0, "negative")])
def test_scale_one_and_zero_need_one_half(cache, model, sd3, scale, side):
    text, latents, sigma = cache.rows([ONE], samples=3), noise(3), torch.tensor(0.5)
    velocity = GuidedVelocity(model, text, cache.negative(rows=3), scale)
    assert velocity.halves == 1
    with torch.no_grad(), RowCounter([sd3.transformer]) as counter:
        found = velocity(latents, sigma)
        assert counter.rows == 3
        rows = text if side == "positive" else cache.negative(rows=3)
        assert torch.equal(found, model(latents, sigma.expand(3), rows.expanded()))
    assert GuidedVelocity(model, text, scale=1.0).halves == 1
    assert GuidedVelocity(model, text, cache.negative(), 2.0).halves == 2


def test_each_row_has_its_own_time(cache, model):
    text, latents = cache.rows([ONE], samples=2), noise(2)
    velocity = GuidedVelocity(model, text, cache.negative(), 2.0)
    with torch.no_grad():
        both = velocity(latents, torch.tensor([0.2, 0.9]))
        for row, sigma in enumerate((0.2, 0.9)):
            alone = GuidedVelocity(model, text.select(slice(row, row + 1)), cache.negative(), 2.0)
            expected = alone(latents[row : row + 1], torch.tensor([sigma]))
            assert_equal_up_to_rounding(both[row : row + 1], expected, passes=2 * 2)


def gradient(transformer, loss):
    weights = [weight for weight in transformer.parameters() if weight.requires_grad]
    found = torch.autograd.grad(loss, weights, allow_unused=True)
    return torch.cat([g.flatten() for g in found if g is not None])


def test_detached_negative_half_is_constant_for_the_gradient(folder):
    pipeline = load_sd3(folder)
    transformer, scale = pipeline.transformer, 3.0
    cache, model = PromptEmbeddings(family_of(pipeline, max_sequence_length=T5_TOKENS)), family_of(pipeline).model()
    text, latents, sigma = cache.rows([ONE], samples=2), noise(2), torch.tensor([0.8, 0.4])
    velocity = GuidedVelocity(model, text, cache.negative(), scale, detach_negative=True)
    value = velocity(latents, sigma)
    positive = model(latents, sigma, text.expanded())
    negative = model(latents, sigma, cache.negative(rows=2).expanded()).detach()
    expected = negative + scale * (positive - negative)
    assert_equal_up_to_rounding(value, expected, passes=2 * 3)
    found, wanted = gradient(transformer, value.square().sum()), gradient(transformer, expected.square().sum())
    assert_same_gradient(found, wanted)
    through_both = GuidedVelocity(model, text, cache.negative(), scale)(latents, sigma)
    assert (gradient(transformer, through_both.square().sum()) - wanted).norm() > 0.05 * wanted.norm()
    with torch.no_grad(), RowCounter([transformer]) as counter:
        velocity(latents, sigma)
    assert counter.calls == 1


def test_gradient_of_one_call_equals_that_of_two(folder):
    pipeline = load_sd3(folder)
    cache, model = PromptEmbeddings(family_of(pipeline, max_sequence_length=T5_TOKENS)), family_of(pipeline).model()
    text, latents, sigma = cache.rows([ONE], samples=2), noise(2), torch.tensor([0.8, 0.4])
    one, two = (
        gradient(
            pipeline.transformer,
            GuidedVelocity(model, text, cache.negative(), 4.5, together=together)(latents, sigma).square().sum(),
        )
        for together in (True, False)
    )
    assert_same_gradient(one, two)


def test_guidance_says_what_it_misses(cache, model):
    text = cache.rows([ONE], samples=3)
    with pytest.raises(UserError, match=r"scale 4.5 needs a negative prompt"):
        GuidedVelocity(model, text, scale=4.5)
    with pytest.raises(UserError, match="2 negative text rows for 3 rows"):
        GuidedVelocity(model, text, cache.negative(rows=2), 4.5)
    with pytest.raises(UserError, match="guidance scale is nan"):
        GuidedVelocity(model, text, cache.negative(), math.nan)


def test_euler_follows_a_linear_flow():
    # dx/dsigma = x: each step multiplies by 1 + (sigma' - sigma)
    sigmas = torch.tensor([1.0, 0.6, 0.25, 0.0])
    found = euler_ode(lambda x, sigma: x, torch.full((2, 1), 3.0), sigmas)
    torch.testing.assert_close(found, torch.full((2, 1), 3.0 * 0.6 * 0.65 * 0.75))
    seen = []
    euler_ode(lambda x, sigma: seen.append(float(sigma)) or x, torch.zeros(1, 1), sigmas)
    assert seen == pytest.approx([1.0, 0.6, 0.25])
