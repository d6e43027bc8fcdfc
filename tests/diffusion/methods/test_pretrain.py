"""Flow matching on captioned images; the recipes increase their rewards."""

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler

from diffusion.data.captioned_images import ImageDataConfig, load_images, write_images
from diffusion.data.prompts import DiffusionTask, PromptConfig
from diffusion.diffusion_config import GivenEvaluationConfig
from diffusion.matching.velocity import encode_given, given_rollouts
from diffusion.methods.pretrain import PretrainConfig
from diffusion.models.diffusion_policy import DiffusionLora, PipelineConfig
from diffusion.models.pipelines import encode_images
from diffusion.sampling.latent_sampler import LatentSamplerConfig, row_noise, text_of
from diffusion.toy import digits
from mmrl.core.loss import metric_values
from mmrl.errors import UserError
from mmrl.rewards import RewardConfig
from mmrl.runs.tracking import TrackingConfig
from mmrl.training.processes import Streams, make_accelerator
from mmrl.training.recipe import Step
from mmrl.training.settings import BaseTrainerConfig
from mmrl.training.update import count_denominators
from tests.diffusion.families.tiny import stable_diffusion
from tests.diffusion.runs import build, make_trainer, run_config


@pytest.fixture(scope="module")
def digit_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("digits") / "model"
    return digits.build_pipeline(str(folder), layers=1, heads=2, text_width=32, pooled_width=16)


def pretraining(folder, model, **trainer):
    config = PretrainConfig(
        recipe="flow_pretrain",
        output_dir=str(folder / "run"),
        model=PipelineConfig(path=str(model), lora=DiffusionLora(enabled=False), max_sequence_length=1),
        images=ImageDataConfig(path=str(folder / "images.npz"), build="diffusion.toy.digits:build_images"),
        eval_data={"digits": PromptConfig(path=str(folder / "p.jsonl"), build="diffusion.toy.digits:build_prompts")},
        evaluation=GivenEvaluationConfig(
            samples=1,
            max_tasks=2,
            sampler=LatentSamplerConfig(guidance=1.0, eval_steps=4),
            rewards=[RewardConfig(name="class_prob")],
            heldout_rewards=[RewardConfig(name="jpeg_incompressibility")],
        ),
        trainer=BaseTrainerConfig(**({"steps": 2, "tasks_per_step": 32} | trainer)),
        tracking=TrackingConfig(quiet=True, tensorboard=False, strict=True),
    )
    config.validate()
    return config


def test_guidance_is_for_evaluation_only(tmp_path, digit_model):
    config = pretraining(tmp_path, digit_model)
    sampler = config.evaluation.sampler = PretrainConfig().evaluation.sampler
    assert sampler.eval_guidance > sampler.guidance
    config.validate()
    sampler.guidance = 3.0
    with pytest.raises(ValueError, match="training on given images uses no guidance"):
        config.validate()


def test_weights_and_times_that_nothing_reads_are_refused(tmp_path, digit_model):
    config = pretraining(tmp_path, digit_model)
    for terms, where in (
        (config.evaluation.rewards, "evaluation.rewards"),
        (config.evaluation.heldout_rewards, "heldout"),
    ):
        terms[0].weight = 0.5
        with pytest.raises(ValueError, match=f"{where}.*has weight 0.5, but it is only reported; leave weight out"):
            config.validate()
        terms[0].weight = 1.0
    config.timesteps.fraction = 0.5
    with pytest.raises(ValueError, match=r"fraction is 0\.5, but timesteps\.times 'logit_normal' does not read it"):
        config.validate()


def test_pretraining_on_digits_lowers_the_loss(tmp_path, digit_model):
    trainer = make_trainer(pretraining(tmp_path, digit_model, learning_rate=3e-3), tmp_path)
    losses = []
    for _ in range(60):
        rollouts, _ = trainer.collect()
        losses.append(trainer.updater.update(rollouts, trainer.step)["loss/total"])
    trainer.recipe.close()
    assert np.mean(losses[-10:]) < 0.75 * np.mean(losses[:5])


def test_samples_show_the_given_images_without_a_reward(tmp_path, digit_model):
    recipe = build(pretraining(tmp_path, digit_model))
    rollouts = recipe.batch(recipe.policy, recipe.train_tasks[:2], Streams(0), Step())
    assert [(sample.reward, sample.advantage) for sample in recipe.records(rollouts, 2)] == [(None, None)] * 2


def test_loss_is_the_matching_error_of_numpy(tmp_path, digit_model):
    config = pretraining(tmp_path, digit_model, tasks_per_step=6)
    config.timesteps.count = 2
    recipe = build(config)
    rollouts = recipe.rollout(recipe.policy, recipe.train_tasks[:6], Streams(0), Step())
    output = recipe.loss(recipe.policy, rollouts, count_denominators(recipe, rollouts), Step())
    payload = rollouts.payload
    clean = encode_images(recipe.policy.family, payload.images).double().numpy()[:, None]
    noise = row_noise(payload.noise_seed, 2, (1, 8, 8)).double().numpy()
    sigma = payload.sigma.double().numpy()[..., None, None, None]
    noisy = torch.from_numpy((1 - sigma) * clean + sigma * noise).float().flatten(0, 1)
    text = text_of(recipe.policy, payload.tasks, rollouts.group.repeat_interleave(2))
    with torch.no_grad():
        v = recipe.policy(noisy, payload.sigma.flatten(), text.expanded()).double().numpy()
    expected = ((v.reshape(noise.shape) - (noise - clean)) ** 2).mean()
    assert float(output.loss.detach()) == pytest.approx(expected, rel=1e-4)
    assert metric_values(output.metrics)["loss/total"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_stable_diffusion_minimises_the_error_of_diffusers_training_script(tmp_path, prediction):
    config = pretraining(tmp_path, stable_diffusion(tmp_path / "model", prediction))
    config.model = PipelineConfig(path=config.model.path, lora=DiffusionLora(enabled=False), height=16, width=16)
    config.evaluation.rewards, config.evaluation.heldout_rewards = [RewardConfig(name="jpeg_incompressibility")], []
    write_images(
        tmp_path / "two.npz", np.random.default_rng(0).integers(0, 256, (2, 16, 16, 3), np.uint8), ["one", "two"]
    )
    config.images = ImageDataConfig(path=str(tmp_path / "two.npz"))
    recipe = build(config)
    policy = recipe.policy
    # step 990 is where the error of the velocity is a hundred times that of the noise
    steps = torch.tensor([[10, 990], [500, 3]])
    sigma = policy.family._sigmas[steps].float()
    images = encode_given(policy, ["0", "1"], [task.read() for task in recipe.train_tasks], 2)
    tasks = [DiffusionTask(task.id, task.caption) for task in recipe.train_tasks]
    recipe.process.timesteps.count = 2
    rollouts = given_rollouts(policy, tasks, torch.arange(2), images, sigma, torch.tensor([3, 4]))
    # train_text_to_image.py of diffusers: the scheduler adds the noise, and the UNet predicts what the scheduler says
    scheduler = DDPMScheduler.from_config(policy.pipeline.scheduler.config)
    clean = rollouts.payload.latents.repeat_interleave(2, 0)
    noise = row_noise(rollouts.payload.noise_seed, 2, tuple(clean.shape[1:])).flatten(0, 1)
    text = text_of(policy, tasks, torch.arange(2).repeat_interleave(2)).expanded()["tokens"]
    with torch.no_grad():
        predicted = policy.pipeline.unet(
            scheduler.add_noise(clean, noise, steps.flatten()), steps.flatten(), text
        ).sample
        target = noise if prediction == "epsilon" else scheduler.get_velocity(clean, noise, steps.flatten())
        expected = (predicted - target).square().flatten(1).mean(1).view(2, 2)
        torch.testing.assert_close(-recipe.scores(policy, rollouts, frozenset()).logp, expected, rtol=2e-3, atol=1e-5)
        recipe.config.error = "velocity"
        ratio = -recipe.scores(policy, rollouts, frozenset()).logp / expected
    assert ratio[0, 1] > (100 if prediction == "epsilon" else 1)
    assert ratio.min() >= 0.99


def test_captions_are_left_out_at_the_configured_rate(tmp_path, digit_model):
    config = pretraining(tmp_path, digit_model)
    for share, allowed in ((0.0, range(1)), (0.3, range(85, 156)), (1.0, range(400, 401))):
        config.drop_caption = share
        recipe = build(config)
        rollouts = recipe.rollout(recipe.policy, recipe.train_tasks[:400], Streams(0), Step())
        assert sum(task.prompt == "" for task in rollouts.payload.tasks) in allowed
        assert len(set(rollouts.payload.sigma.flatten().tolist())) > 350  # every image has a time of its own


def test_an_image_of_another_size_than_that_of_the_run_is_refused_by_name(tmp_path, digit_model):
    recipe = build(pretraining(tmp_path, digit_model))
    other = write_images(tmp_path / "other.npz", np.zeros((1, 16, 8, 3), np.uint8), ["the digit one"])
    odd = load_images(ImageDataConfig(path=str(other)))
    message = "other.npz 0 has height=16, width=8, but the model draws images with height=8, width=8; resize it"
    for tasks in (odd, [recipe.train_tasks[0], *odd]):
        with pytest.raises(UserError, match=f"{message}, or change model.height and model.width"):
            recipe.rollout(recipe.policy, tasks, Streams(0), Step())


def test_captions_that_are_too_long_are_skipped_and_counted(tmp_path, digit_model, caplog):
    config = pretraining(tmp_path, digit_model)
    captions = ["the digit one", "the digit one " * 40]
    config.images = ImageDataConfig(path=str(tmp_path / "long.npz"))
    write_images(tmp_path / "long.npz", np.zeros((2, 8, 8, 3), np.uint8), captions)
    recipe = build(config)
    assert [task.caption for task in recipe.train_tasks] == captions[:1]
    assert recipe.skipped == {"too_long": 1}
    assert "skipped 1 rows (too_long)" in caplog.text
    write_images(tmp_path / "long.npz", np.zeros((1, 8, 8, 3), np.uint8), captions[1:])
    with pytest.raises(UserError, match="all captions are too long"):
        build(config)


def test_options_that_do_not_fit_are_refused(tmp_path, digit_model):
    config = pretraining(tmp_path, digit_model)
    config.drop_caption = 1.5
    with pytest.raises(ValueError, match=r"drop_caption is 1\.5"):
        config.validate()
    config.drop_caption, config.timesteps.share_noise = 0.1, True
    with pytest.raises(ValueError, match=r"timesteps\.share_noise is true"):
        config.validate()
    config.timesteps.share_noise, config.images.path = False, str(tmp_path / "gone.npz")
    config.images.build = None
    with pytest.raises(UserError, match="file not found"):
        build(config)


def learnt(name, folder, steps):
    """Reward on held-out seeds before and after training on the tiny random pipeline."""
    config = run_config(
        name, folder, learning_rate=2e-2, samples_per_task=16, tasks_per_step=3, steps=steps, minibatches_per_step=1
    )
    config.sampler.guidance, config.objective.kl = 1.0, {"coef": 0.0}
    config.evaluation.samples, config.sampler.eval_steps = 16, 4
    if name == "awm":
        config.awm.ema_coef = 0.1
    trainer = make_trainer(config, folder)
    scores = []
    for _ in range(2):
        found = trainer.recipe.evaluate(trainer.policy, "held_out", make_accelerator(), Step()).metrics
        scores.append(found["score/caption_colour"])
        while trainer.step < steps and len(scores) == 1:
            trainer.train_step()
    trainer.recipe.close()
    return scores


@pytest.mark.slow
@pytest.mark.parametrize("name", ["awm", "flow_grpo"])
def test_training_raises_the_reward(name, tmp_path):
    before, after = learnt(name, tmp_path, steps=14)
    assert after > before + 0.01


@pytest.mark.slow
@pytest.mark.parametrize("name", ["awm", "flow_grpo"])
def test_long_training_raises_the_reward_further(name, tmp_path):
    before, after = learnt(name, tmp_path, steps=100)
    assert after > before + 0.025
