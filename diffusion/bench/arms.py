"""Arms of the diffusion benchmarks on one pipeline: sampling, embedding, guidance and stacking."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from diffusion.bench.pipeline import PROMPT, RowCount, noise, open_pipeline, sigma_grid
from diffusion.conditioning import PromptEmbeddings
from diffusion.flux import Sd3Transformer
from diffusion.forward_process import stack_timesteps
from diffusion.guidance import GuidedVelocity, euler_ode
from mmrl.bench.measure import Stopwatch, repeat


def rollout_arm(options: dict[str, Any]) -> dict[str, Any]:
    """Sample the latents of one group with guidance."""
    pipeline = open_pipeline(options)
    counted, start = RowCount(pipeline), noise(pipeline, options["images"])
    drawn: dict[str, Tensor] = {}

    def once(watch: Stopwatch) -> None:
        counted.reset()
        with torch.no_grad():
            drawn["latents"] = ROLLOUTS[options["way"]](pipeline, start, options, watch)

    measured = repeat(once, options["repetitions"], options["device"])
    torch.save(drawn["latents"].cpu(), options["result"])
    return measured | {"counts": counted.per_image(len(start))}


def _rollout_by_pipeline(pipeline: Any, start: Tensor, options: dict[str, Any], watch: Stopwatch) -> Tensor:
    """Call the pipeline for each batch of images; it embeds prompt and negative prompt in each call."""
    found = [
        pipeline(PROMPT, num_images_per_prompt=len(part), latents=part, **_sampling(options)).images
        for part in start.split(options["image_batch"])
    ]
    return torch.cat(found)


def _rollout_by_row(pipeline: Any, start: Tensor, options: dict[str, Any], watch: Stopwatch) -> Tensor:
    """Embed the prompt of every image, as trainers do whose batches are rows; the negative prompt once."""
    embed = partial(
        pipeline.encode_prompt,
        prompt_2=None,
        prompt_3=None,
        do_classifier_free_guidance=False,
        max_sequence_length=options["text_tokens"],
    )
    with watch.stage("embed"):
        negative, _, negative_pooled, _ = embed([""])
    found = []
    for part in start.split(options["image_batch"]):
        with watch.stage("embed"):
            tokens, _, pooled, _ = embed([PROMPT] * len(part))
        found.append(
            pipeline(
                prompt_embeds=tokens,
                pooled_prompt_embeds=pooled,
                negative_prompt_embeds=negative.expand(len(part), -1, -1),
                negative_pooled_prompt_embeds=negative_pooled.expand(len(part), -1),
                latents=part,
                **_sampling(options),
            ).images
        )
    return torch.cat(found)


def _rollout_shared(pipeline: Any, start: Tensor, options: dict[str, Any], watch: Stopwatch) -> Tensor:
    """Embed each prompt once, starting with an empty cache; one transformer call for each step of a batch."""
    with watch.stage("embed"):
        cache = PromptEmbeddings(pipeline, max_sequence_length=options["text_tokens"])
        text, negative = cache.rows([PROMPT], samples=len(start)), cache.negative()
    sigmas = sigma_grid(pipeline, options["steps"])
    model = Sd3Transformer(pipeline.transformer)
    found = []
    for rows in torch.arange(len(start)).split(options["image_batch"]):
        velocity = GuidedVelocity(model, text.select(rows), negative, options["scale"])
        found.append(euler_ode(velocity, start[rows], sigmas))
    return torch.cat(found)


def encode_arm(options: dict[str, Any]) -> dict[str, Any]:
    """Embed the prompts of a step: some prompts, each for a whole group."""
    pipeline = open_pipeline(options)
    counted = RowCount(pipeline)
    prompts = [f"{PROMPT} {number}" for number in range(options["prompts"])]
    rows = [prompt for prompt in prompts for _ in range(options["images"])]
    length = options["text_tokens"]

    def once(watch: Stopwatch) -> None:
        counted.reset()
        if options["way"] == "each prompt":
            PromptEmbeddings(pipeline, max_sequence_length=length).rows(prompts, samples=options["images"])
            return
        with torch.no_grad():
            for first in range(0, len(rows), options["image_batch"]):
                part = rows[first : first + options["image_batch"]]
                pipeline.encode_prompt(part, None, None, do_classifier_free_guidance=False, max_sequence_length=length)

    measured = repeat(once, options["repetitions"], options["device"])
    counts = counted.per_image(len(rows))
    freed = PromptEmbeddings(pipeline).free_encoders()
    return measured | {"counts": counts | {"text_encoder_mb": freed / 2**20}}


def guidance_arm(options: dict[str, Any]) -> dict[str, Any]:
    """Evaluate the guided velocity of a batch, or of each of its images alone."""
    pipeline = open_pipeline(options)
    counted, latents = RowCount(pipeline), noise(pipeline, options["rows"])
    cache = PromptEmbeddings(pipeline, max_sequence_length=options["text_tokens"])
    text, negative = cache.rows([PROMPT], samples=len(latents)), cache.negative()
    sigma = torch.linspace(0.9, 0.3, len(latents), device=latents.device)
    model: Any = Sd3Transformer(pipeline.transformer)
    if options["detach"] == "after":
        model = partial(_with_negative_detached, model)
    velocities = [
        (rows, GuidedVelocity(
            model, text.select(rows), negative, options["scale"],
            together=options["together"], detach_negative=options["detach"] == "before",
        ))
        for rows in torch.arange(len(latents)).split(1 if options["alone"] else len(latents))
    ]  # fmt: skip
    found: dict[str, Tensor] = {}

    def once(watch: Stopwatch) -> None:
        counted.reset()
        pipeline.transformer.zero_grad()
        for _ in range(options["calls"]):
            with torch.set_grad_enabled(options["train"]):
                value = torch.cat([velocity(latents[rows], sigma[rows]) for rows, velocity in velocities])
            if options["train"]:
                value.square().mean().backward()
        found["value"] = _gradient(pipeline.transformer) if options["train"] else value

    measured = repeat(once, options["repetitions"], options["device"])
    torch.save(found["value"].cpu(), options["result"])
    return measured | {"counts": counted.per_image(options["rows"] * options["calls"])}


def _with_negative_detached(model: Sd3Transformer, *inputs: Tensor) -> Tensor:
    """Detach the first half of a call that has computed both with a graph."""
    negative, positive = model(*inputs).chunk(2)
    return torch.cat([negative.detach(), positive])


def stack_arm(options: dict[str, Any]) -> dict[str, Any]:
    """Forward and backward pass of the matching loss of a few images, K draws of time and noise for each."""
    pipeline = open_pipeline(options)
    counted, images, draws = RowCount(pipeline), noise(pipeline, options["rows"]), options["draws"]
    text = PromptEmbeddings(pipeline, max_sequence_length=options["text_tokens"]).rows([PROMPT], samples=len(images))
    model = Sd3Transformer(pipeline.transformer)
    together = len(images) * (draws if options["way"] == "stacked" else 1)

    def once(watch: Stopwatch) -> None:
        counted.reset()
        pipeline.transformer.zero_grad()
        noisy = stack_timesteps(images, draws, generator=torch.Generator().manual_seed(1))
        for first in range(0, len(noisy), together):
            part = noisy.select(slice(first, first + together))
            velocity = GuidedVelocity(model, text.select(part.image))
            (part.matching_error(velocity(part.latents, part.sigma)).sum() / len(noisy)).backward()

    measured = repeat(once, options["repetitions"], options["device"])
    torch.save(_gradient(pipeline.transformer).cpu(), options["result"])
    return measured | {"counts": counted.per_image(len(images))}


def _sampling(options: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_inference_steps": options["steps"],
        "guidance_scale": options["scale"],
        "max_sequence_length": options["text_tokens"],
        "output_type": "latent",
    }


def _gradient(transformer: nn.Module) -> Tensor:
    return torch.cat([weight.grad.flatten() for weight in transformer.parameters() if weight.grad is not None])


ROLLOUTS = {
    "pipeline": _rollout_by_pipeline,
    "text of each image": _rollout_by_row,
    "shared": _rollout_shared,
}
"""Ways to sample a group."""
