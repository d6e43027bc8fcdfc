import filecmp
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from diffusion.toy.pipelines.tiny import TinySd3Sizes, build_tiny_sd3, clip_tokenizer, learn_merges, t5_tokenizer
from mmrl.errors import UserError
from mmrl.hub.compat import quiet_transformers
from tests.diffusion.builders import CAPTIONS, FLUX_SIZES, SIZES, T5_TOKENS, load_sd3
from tests.diffusion.tiny_flux import TinyFluxSizes, build_tiny_flux


def draw(pipeline, **options):
    options = {"num_inference_steps": 2, "max_sequence_length": T5_TOKENS, "output_type": "np"} | options
    return pipeline("a red circle", generator=torch.Generator().manual_seed(0), **options).images


def files_of(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_same_seed_same_files_other_seed_other_weights(tmp_path):
    first, again, other = (
        build_tiny_sd3(tmp_path / name, corpus=CAPTIONS, sizes=SIZES, seed=seed)
        for name, seed in (("first", 0), ("again", 0), ("other", 1))
    )
    names = files_of(first)
    assert names == files_of(again)
    assert filecmp.cmpfiles(first, again, names, shallow=False)[0] == names
    weights = "transformer/diffusion_pytorch_model.safetensors"
    one, two = load_file(first / weights), load_file(other / weights)
    drawn = [key for key in one if one[key].ndim > 1 and key != "pos_embed.pos_embed"]
    assert drawn
    assert not any(torch.equal(one[key], two[key]) for key in drawn)


def test_building_leaves_the_global_generator_alone(tmp_path):
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    build_tiny_sd3(tmp_path / "model", corpus=CAPTIONS, sizes=SIZES)
    assert torch.equal(torch.rand(2), expected)


def test_loads_as_a_released_pipeline_and_draws_the_same_when_saved_again(tmp_path, sd3):
    images = draw(sd3)
    assert images.shape == (1, 32, 32, 3)
    assert images.std() > 0.01
    with quiet_transformers():
        sd3.save_pretrained(tmp_path)
    assert (draw(load_sd3(tmp_path)) == images).all()


def test_guidance_and_prompt_change_the_image(sd3):
    plain = draw(sd3, guidance_scale=1.0)
    assert abs(draw(sd3, guidance_scale=4.5) - plain).max() > 0.01
    blue = sd3(
        "a blue square",
        num_inference_steps=2,
        max_sequence_length=T5_TOKENS,
        output_type="np",
        guidance_scale=1.0,
        generator=torch.Generator().manual_seed(0),
    ).images
    assert abs(blue - plain).max() > 1e-3


def test_without_t5_the_pipeline_pads_with_zeros(tmp_path):
    folder = build_tiny_sd3(tmp_path / "short", corpus=CAPTIONS, sizes=replace(SIZES, t5_layers=0))
    pipeline = load_sd3(folder, text_encoder_3=None, tokenizer_3=None)
    tokens, _, _, _ = pipeline.encode_prompt("a red circle", None, None, max_sequence_length=T5_TOKENS)
    assert tokens.shape == (1, SIZES.clip_tokens + T5_TOKENS, SIZES.text_width)
    assert not tokens[:, SIZES.clip_tokens :].any()
    assert draw(pipeline).shape == (1, 32, 32, 3)


def test_sizes_reach_the_parts(tmp_path):
    sizes = TinySd3Sizes(
        layers=1, heads=2, head_width=8, latent_size=4, latent_channels=8, vae_widths=(4, 8), text_width=32, t5_layers=2
    )
    pipeline = load_sd3(build_tiny_sd3(tmp_path / "model", corpus=CAPTIONS, sizes=sizes))
    assert pipeline.transformer.config.num_layers == 1
    assert pipeline.text_encoder_3.config.num_layers == 2
    assert draw(pipeline).shape == (1, 8, 8, 3)
    assert draw(pipeline, output_type="latent").shape == (1, 8, 4, 4)


@pytest.mark.parametrize(
    ("sizes", "culprit"),
    [
        ({"layers": 0}, "layers is 0; must be at least 1"),
        ({"text_width": 100}, "text_width=100"),
        ({"vae_widths": (6,)}, r"vae_widths is \(6,\); must be .* a multiple of 4"),
        ({"latent_size": 5}, "latent_size=5"),
        ({"vocab_size": 100}, "vocab_size=100"),
    ],
)
def test_sizes_that_do_not_fit_are_named(tmp_path, sizes, culprit):
    with pytest.raises(UserError, match=culprit):
        build_tiny_sd3(tmp_path / "model", corpus=CAPTIONS, sizes=TinySd3Sizes(**sizes))


def test_tiny_flux_draws_the_same_from_the_same_seed(tmp_path):
    from diffusers import FluxPipeline

    first, again, other = (
        build_tiny_flux(tmp_path / name, corpus=CAPTIONS, sizes=FLUX_SIZES, seed=seed)
        for name, seed in (("first", 0), ("again", 0), ("other", 1))
    )
    assert filecmp.cmpfiles(first, again, files_of(first), shallow=False)[0] == files_of(first) == files_of(again)
    images = []
    for folder in (first, other):
        with quiet_transformers():
            pipeline = FluxPipeline.from_pretrained(folder)
        pipeline.set_progress_bar_config(disable=True)
        images.append(draw(pipeline, height=32, width=32))
    assert images[0].shape == (1, 32, 32, 3)
    assert images[0].std() > 0.01
    assert abs(images[0] - images[1]).max() > 0.01


def test_rotary_widths_of_flux_are_those_of_the_released_model():
    assert TinyFluxSizes(head_width=128).rotary_widths == (16, 56, 56)
    assert all(width % 2 == 0 for width in TinyFluxSizes(head_width=8).rotary_widths)


def test_clip_tokenizer_learns_words_and_spells_the_others():
    tokenizer = clip_tokenizer(CAPTIONS, 600, 16)
    assert len(tokenizer("a red circle").input_ids) == 5
    strange = "Ünïcode, 7 xylophones!"
    assert tokenizer.decode(tokenizer(strange).input_ids, skip_special_tokens=True) == "ünïcode , 7 xylophones !"


def test_merges_are_those_of_byte_pair_encoding_and_ties_go_by_spelling():
    assert learn_merges({"aab": 3, "ab": 2}, 1) == [("a", "b</w>")]
    assert learn_merges({"ab": 1, "cd": 1}, 5) == [("c", "d</w>"), ("a", "b</w>")]
    assert learn_merges({"aaaa": 1}, 5) == [("a", "a"), ("aa", "a"), ("aaa", "a</w>")]


def test_t5_tokenizer_prefers_words_to_characters():
    tokenizer = t5_tokenizer(CAPTIONS, 200)
    assert tokenizer.convert_ids_to_tokens(tokenizer("a red circle").input_ids) == ["▁a", "▁red", "▁circle", "</s>"]
    assert tokenizer.decode(tokenizer("a ruby disc").input_ids, skip_special_tokens=True) == "a ruby disc"
