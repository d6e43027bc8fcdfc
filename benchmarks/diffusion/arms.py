"""The arms of `python -m benchmarks diffusion`: each runs on a pipeline whose rows are counted."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measure import Stopwatch, repeat
from diffusion.families.base import VelocityModel
from diffusion.families.table import family_of
from diffusion.matching.losses import stack_timesteps
from diffusion.models.conditioning import PromptEmbeddings
from diffusion.sampling.latent_sampler import GuidedVelocity, euler_ode
from mmrl.hub.compat import ensure_torchvision, quiet_transformers

PROMPT = "a red circle and a blue square"
OTHER_PROMPT = "three green triangles"


class RowCount:
    """Rows that go through a pipeline's transformer, with and without a graph, and through its text encoders."""

    def __init__(self, pipeline: Any) -> None:
        self.rows = {"forward": 0, "train": 0, "text": 0}
        self.calls = 0
        pipeline.transformer.register_forward_pre_hook(self._transformer, with_kwargs=True)
        pipeline.text_encoder.register_forward_pre_hook(self._encoder, with_kwargs=True)

    def reset(self) -> None:
        """Count from here."""
        self.rows = dict.fromkeys(self.rows, 0)
        self.calls = 0

    def per_image(self, images: int) -> dict[str, float]:
        """Rows of each kind per image that was made or trained on, and the total number of transformer calls."""
        return {f"{name}_rows": count / images for name, count in self.rows.items()} | {"transformer_calls": self.calls}

    def _transformer(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.rows["train" if torch.is_grad_enabled() else "forward"] += len(kwargs["hidden_states"])
        self.calls += 1

    def _encoder(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.rows["text"] += len(args[0])


def open_pipeline(options: dict[str, Any]) -> Any:
    """Load the benchmark's pipeline with frozen text encoders."""
    ensure_torchvision()
    from diffusers import StableDiffusion3Pipeline
    from diffusers.utils import logging

    logging.disable_progress_bar()
    with quiet_transformers():
        pipeline: Any = StableDiffusion3Pipeline.from_pretrained(options["model"])
    for module in (pipeline.text_encoder, pipeline.text_encoder_2, pipeline.text_encoder_3, pipeline.vae):
        module.requires_grad_(False)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline.to(options["device"])


def noise(pipeline: Any, rows: int) -> Tensor:
    """Initial noise (rows, C, H, W), the same at every call."""
    config = pipeline.transformer.config
    shape = (rows, config.in_channels, config.sample_size, config.sample_size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(pipeline.device)


def sigma_grid(pipeline: Any, steps: int) -> Tensor:
    """Times (steps + 1,) of the pipeline's own scheduler."""
    pipeline.scheduler.set_timesteps(steps)
    sigmas: Tensor = pipeline.scheduler.sigmas
    return sigmas


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
        cache = PromptEmbeddings(family_of(pipeline, max_sequence_length=options["text_tokens"]))
        text, negative = cache.rows([PROMPT], samples=len(start)), cache.negative()
    sigmas = sigma_grid(pipeline, options["steps"])
    model = family_of(pipeline).model()
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
            PromptEmbeddings(family_of(pipeline, max_sequence_length=length)).rows(prompts, samples=options["images"])
            return
        with torch.no_grad():
            for first in range(0, len(rows), options["image_batch"]):
                part = rows[first : first + options["image_batch"]]
                pipeline.encode_prompt(part, None, None, do_classifier_free_guidance=False, max_sequence_length=length)

    measured = repeat(once, options["repetitions"], options["device"])
    counts = counted.per_image(len(rows))
    freed = PromptEmbeddings(family_of(pipeline)).free_encoders()
    return measured | {"counts": counts | {"text_encoder_mb": freed / 2**20}}


def guidance_arm(options: dict[str, Any]) -> dict[str, Any]:
    """Evaluate the guided velocity of a batch, or of each of its images alone."""
    pipeline = open_pipeline(options)
    counted, latents = RowCount(pipeline), noise(pipeline, options["rows"])
    cache = PromptEmbeddings(family_of(pipeline, max_sequence_length=options["text_tokens"]))
    text, negative = cache.rows([PROMPT], samples=len(latents)), cache.negative()
    sigma = torch.linspace(0.9, 0.3, len(latents), device=latents.device)
    model: Any = family_of(pipeline).model()
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


def _with_negative_detached(model: VelocityModel, *inputs: Any) -> Tensor:
    """Detach the first half of a call that has computed both with a graph."""
    negative, positive = model(*inputs).chunk(2)
    return torch.cat([negative.detach(), positive])


def stack_arm(options: dict[str, Any]) -> dict[str, Any]:
    """Forward and backward pass of the matching loss of a few images, K draws of time and noise for each."""
    pipeline = open_pipeline(options)
    counted, images, draws = RowCount(pipeline), noise(pipeline, options["rows"]), options["draws"]
    text = PromptEmbeddings(family_of(pipeline, max_sequence_length=options["text_tokens"])).rows(
        [PROMPT], samples=len(images)
    )
    model = family_of(pipeline).model()
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


TRAINED_STEPS = {"flow-grpo": 9, "flow-grpo-fast": 2}
"""Steps of the rollout that are trained: 0.99 of 10, and the window of the fast variant."""
AWM_STEPS, AWM_DRAWS = 14, 6
"""Solver steps of an AWM rollout and draws of time and noise for each image."""


def recipe_arm(options: dict[str, Any]) -> dict[str, Any]:
    """The transformer passes of one epoch of a published recipe, on a few images of one prompt."""
    pipeline = open_pipeline(options)
    counted, start = RowCount(pipeline), noise(pipeline, options["rows"])
    passes = RECIPES[options["way"]]

    def once(watch: Stopwatch) -> None:
        counted.reset()
        pipeline.transformer.zero_grad()
        passes(pipeline, start, options, watch)

    return repeat(once, options["repetitions"], options["device"]) | {"counts": counted.per_image(len(start))}


def _trajectory_passes(pipeline: Any, start: Tensor, options: dict[str, Any], watch: Stopwatch) -> None:
    """Flow-GRPO: guided steps, then for each trained step the policy with a graph and the reference without."""
    cache = PromptEmbeddings(family_of(pipeline, max_sequence_length=options["text_tokens"]))
    text = cache.rows([PROMPT], samples=len(start))
    velocity = GuidedVelocity(family_of(pipeline).model(), text, cache.negative(), options["scale"])
    sigmas = sigma_grid(pipeline, options["steps"])
    with watch.stage("rollout"), torch.no_grad():
        euler_ode(velocity, start, sigmas)
    trained = min(TRAINED_STEPS[options["way"]], options["steps"] - 1)
    with watch.stage("update"):
        for sigma in sigmas[:trained]:
            with torch.no_grad():
                reference = velocity(start, sigma.to(start.device))
            policy = velocity(start, sigma.to(start.device))
            ((policy - reference).square().mean() + policy.mean()).backward()


def _matching_passes(pipeline: Any, start: Tensor, options: dict[str, Any], watch: Stopwatch) -> None:
    """AWM: steps without guidance, then K draws of each image through policy, reference and EMA as one batch."""
    text = PromptEmbeddings(family_of(pipeline, max_sequence_length=options["text_tokens"])).rows(
        [PROMPT], samples=len(start)
    )
    model = family_of(pipeline).model()
    steps, draws = (AWM_STEPS, AWM_DRAWS) if options["steps"] >= 10 else (options["steps"], 2)
    with watch.stage("rollout"), torch.no_grad():
        images = euler_ode(GuidedVelocity(model, text), start, sigma_grid(pipeline, steps))
    with watch.stage("update"):
        noisy = stack_timesteps(images, draws, generator=torch.Generator().manual_seed(1))
        velocity = GuidedVelocity(model, text.select(noisy.image))
        with torch.no_grad():
            anchors = [velocity(noisy.latents, noisy.sigma) for _ in ("reference", "ema")]
        policy = velocity(noisy.latents, noisy.sigma)
        drift = sum((policy - anchor).square().mean() for anchor in anchors)
        (noisy.matching_error(policy).mean() + drift).backward()


def step_arm(options: dict[str, Any]) -> dict[str, Any]:
    """Whole steps of a recipe in the suite's own loop: images of two prompts, reward, advantages, updates with LoRA."""
    from mmrl.recipes import RECIPES
    from mmrl.training.processes import make_accelerator
    from mmrl.training.trainer import Trainer

    ensure_torchvision()
    folder = Path(options["folder"]) / options["way"]
    entry = RECIPES[options["way"]]
    config = _step_config(entry.default_config(), folder, options)
    recipe: Any = entry.load_recipe_class()(config)
    accelerator = make_accelerator(config.trainer.mixed_precision)
    recipe.policy.to(accelerator.device)
    loop = Trainer(recipe, config, folder / "run", accelerator, None)
    counts: dict[str, float] = {}

    def once(watch: Stopwatch) -> None:
        before = dict(recipe.policy.cost)
        loop.train_step()
        for name in ("forward_rows", "train_rows"):
            counts[name] = (recipe.policy.cost[name] - before.get(name, 0)) / options["images"]

    measured = repeat(once, options["repetitions"], options["device"])
    weights = sum(weight.numel() for weight in recipe.policy.pipeline.transformer.parameters())
    return measured | {"counts": counts | {"transformer_parameters": weights}}


def _step_config(defaults: Any, folder: Path, options: dict[str, Any]) -> Any:
    """Configuration of a run on two prompts whose reward differs from image to image whatever the weights are."""
    from diffusion.data.prompts import PromptConfig
    from diffusion.models.diffusion_policy import PipelineConfig
    from mmrl.rewards import RewardConfig
    from mmrl.runs.tracking import TrackingConfig

    folder.mkdir(parents=True, exist_ok=True)
    prompts = folder / "prompts.txt"
    prompts.write_text(f"{PROMPT}\n{OTHER_PROMPT}\n", encoding="utf-8")
    cuda = options["device"] == "cuda"
    dtype = "bfloat16" if cuda else "float32"
    config = dataclasses.replace(
        defaults,
        recipe=options["way"],
        output_dir=str(folder / "run"),
        model=PipelineConfig(options["model"], dtype=dtype, gradient_checkpointing=cuda, free_text_encoders=True),
        data=PromptConfig(path=str(prompts)),
        rewards=[RewardConfig(name="caption_colour")],
        heldout_rewards=[RewardConfig(name="jpeg_compressibility")],
        tracking=TrackingConfig(quiet=True, tensorboard=False),
    )
    trainer = config.trainer
    trainer.tasks_per_step, trainer.samples_per_task = 2, options["images"] // 2
    trainer.micro_batch, trainer.mixed_precision = options["micro_batch"], "bf16" if cuda else "none"
    config.sampler.batch_rows = options["micro_batch"]
    config.sampler.steps = options["steps"] or config.sampler.steps
    config.validate()
    return config


RECIPES = {"flow-grpo": _trajectory_passes, "flow-grpo-fast": _trajectory_passes, "awm": _matching_passes}
"""Recipes whose passes are timed."""
