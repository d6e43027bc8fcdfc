"""Matching errors of models that predict noise, compared with the losses of diffusers' training scripts."""

import pytest
import torch
from diffusers import DDPMScheduler
from torch import nn

from diffusion.data.prompts import DiffusionTask
from diffusion.matching.times import TimestepConfig
from diffusion.matching.velocity import FlowMatching, matched_rollouts
from diffusion.models.diffusion_policy import DiffusionLora, PipelineConfig, load_policy
from diffusion.sampling.latent_sampler import LatentSamplerConfig, row_noise
from diffusion.sampling.steps import velocity_kl
from tests.diffusion.families.tiny import stable_diffusion, stable_diffusion_xl

STEPS = [3, 500, 990]


@pytest.mark.parametrize("build", [stable_diffusion, stable_diffusion_xl])
def test_errors_and_distances_are_those_of_the_noise(tmp_path, build):
    full = DiffusionLora(enabled=False)
    policy = load_policy(PipelineConfig(path=str(build(tmp_path / "model")), lora=full, height=32, width=16))
    process = FlowMatching(policy, LatentSamplerConfig(guidance=1.0), TimestepConfig(count=len(STEPS)))
    steps = torch.tensor(STEPS)
    latents = torch.randn(1, 4, 4, 2, generator=torch.Generator().manual_seed(0))
    sigma = policy.family._sigmas[steps].float()[None]
    tasks, seed = [DiffusionTask("0", "a red circle")], torch.tensor([3])
    rollouts = matched_rollouts(tasks, torch.tensor([0]), latents, sigma, noise_seed=seed)
    with torch.no_grad():
        matching = process.evaluate(policy, rollouts)
        # train_text_to_image.py and train_text_to_image_sdxl.py
        pipeline, clean = policy.pipeline, latents.expand(len(STEPS), -1, -1, -1)
        noise = row_noise(seed, len(STEPS), tuple(latents.shape[1:]))[0]
        noisy = DDPMScheduler.from_config(pipeline.scheduler.config).add_noise(clean, noise, steps)
        options = {"num_images_per_prompt": len(STEPS), "do_classifier_free_guidance": False}
        tokens, _, *pooled = pipeline.encode_prompt("a red circle", device="cpu", **options)
        added = {}
        if pooled:
            sizes = torch.tensor([[32.0, 16.0, 0.0, 0.0, 32.0, 16.0]] * len(STEPS))  # original size, crop, target size
            added = {"added_cond_kwargs": {"text_embeds": pooled[0], "time_ids": sizes}}
        predicted = pipeline.unet(noisy, steps, tokens, **added).sample
    expected = nn.functional.mse_loss(predicted, noise, reduction="none").flatten(1).mean(1)
    torch.testing.assert_close(matching.error, expected, rtol=2e-3, atol=1e-5)
    # another noise moves the prediction by 1 in every entry, the velocity by 1 / (1 - t)
    anchor = matching.velocity + 1 / (1 - sigma[0].reshape(-1, 1, 1, 1))
    torch.testing.assert_close(matching.distance(anchor), torch.ones(1, len(STEPS)), rtol=1e-4, atol=0)
    torch.testing.assert_close(
        matching.distance(anchor, "elbo")[0], velocity_kl(matching.velocity, anchor, sigma[0], "elbo")
    )
