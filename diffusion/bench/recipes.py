"""Arms of the diffusion benchmarks on whole recipes: the passes of an epoch, and steps of the suite's own loop."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffusion.bench.pipeline import OTHER_PROMPT, PROMPT, RowCount, noise, open_pipeline, sigma_grid
from diffusion.conditioning import PromptEmbeddings
from diffusion.flux import Sd3Transformer
from diffusion.forward_process import stack_timesteps
from diffusion.guidance import GuidedVelocity, euler_ode
from mmrl.bench.measure import Stopwatch, repeat
from mmrl.hub.compat import ensure_torchvision

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
    cache = PromptEmbeddings(pipeline, max_sequence_length=options["text_tokens"])
    text = cache.rows([PROMPT], samples=len(start))
    velocity = GuidedVelocity(Sd3Transformer(pipeline.transformer), text, cache.negative(), options["scale"])
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
    text = PromptEmbeddings(pipeline, max_sequence_length=options["text_tokens"]).rows([PROMPT], samples=len(start))
    model = Sd3Transformer(pipeline.transformer)
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
    from mmrl.training.loop.distributed import make_accelerator
    from mmrl.training.loop.trainer import Trainer

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
    from diffusion.data import PromptConfig
    from diffusion.model import ModelConfig
    from mmrl.rewards import RewardConfig
    from mmrl.training.record.tracking import TrackingConfig

    folder.mkdir(parents=True, exist_ok=True)
    prompts = folder / "prompts.txt"
    prompts.write_text(f"{PROMPT}\n{OTHER_PROMPT}\n", encoding="utf-8")
    cuda = options["device"] == "cuda"
    dtype = "bfloat16" if cuda else "float32"
    config = dataclasses.replace(
        defaults,
        recipe=options["way"],
        output_dir=str(folder / "run"),
        model=ModelConfig(options["model"], dtype=dtype, gradient_checkpointing=cuda, free_text_encoders=True),
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
