import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from diffusion.families.table import family_of
from diffusion.models.diffusion_policy import load_policy
from diffusion.models.pipelines import decode_latents, encode_images, load_pipeline, outlined_pipeline
from diffusion.toy.pipelines.tiny import TinySd3Sizes, build_tiny_sd3
from mmrl.errors import UserError
from mmrl.workers import given
from tests.diffusion.builders import CAPTIONS, SIZES, T5_TOKENS
from tests.diffusion.families import tiny
from tests.diffusion.models.policies import config_of
from tests.rounding import assert_equal_up_to_rounding

FACTOR = 4


@pytest.fixture(params=["sd3", "flux"])
def loaded(request, folder, flux_folder):
    return load_pipeline(folder if request.param == "sd3" else flux_folder)


@pytest.fixture
def copied(folder, tmp_path):
    """A folder to damage."""
    return shutil.copytree(folder, tmp_path / "copied")


def edit(file, **values):
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def noise(rows, seed=0, size=8):
    return torch.randn((rows, 4, size, size), generator=torch.Generator().manual_seed(seed))


def pictures(rows, side=32):
    return np.random.default_rng(0).integers(0, 256, (rows, side, side, 3), dtype=np.uint8)


def test_everything_is_frozen_in_evaluation_mode_and_quiet(loaded, capfd):
    modules = [part for part in loaded.components.values() if isinstance(part, torch.nn.Module)]
    assert len(modules) in (4, 5)
    for module in modules:
        assert not module.training
        assert not any(weight.requires_grad for weight in module.parameters())
    loaded("a red circle", num_inference_steps=1, height=32, width=32, max_sequence_length=T5_TOKENS)
    assert "it/s" not in capfd.readouterr().err


def test_precision_is_that_of_all_parts(folder):
    pipeline = load_pipeline(str(folder), dtype=torch.bfloat16)
    assert {pipeline.transformer.dtype, pipeline.vae.dtype, pipeline.text_encoder_3.dtype} == {torch.bfloat16}


def test_folder_without_t5_loads_without_an_option(tmp_path):
    folder = build_tiny_sd3(tmp_path / "short", corpus=CAPTIONS, sizes=replace(SIZES, t5_layers=0))
    pipeline = load_pipeline(folder)
    assert pipeline.text_encoder_3 is None
    assert pipeline.tokenizer_3 is None
    tokens, _, _, _ = pipeline.encode_prompt("a red circle", None, None, max_sequence_length=T5_TOKENS)
    assert tokens.shape[1] == SIZES.clip_tokens + T5_TOKENS


def test_the_safety_checker_of_stable_diffusion_is_left_out(tmp_path):
    folder = tiny.stable_diffusion(tmp_path / "checked")
    parts = {"feature_extractor": ["transformers", "CLIPFeatureExtractor"]}
    parts["safety_checker"] = ["stable_diffusion", "StableDiffusionSafetyChecker"]
    edit(folder / "model_index.json", requires_safety_checker=True, **parts)
    for pipeline in (load_pipeline(folder), outlined_pipeline(folder)):
        assert (pipeline.safety_checker, pipeline.feature_extractor) == (None, None)
        assert not pipeline.config.requires_safety_checker


def message(path):
    with pytest.raises(UserError) as caught:
        load_pipeline(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_other_pipelines_are_named_with_the_supported_ones(copied):
    edit(copied / "model_index.json", _class_name="PixArtAlphaPipeline")
    said = message(copied)
    assert "is a PixArtAlphaPipeline, which is not supported; supported classes: FluxPipeline, " in said
    assert "StableDiffusion3Pipeline, " in said
    assert "; to add a family, write one class (docs/adding.md)" in said


@pytest.mark.parametrize("part", ["transformer", "text_encoder_2", "scheduler", "tokenizer_3"])
def test_missing_folder_of_a_part_is_named(copied, part):
    shutil.rmtree(copied / part)
    assert f"lacks the folder {part}" in message(copied)


@pytest.mark.parametrize("part", ["transformer", "vae", "scheduler"])
def test_pipelines_without_a_part_that_is_always_needed(copied, part):
    edit(copied / "model_index.json", **{part: [None, None]})
    assert f"has no {part}" in message(copied)


def test_other_schedulers_are_refused(copied):
    edit(copied / "scheduler/scheduler_config.json", invert_sigmas=True)
    assert "invert_sigmas" in message(copied)
    edit(copied / "model_index.json", scheduler=["diffusers", "DDIMScheduler"])
    assert "DDIMScheduler" in message(copied)


def test_damaged_and_incomplete_files_are_refused_in_one_line(copied):
    file = copied / "transformer/diffusion_pytorch_model.safetensors"
    state = load_file(file)
    name = "transformer_blocks.0.attn.to_q.weight"
    save_file({key: value for key, value in state.items() if key != name}, file, metadata={"format": "pt"})
    assert name in message(copied)
    file.write_bytes(file.read_bytes()[:1000])
    assert "cannot be loaded" in message(copied)
    (copied / "model_index.json").write_text("{")
    assert "not valid JSON" in message(copied)
    (copied / "model_index.json").write_text("[]")
    assert "contains a list" in message(copied)


def test_an_autoencoder_that_is_no_number_is_named(copied):
    file = copied / "vae/diffusion_pytorch_model.safetensors"
    state = load_file(file)
    state["decoder.conv_in.bias"][0] = float("nan")
    save_file(state, file, metadata={"format": "pt"})
    assert f"decoder.conv_in.bias in vae in {copied} contains NaN or infinite entries" in message(copied)


def test_missing_folder_and_folder_of_something_else(tmp_path):
    assert "not found; pass a folder with" in message(tmp_path / "nothing")
    assert "not found; pass a folder with" in message("no-such-thing")
    (tmp_path / "config.json").write_text("{}")
    assert "contains config.json" in message(tmp_path)


def test_hub_id_that_cannot_be_fetched(monkeypatch):
    from diffusers import DiffusionPipeline

    def refuse(name):
        raise OSError(f"{name} is not there\nmore about it")

    monkeypatch.setattr(DiffusionPipeline, "load_config", refuse)
    assert message("some-owner/some-model").endswith("OSError: some-owner/some-model is not there")


def test_decoding_gives_the_pipelines_own_pixels(loaded):
    options = {"num_inference_steps": 2, "height": 32, "width": 32, "max_sequence_length": T5_TOKENS}
    images, latents = (
        loaded("a red circle", generator=torch.Generator().manual_seed(0), output_type=kind, **options).images
        for kind in ("np", "latent")
    )
    if latents.ndim == 3:
        latents = loaded._unpack_latents(latents, 32, 32, FACTOR)
    decoded = decode_latents(family_of(loaded), latents)
    np.testing.assert_array_equal(decoded.pixels, (images * 255).round().astype("uint8"))
    assert decoded.finite.tolist() == [True]
    assert decoded.pixels.std() > 1


def normalised(folder, tmp_path, scale, shift):
    """The pipeline with an autoencoder that says it needs scale and shift."""
    changed = shutil.copytree(folder, tmp_path / "scaled")
    edit(changed / "vae/config.json", scaling_factor=scale, shift_factor=shift)
    return load_pipeline(changed)


def test_scale_and_shift_of_the_autoencoder(folder, tmp_path, loaded):
    scaled = normalised(folder, tmp_path, 1.5, 0.06)
    plain = load_pipeline(folder)
    latents = noise(2)
    np.testing.assert_array_equal(
        decode_latents(family_of(scaled), (latents - 0.06) * 1.5).pixels,
        decode_latents(family_of(plain), latents).pixels,
    )
    encoded = encode_images(family_of(plain), pictures(2))
    torch.testing.assert_close(encode_images(family_of(scaled), pictures(2)), (encoded - 0.06) * 1.5)


def test_channel_statistics_of_an_autoencoder_of_sdxl(tmp_path):
    folder = tiny.stable_diffusion_xl(tmp_path / "xl")
    mean, deviation, scale = [-1.5, 2.0, -1.25, 2.5], [8.0, 6.0, 6.5, 5.0], 0.5
    edit(folder / "vae/config.json", latents_mean=mean, latents_std=deviation, scaling_factor=scale)
    family, latents = family_of(load_pipeline(folder)), noise(2)
    mean, deviation = (torch.tensor(values)[:, None, None] for values in (mean, deviation))
    assert_equal_up_to_rounding(family.denormalise(latents), latents * deviation / scale + mean)
    assert_equal_up_to_rounding(family.normalise(family.denormalise(latents)), latents)


def test_latents_that_are_not_numbers_are_reported(loaded):
    latents = noise(4)
    whole = decode_latents(family_of(loaded), latents)
    latents[1, 0, 3, 3] = float("nan")
    latents[3, 2, 0, 0] = float("inf")
    decoded = decode_latents(family_of(loaded), latents)
    assert decoded.finite.tolist() == [True, False, True, False]
    assert not decoded.pixels[[1, 3]].any()
    np.testing.assert_array_equal(decoded.pixels[[0, 2]], whole.pixels[[0, 2]])


def test_the_autoencoder_runs_in_its_own_precision(folder):
    latents, images = noise(2), pictures(2)
    found = []
    for enabled in (False, True):
        family = family_of(load_pipeline(folder))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            found.append((decode_latents(family, latents).pixels, encode_images(family, images)))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_an_autoencoder_that_overflows_in_float16_stays_in_float32(copied):
    assert load_pipeline(copied, torch.float16).vae.dtype == torch.float32
    edit(copied / "vae/config.json", force_upcast=False)
    pipeline = load_pipeline(copied, torch.float16)
    assert {pipeline.transformer.dtype, pipeline.vae.dtype} == {torch.float16}


def test_smaller_batches_change_nothing(loaded):
    latents, images = noise(5), pictures(5)
    at_once, in_parts = (decode_latents(family_of(loaded), latents, batch=batch).pixels.astype(int) for batch in (8, 2))
    assert abs(at_once - in_parts).max() <= 1  # the last bit before rounding may differ
    one, two = (
        encode_images(family_of(loaded), images, torch.Generator().manual_seed(3), batch=batch) for batch in (8, 2)
    )
    assert_equal_up_to_rounding(one, two)


def test_encoding_takes_the_mode_or_draws_from_the_gaussian(loaded):
    images = pictures(2)
    scaled = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1
    with torch.no_grad():
        gaussian = loaded.vae.encode(scaled).latent_dist
    mode = encode_images(family_of(loaded), images)
    assert_equal_up_to_rounding(mode, gaussian.mode())
    sample = encode_images(family_of(loaded), images, torch.Generator().manual_seed(3))
    assert_equal_up_to_rounding(sample, gaussian.sample(torch.Generator().manual_seed(3)))
    assert (sample - mode).abs().max() > 0.01


def test_wrong_shapes_and_types_are_named(sd3):
    with pytest.raises(ValueError, match=r"must be \(B, 4, H, W\)"):
        decode_latents(family_of(sd3), torch.zeros(1, 16, 8, 8))
    for images in (np.zeros((1, 32, 32, 3)), np.zeros((1, 30, 32, 3), np.uint8), np.zeros((32, 32, 3), np.uint8)):
        with pytest.raises(ValueError, match="must be uint8"):
            encode_images(family_of(sd3), images)


def test_latent_shape_and_tokens(loaded):
    assert family_of(loaded).latent_shape() == (4, 8, 8)
    assert family_of(loaded).latent_shape(16, 24) == (4, 4, 6)
    assert family_of(loaded).latent_shape(width=16) == (4, 8, 4)
    assert family_of(loaded).tokens((4, 4, 6)) == 6
    for height in (0, 20, -8):
        with pytest.raises(UserError, match=f"height={height} must be a positive multiple of 8"):
            family_of(loaded).latent_shape(height)


def test_stable_diffusion_has_a_largest_size_and_flux_has_none(folder, flux_folder):
    with pytest.raises(UserError, match="width=40 exceeds the maximum that the transformer has positions for: 32"):
        family_of(load_pipeline(folder)).latent_shape(width=40)
    assert family_of(load_pipeline(flux_folder)).latent_shape(width=40) == (4, 8, 10)


def test_default_size_is_that_of_the_transformer(tmp_path):
    sizes = TinySd3Sizes(layers=1, latent_size=4, latent_channels=8, vae_widths=(4, 8), t5_layers=0)
    pipeline = load_pipeline(build_tiny_sd3(tmp_path / "model", corpus=CAPTIONS, sizes=sizes))
    assert family_of(pipeline).latent_shape() == (8, 4, 4)
    assert family_of(pipeline).tokens((8, 4, 4)) == 4


def test_a_loaded_pipeline_keeps_what_is_frozen_and_the_precision_of_each_part(folder):
    pipeline = load_pipeline(folder, torch.bfloat16)
    pipeline.vae.float()
    pipeline.transformer.requires_grad_(True)
    pipeline.transformer.proj_out.requires_grad_(False)
    with given.having({}, {str(folder): pipeline}):
        policy = load_policy(config_of(folder, enabled=False, dtype="bfloat16"))
    assert policy.pipeline is pipeline
    frozen = {name for name, weight in policy.named_parameters() if not weight.requires_grad}
    assert frozen == {"transformer.proj_out.weight", "transformer.proj_out.bias"}
    assert (pipeline.vae.dtype, pipeline.transformer.dtype) == (torch.float32, torch.bfloat16)
