"""Held-out images at fixed prompts and seeds: rewards, held-out rewards, diversity, and how far the model has moved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from diffusion.conditioning import TextRows
from diffusion.data import DiffusionTask
from diffusion.forward_process import matched_velocities, stack_timesteps
from diffusion.guidance import GuidedVelocity
from diffusion.sampler import sample_latents
from mmrl.training.loop.distributed import merge_lists, shard
from mmrl.training.loop.recipe import Evaluation
from mmrl.training.loop.seeds import make_generator, stream_seed
from mmrl.training.loop.settings import EvaluationConfig
from mmrl.training.record.metrics import metric_label
from mmrl.training.record.samples import SampleRecord
from mmrl.training.record.statistics import cluster_bootstrap_interval

if TYPE_CHECKING:
    from diffusion.recipe import DiffusionRecipe

__all__ = ["DiffusionEvaluationConfig", "base_distance", "evaluate_split", "latent_diversity"]

DISTANCE_TIMES = (0.2, 0.4, 0.6, 0.8)


@dataclass
class DiffusionEvaluationConfig(EvaluationConfig):
    """Evaluation of an image model: there is no greedy answer, only images from fixed seeds."""

    greedy: bool = False
    """Not for images; must stay false."""
    samples: int = 4
    """Images of each prompt, from seeds that are the same at every evaluation."""

    def validate(self) -> None:
        """Check that the fields fit together; raises ValueError."""
        super().validate()
        if self.greedy or self.temperature != 1.0:
            raise ValueError("evaluation.greedy and evaluation.temperature mean nothing for images; leave them out")


def evaluate_split(
    recipe: DiffusionRecipe, tasks: Sequence[DiffusionTask], split: str, accelerator: Accelerator
) -> Evaluation:
    """Draw and score images of every prompt.

    The seeds follow from (seed, split, prompt) alone, so evaluations of different steps and arms are paired.

    Args:
        recipe: a diffusion recipe.
        tasks: held-out prompts.
        split: name of the split.
        accelerator: processes to share the work with.

    Returns:
        score/<reward> and heldout/<reward> with bootstrap intervals over prompts, diversity/latent, distance/base, the
        cost of training so far, counts, and some images of each of the first prompts.
    """
    mine = shard(list(enumerate(tasks)), accelerator)
    size = recipe.config.evaluation.batch_tasks
    spent = dict(recipe.policy.cost)
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        for start in range(0, len(mine), size):
            rows += _evaluate_batch(recipe, mine[start : start + size], split)
    recipe.policy.cost.update(spent)
    rows = sorted(merge_lists(rows, accelerator), key=lambda row: row["index"])
    metrics = _metrics(recipe, rows, split) | _costs(spent, accelerator)
    return Evaluation(metrics, [_record(row) for row in rows[: recipe.config.evaluation.records]])


def latent_diversity(latents: Tensor) -> float:
    """Mean root-mean-square distance between the latents of one prompt.

    Args:
        latents: (G, C, H, W).

    Returns:
        0 where there is one; standard normal latents give about sqrt(2).
    """
    count = len(latents)
    if count < 2:
        return 0.0
    flat = latents.float().flatten(1)
    distances = torch.pdist(flat) / flat.shape[1] ** 0.5
    return float(distances.mean())


def base_distance(recipe: DiffusionRecipe, latents: Tensor, text: TextRows, seed: int) -> float:
    """Mean squared distance between the velocities of policy and base model on noisy versions of images.

    Args:
        recipe: gives policy and base.
        latents: x_0 (B, C, H, W).
        text: text of the rows.
        seed: of the noise.

    Returns:
        The mean over images, latent dimensions and the times 0.2, 0.4, 0.6, 0.8.
    """
    generator = torch.Generator().manual_seed(seed)
    noisy = stack_timesteps(latents, len(DISTANCE_TIMES), generator=generator, sigma=torch.tensor(DISTANCE_TIMES))
    rows = text.select(noisy.image)

    def base(x: Tensor, sigma: Tensor) -> Tensor:
        return recipe.start.score(lambda module: GuidedVelocity(module, rows)(x, sigma))

    own, anchors = matched_velocities(GuidedVelocity(recipe.policy, rows), {"base": base}, noisy)
    return float((own.float() - anchors["base"].float()).square().mean())


def _evaluate_batch(
    recipe: DiffusionRecipe, batch: Sequence[tuple[int, DiffusionTask]], split: str
) -> list[dict[str, Any]]:
    config, count = recipe.config, recipe.config.evaluation.samples
    tasks = [task for _, task in batch]
    text = recipe.text_of(tasks, torch.arange(len(tasks)).repeat_interleave(count))
    seeds = torch.cat([_seeds(config.seed, split, index, count) for index, _ in batch])
    guidance = config.sampler.guidance if config.sampler.eval_guidance is None else config.sampler.eval_guidance
    latents = sample_latents(
        recipe.policy, text, seeds, config.sampler, steps=config.sampler.eval_steps, guidance=guidance, solver="euler"
    )
    images, finite = recipe.decode(latents)
    scored = recipe.score_images([task for task in tasks for _ in range(count)], images, finite)
    usable = latents.nan_to_num(0.0, 0.0, 0.0)
    rows = []
    for place, (index, task) in enumerate(batch):
        own = slice(place * count, (place + 1) * count)
        noise = stream_seed(config.seed, split, index)
        rows.append(
            {
                "index": index,
                "task": task,
                "images": images[own],
                "terms": {name: values[own] for name, values in scored.terms.items()},
                "total": scored.total[own],
                "diversity": latent_diversity(usable[own]),
                "distance": base_distance(recipe, usable[own], text.select(own), noise),
            }
        )
    return rows


def _seeds(seed: int, split: str, index: int, count: int) -> Tensor:
    return torch.randint(2**62, (count, 2), generator=make_generator(seed, "evaluate", split, index))


def _metrics(recipe: DiffusionRecipe, rows: Sequence[dict[str, Any]], split: str) -> dict[str, float]:
    rng = np.random.default_rng(stream_seed(recipe.config.seed, "bootstrap", split))
    heldout = {reward.name for reward in recipe.config.heldout_rewards}
    metrics: dict[str, float] = {"n": float(len(rows))}
    unscored = 0
    for term in rows[0]["terms"] if rows else ():
        values = [[value for value in row["terms"][term] if value == value] for row in rows]
        unscored += sum(len(row["terms"][term]) for row in rows) - sum(map(len, values))
        values = [group for group in values if group]
        flat = [value for group in values for value in group]
        name = f"{'heldout' if term in heldout else 'score'}/{metric_label(term)}"
        low, high = cluster_bootstrap_interval(values, rng) if flat else (float("nan"), float("nan"))
        metrics |= {name: float(np.mean(flat)) if flat else float("nan"), f"{name}/low": low, f"{name}/high": high}
    if rows:
        metrics["diversity/latent"] = float(np.mean([row["diversity"] for row in rows]))
        metrics["distance/base"] = float(np.mean([row["distance"] for row in rows]))
    return metrics | {"unscored": float(unscored)}


def _costs(spent: dict[str, int], accelerator: Accelerator) -> dict[str, float]:
    return {f"cost/{name}": float(sum(merge_lists([value], accelerator))) for name, value in spent.items()}


def _record(row: dict[str, Any]) -> SampleRecord:
    from PIL import Image

    shown = slice(0, SHOWN_IMAGES)
    terms = {name: float(np.mean(values[shown])) for name, values in row["terms"].items()}
    return SampleRecord(
        id=row["task"].id,
        prompt=row["task"].prompt,
        response="",
        outputs=[Image.fromarray(image) for image in row["images"][shown]],
        reward=float(np.mean(row["total"][shown])),
        terms=terms,
    )


SHOWN_IMAGES = 4
"""Images of a prompt that the report keeps."""
