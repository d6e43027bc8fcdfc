"""Configurations of small real runs of the image recipes for the tests."""

from __future__ import annotations

import dataclasses
import functools
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from diffusion.data.prompts import PromptConfig
from diffusion.diffusion_evaluation import DiffusionEvaluationConfig
from diffusion.models.diffusion_policy import DiffusionLora, PipelineConfig
from diffusion.toy.shapes import building
from mmrl.core.rollouts import Rollouts
from mmrl.recipes import find_recipe
from mmrl.rewards import RewardConfig
from mmrl.runs.tracking import TrackingConfig
from mmrl.training.processes import Streams, make_accelerator, stream_seed
from mmrl.training.recipe import Step, make_reference
from mmrl.training.settings import CheckpointConfig
from mmrl.training.trainer import Trainer
from mmrl.training.update import count_denominators, update_constants

PROMPTS = ("a red circle", "a blue square", "a green triangle")
TINY = {"patch": 8, "layers": 1, "heads": 2, "text_width": 32, "pooled_width": 16, "vocab_size": 700}
TRAJECTORY_RECIPES = ("flow_grpo", "flow_grpo_fast", "grpo_guard", "dance_grpo", "ddpo", "flow_ppo")
_KEPT: list[Any] = []  # folders that are deleted with the process
MATCHED_RECIPES = ("awm", "diffusion_nft", "orw_cfm_w2", "ac_flow")


@functools.cache
def tiny_model() -> Path:
    """A random pipeline of 32 x 32 images whose latents are 12 x 4 x 4; its autoencoder has seen a few scenes."""
    folder = tempfile.TemporaryDirectory(prefix="tiny-pipeline-")
    _KEPT.append(folder)
    kept = building.FITTED_IMAGES
    building.FITTED_IMAGES = 48
    try:
        return building.build_pipeline(str(Path(folder.name) / "model"), **TINY)
    finally:
        building.FITTED_IMAGES = kept


def write_prompts(path: Path, prompts: Sequence[str] = PROMPTS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(prompts) + "\n", encoding="utf-8")
    return path


def run_config(name: str, folder: Path, **trainer: Any) -> Any:
    """A two-step run of a recipe on two prompts, four images each, four denoising steps."""
    config = dataclasses.replace(
        find_recipe(name).default_config(),
        recipe=name,
        output_dir=str(folder / "run"),
        model=PipelineConfig(path=str(tiny_model()), lora=DiffusionLora(rank=4, alpha=8), max_sequence_length=1),
        data=PromptConfig(path=str(write_prompts(folder / "prompts.txt"))),
        eval_data={"held_out": PromptConfig(path=str(folder / "prompts.txt"))},
        rewards=[RewardConfig(name="caption_colour")],
        heldout_rewards=[RewardConfig(name="jpeg_incompressibility")],
        evaluation=DiffusionEvaluationConfig(samples=2, records=2),
        checkpoint=CheckpointConfig(every=1),
        tracking=TrackingConfig(quiet=True, tensorboard=False, strict=True),
    )
    config.sampler = dataclasses.replace(config.sampler, steps=4, eval_steps=3)
    if hasattr(config, "timesteps"):
        config.timesteps = dataclasses.replace(config.timesteps, count=3, fraction=0.99)
    options = {"steps": 2, "tasks_per_step": 2, "samples_per_task": 4, "learning_rate": 1e-3} | trainer
    config.trainer = dataclasses.replace(config.trainer, **options)
    config.validate()
    return config


def build(config: Any) -> Any:
    """The recipe of a configuration."""
    return find_recipe(config.recipe).load_recipe_class()(config)


def make_trainer(config: Any, folder: Path) -> Trainer:
    """A trainer of the recipe without records of the run."""
    return Trainer(build(config), config, folder / "run", make_accelerator(), None)


def collected(recipe: Any, step: int = 0, count: int = 2) -> Rollouts:
    """Scored rollouts with advantages, as the loop makes them."""
    streams = Streams(stream_seed(recipe.config.seed, "rollout", step, 0, 9))
    recipe.policy.eval()
    with torch.no_grad():
        rollouts = recipe.score(recipe.rollout(recipe.policy, recipe.train_tasks[:count], streams, Step()), Step())
    reference = make_reference(
        recipe.config.reference, recipe.policy, needed=recipe.objective.needs_reference, start=recipe.start
    )
    rollouts = update_constants(recipe, recipe.policy, reference, rollouts, Step())
    return recipe.advantages(rollouts, make_accelerator(), Step())


def gradients(recipe: Any, rollouts: Rollouts, rows: int = 0) -> tuple[float, torch.Tensor]:
    """Loss and its gradient with respect to all trained weights, summed over micro-batches of so many rows."""
    recipe.policy.zero_grad()
    denominators = count_denominators(recipe, rollouts)
    total = 0.0
    for chunk in rollouts.micro_batches(rows or rollouts.num_rows):
        output = recipe.loss(recipe.policy, chunk, denominators, Step())
        output.loss.backward()
        total += float(output.loss.detach())
    found = [p.grad.flatten() for p in recipe.policy.parameters() if p.grad is not None]
    recipe.policy.zero_grad()
    return total, torch.cat(found)


def trained(policy: Any) -> torch.Tensor:
    """All trained weights as one vector."""
    return torch.cat([p.detach().flatten().clone() for p in policy.parameters() if p.requires_grad])


def disturb(policy: Any, size: float = 0.05, seed: int = 0) -> None:
    """Move the trained weights, so that policy, reference and averages differ."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(size * torch.randn(parameter.shape, generator=generator).to(parameter))


def with_function(recipe: Any, functions: dict[str, Callable[..., Any]]) -> None:
    """Give a recipe reward functions of the test, by the names of its terms."""
    from mmrl.rewards.sum import RewardSum

    recipe.rewards.close()
    terms = [
        *recipe.config.rewards,
        *(dataclasses.replace(reward, weight=0.0) for reward in recipe.config.heldout_rewards),
    ]
    recipe.rewards = RewardSum(terms, functions=functions)


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
