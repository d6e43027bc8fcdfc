"""Rewards of videos, and rewards of images on videos."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from diffusion.models.diffusion_policy import DiffusionLora, PipelineConfig
from diffusion.models.pipelines import decode_latents
from diffusion.rewards import load_image_rewards
from diffusion.rewards.video_rewards import flicker, over_frames
from mmrl.errors import UserError
from mmrl.recipes import RECIPES
from mmrl.runs.records import film_frames
from mmrl.training.run import train
from tests.diffusion.families.cases import CASES
from tests.diffusion.runs import run_config


def moving(way, frames=3, side=8):
    """A white square of 2 x 2 that moves `way` pixels a frame to the right."""
    video = np.zeros((frames, side, side, 3), np.uint8)
    for number in range(frames):
        video[number, 3:5, 2 + way * number : 4 + way * number] = 255
    return video


def test_motion_is_the_way_of_the_bright_centre_in_the_named_direction():
    reward = load_image_rewards(["motion"])["motion"]
    prompts = ["a square moves right", "a square moves left", "a square moves up", "a square"]
    assert reward(prompts=prompts, completions=[moving(1)] * 4) == pytest.approx([2 / 8, -2 / 8, 0.0, 0.0])
    turned = moving(1).transpose(0, 2, 1, 3)
    assert reward(prompts=["down it goes"], completions=[turned]) == pytest.approx([2 / 8])


def test_an_image_is_refused():
    with pytest.raises(UserError, match="scores videos"):
        load_image_rewards(["motion"])["motion"](prompts=["left"], completions=[moving(1)[0]])


def test_smoothness_is_one_without_change():
    reward = load_image_rewards(["smoothness"])["smoothness"]
    assert reward(prompts=["", ""], completions=[moving(0), moving(2)]) == pytest.approx([1.0, 1 - 8 / 64])
    assert flicker(moving(2)) == pytest.approx(8 / 64)
    assert flicker(moving(1)[:1]) == 0.0


def test_a_reward_that_does_not_apply_to_a_prompt_does_not_apply_to_its_video():
    def of_quotes(prompts, completions):
        return [1.0 if '"' in prompt else None for prompt in prompts]

    assert over_frames(of_quotes)(prompts=['"OPEN"', "a square"], completions=[moving(1)] * 2) == [1.0, None]


def test_a_reward_of_images_is_the_mean_over_the_frames_of_a_video():
    reward = load_image_rewards(["jpeg_compressibility"])["jpeg_compressibility"]
    video = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 3), dtype=np.uint8)
    video[1] = 0
    frames = reward(prompts=[""] * 3, completions=[*video], scale="flow_grpo")
    assert reward(prompts=["", ""], completions=[video, video[:3]], scale="flow_grpo") == pytest.approx(
        [np.mean(frames)] * 2
    )
    colour = load_image_rewards(["caption_colour"])["caption_colour"]
    one, two = "a red circle", "a blue square"
    each = [np.mean(colour(prompts=[prompt] * 3, completions=[*video])) for prompt in (one, two)]
    assert colour(prompts=[one, two], completions=[video, video]) == pytest.approx(each)


def test_a_run_on_videos_keeps_some_frames_and_shows_films(tmp_path):
    case = CASES["wan"]
    config = run_config("flow_grpo", tmp_path, steps=1, samples_per_task=2)
    folder = case.build(tmp_path / "wan")
    lora = DiffusionLora(rank=2, alpha=4)
    config.model = PipelineConfig(path=str(folder), lora=lora, height=32, width=48, frames=5, **case.model)
    config.sampler = dataclasses.replace(config.sampler, guidance=1.0, steps=3, eval_steps=2, kept_frames=3)
    config.heldout_rewards[0].name = "smoothness"
    run = train(RECIPES["flow_grpo"], config)
    lines = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    assert 0 < lines[-1]["video/flicker"] <= 1
    assert lines[-1]["heldout/smoothness"] == pytest.approx(1 - lines[-1]["video/flicker"])
    from PIL import Image

    films = [Image.open(path) for path in run.rglob("samples/**/*.png")]
    assert {film.size for film in films} == {(48, 32)}
    assert {len(film_frames(film)) for film in films} == {3}
    assert "data:image/webp" in (run / "report.html").read_text(encoding="utf-8")


def test_kept_frames_are_evenly_spaced(tmp_path):
    from diffusion.families.table import family_of
    from diffusion.models.pipelines import load_pipeline

    family = family_of(load_pipeline(CASES["wan"].build(tmp_path / "wan")))
    latents = torch.randn((2, *family.latent_shape(32, 32, 9)), generator=torch.Generator().manual_seed(0))
    whole, some = decode_latents(family, latents).pixels, decode_latents(family, latents, frames=3).pixels
    assert whole.shape == (2, 9, 32, 32, 3)
    np.testing.assert_array_equal(some, whole[:, [0, 4, 8]])
