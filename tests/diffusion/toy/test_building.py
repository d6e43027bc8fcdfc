"""Build functions that configurations name: shapes and digits."""

import json

import numpy as np
import pytest

from diffusion.data.captioned_images import ImageDataConfig, load_images, write_images
from diffusion.families.table import family_of
from diffusion.models.diffusion_policy import DiffusionLora, PipelineConfig, load_policy
from diffusion.models.pipelines import decode_latents, encode_images, load_pipeline
from diffusion.rewards import load_image_rewards
from diffusion.toy import digits
from diffusion.toy.pipelines.tiny import build_from_images
from diffusion.toy.shapes import building
from mmrl.errors import UserError
from tests.diffusion.runs import tiny_model


def prompts_of(path):
    return [json.loads(line)["prompt"] for line in path.read_text().splitlines()]


def test_train_and_held_out_captions_are_a_partition(tmp_path):
    parts = {}
    for part in building.PARTS:
        path = building.build_prompts(str(tmp_path / f"{part}.jsonl"), kinds=["two", "count"], part=part)
        parts[part] = prompts_of(path)
    assert not set(parts["train"]) & set(parts["held_out"])
    assert sorted(parts["train"] + parts["held_out"]) == sorted(parts["all"])
    assert len(parts["held_out"]) == pytest.approx(0.2 * len(parts["all"]), rel=0.2)
    with pytest.raises(UserError, match="must be one of train, held_out, all"):
        building.build_prompts(str(tmp_path / "x.jsonl"), part="test")


def test_rendered_images_satisfy_their_captions(tmp_path):
    path = building.build_images(str(tmp_path / "images.npz"), count=30, kinds=["single"])
    found = load_images(ImageDataConfig(path=str(path)))
    assert len(found) == 30
    assert found[0].read().shape == (32, 32, 3)
    score = load_image_rewards(["caption_colour"])["caption_colour"]
    own = score([image.caption for image in found], [image.read() for image in found])
    shifted = score([found[(n + 1) % 30].caption for n in range(30)], [image.read() for image in found])
    assert np.mean(own) > np.mean(shifted)


def test_pipeline_of_shapes_has_the_requested_latents():
    config = PipelineConfig(path=str(tiny_model()), lora=DiffusionLora(enabled=False), max_sequence_length=1)
    policy = load_policy(config)
    assert policy.latent_shape == (12, 4, 4)
    captions = [scene.caption for scene in building.all_scenes()]
    assert not [caption for caption in captions if policy.embeddings.encoders.cuts(caption)]


def test_digit_images_are_all_scans_with_their_numbers(tmp_path):
    path = digits.build_images(str(tmp_path / "digits.npz"))
    found = load_images(ImageDataConfig(path=str(path)))
    assert len(found) > 1700
    assert {image.caption for image in found} == set(digits.CAPTIONS)
    pixels = np.stack([image.read() for image in found])
    assert pixels.shape[1:] == (8, 8, 3)
    assert np.array_equal(pixels[..., 0], pixels[..., 2])
    score = load_image_rewards(["class_prob"])["class_prob"]
    labels = [{"label": digits.CAPTIONS.index(image.caption)} for image in found[::40]]
    right = score([image.caption for image in found[::40]], list(pixels[::40]), metadata=labels)
    assert np.mean(right) > 0.8


def test_digit_prompts_carry_their_labels(tmp_path):
    path = digits.build_prompts(str(tmp_path / "prompts.jsonl"))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["metadata"]["label"] for row in rows] == list(range(10))
    assert rows[3]["prompt"] == "the digit three"


def test_digit_pipeline_draws_grey_eight_by_eight(tmp_path):
    folder = digits.build_pipeline(str(tmp_path / "model"), layers=1, heads=2, text_width=32, pooled_width=16)
    policy = load_policy(PipelineConfig(path=str(folder), max_sequence_length=1))
    assert policy.latent_shape == (1, 8, 8)
    from diffusion.models.pipelines import decode_latents, encode_images

    pixels = np.repeat(np.random.default_rng(0).integers(0, 256, (2, 8, 8, 1), dtype=np.uint8), 3, 3)
    images, finite = decode_latents(policy.family, encode_images(policy.family, pixels))
    assert finite.all()
    assert np.abs(images.astype(int) - pixels).max() <= 1


def test_a_pipeline_of_ones_own_images_returns_their_pixels_and_refuses_what_does_not_fit(tmp_path):
    colours = np.random.default_rng(0).integers(0, 256, (5, 1, 1, 3), np.uint8)
    images = write_images(tmp_path / "own.npz", np.tile(colours, (1, 8, 8, 1)), [f"word{n} tile" for n in range(5)])
    folder = build_from_images(str(tmp_path / "model"), images=str(images), layers=1)
    family, pixels = family_of(load_pipeline(folder)), np.tile(colours, (1, 8, 8, 1))
    assert np.array_equal(decode_latents(family, encode_images(family, pixels)).pixels, pixels)
    assert "tile</w>" in family.pipeline.tokenizer.get_vocab()
    with pytest.raises(UserError, match=r"\[\(8, 8\)\]; all must be squares whose side is a multiple of 16"):
        build_from_images(str(tmp_path / "coarse"), images=str(images), patch=8)
