"""The world of moving digits: its clips, its autoencoder, its judges, and learning from clips."""

import numpy as np
import pytest
import torch

from diffusion.data.image_pairs import write_pairs
from diffusion.families.table import family_of
from diffusion.models.diffusion_policy import DiffusionLora, PipelineConfig
from diffusion.models.pipelines import decode_latents, encode_images, load_pipeline
from diffusion.rewards import load_image_rewards
from diffusion.toy import clips
from diffusion.toy.pipelines.wan import BlockAutoencoder
from mmrl.errors import UserError
from mmrl.training.update import update_constants
from tests.diffusion.pairs import dpo_config
from tests.diffusion.runs import make_trainer, trained
from tests.rounding import assert_equal_up_to_rounding

JUDGES = ("moving_digit", "moving_digit_shape", "moving_digit_direction", "moving_digit_judge")


@pytest.fixture(scope="module")
def drawn():
    return clips.draw_clips(30, seed=3)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clips") / "model"
    return clips.build_pipeline(str(folder), layers=1, heads=2, head_width=12, text_width=16, scans=30)


def scores(name, prompts, videos):
    return np.asarray(load_image_rewards([name])[name](prompts=prompts, completions=list(videos)))


def test_a_judge_knows_right_from_wrong(drawn):
    videos, captions = drawn
    other_digit = [f"a {(int(caption[2]) + 1) % 10}{caption[3:]}" for caption in captions]
    back = videos[:, ::-1]
    for name in JUDGES:
        right = scores(name, captions, videos)
        assert right.mean() > 0.75
        assert right.min() >= 0
        assert right.max() <= 1
        if name != "moving_digit_direction":
            assert scores(name, other_digit, videos).mean() < 0.1
        if name != "moving_digit_shape":
            assert not scores(name, captions, back).any()
    assert scores("moving_digit_direction", captions, videos).min() == 1


@pytest.mark.parametrize("name", ["moving_digit_direction", "moving_digit_judge"])
def test_what_stands_still_or_goes_askew_moves_nowhere(name, drawn):
    videos, _ = drawn
    still = np.repeat(videos[:4, 2:3], clips.FRAMES, 1)
    askew = np.zeros((1, 3, 12, 12, 3), np.uint8)
    for number in range(3):
        askew[0, number, 2 + number : 6 + number, 2 + number : 6 + number] = 255
    for prompt in ("a 3 moving up", "a 3 moving right"):
        assert not scores(name, [prompt] * 4, still).any()
        assert not scores(name, [prompt], askew).any()
        assert not scores(name, [prompt], np.zeros((1, 5, 12, 12, 3))).any()


def test_half_of_the_steps_is_half_of_the_way(drawn):
    videos, captions = drawn
    half = videos[:, [0, 1, 1, 2, 2]]
    assert scores("moving_digit_direction", captions, half) == pytest.approx(0.5)


@pytest.mark.parametrize("prompt", ["a digit moving left", "a 3", "a 3 and a 4 moving up", "a 3 moving up left"])
def test_a_prompt_without_one_digit_and_one_direction_is_refused(prompt, drawn):
    with pytest.raises(UserError, match="one digit and one direction"):
        scores("moving_digit", [prompt], drawn[0][:1])


def test_an_image_is_refused(drawn):
    with pytest.raises(UserError, match="scores videos"):
        scores("moving_digit", ["a 3 moving left"], drawn[0][:1, 0])


def test_the_autoencoder_loses_nothing_and_is_saved_whole(drawn, tmp_path):
    videos, _ = drawn
    autoencoder = BlockAutoencoder.fit(videos)
    x = torch.from_numpy(videos).movedim(-1, 1).float() / 127.5 - 1
    latents = autoencoder.encode(x).latent_dist.sample()
    assert latents.shape == (len(videos), 16, 2, 6, 6)
    assert_equal_up_to_rounding(autoencoder.decode(latents).sample, x, passes=4)
    autoencoder.save_pretrained(tmp_path)
    again = BlockAutoencoder.from_pretrained(tmp_path)
    assert torch.equal(again.basis, autoencoder.basis)
    assert again.config.latents_std == autoencoder.config.latents_std
    with pytest.raises(UserError, match="z_dim=49"):
        BlockAutoencoder(z_dim=49)


def test_given_clips_come_back_as_they_were(drawn, model):
    videos, _ = drawn
    family = family_of(load_pipeline(model))
    latents = encode_images(family, videos[:3])
    assert latents.shape == (3, *family.latent_shape(12, 12, 5))
    assert float(latents.std()) == pytest.approx(1, rel=0.5)
    np.testing.assert_allclose(decode_latents(family, latents).pixels.astype(int), videos[:3], atol=1)
    with pytest.raises(ValueError, match="F 1 more than a multiple of 4"):
        encode_images(family, videos[:1, :4])
    with pytest.raises(UserError, match="generates videos, but got images"):
        encode_images(family, videos[:1, 0])


def test_pairs_of_clips_teach(drawn, model, tmp_path):
    videos, captions = drawn
    config = dpo_config(tmp_path, steps=1)
    config.model = PipelineConfig(
        path=str(model), lora=DiffusionLora(enabled=False), height=12, width=12, frames=5, max_sequence_length=8
    )
    config.pairs.path = str(write_pairs(tmp_path / "clips.npz", captions[:6], videos[:6], videos[:6, ::-1]))
    trainer = make_trainer(config, tmp_path)
    before = trained(trainer.policy)
    trainer.train_step()
    assert not torch.equal(trained(trainer.policy), before)
    rollouts, _ = trainer.collect()
    rollouts = update_constants(trainer.recipe, trainer.policy, trainer.reference, rollouts, trainer.position)
    (record,) = trainer.recipe.records(rollouts, 1)
    trainer.recipe.close()
    assert [(image.size, image.n_frames) for image in record.outputs] == [((12, 12), 5)] * 2


def test_images_for_a_model_of_videos_are_refused_by_name(drawn, model, tmp_path):
    videos, captions = drawn
    config = dpo_config(tmp_path)
    config.model = PipelineConfig(path=str(model), height=12, width=12, frames=5, max_sequence_length=8)
    config.pairs.path = str(write_pairs(tmp_path / "images.npz", captions[:6], videos[:6, 0], videos[:6, 2]))
    trainer = make_trainer(config, tmp_path)
    with pytest.raises(UserError, match=r"WanPipeline generates videos, but got images"):
        trainer.collect()
    trainer.recipe.close()
