"""Evaluation on images from fixed prompts and seeds: rewards, held-out rewards, diversity, distance to the base."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from diffusion.data.prompts import DiffusionTask
from diffusion.matching.losses import stack_timesteps
from diffusion.models.conditioning import TextRows
from diffusion.models.diffusion_policy import DiffusionPolicy
from diffusion.models.pipelines import decode_latents
from diffusion.rewards.video_rewards import flicker
from diffusion.sampling.latent_sampler import GuidedVelocity, LatentSamplerConfig, sample_latents, text_of
from mmrl.rewards import RewardResult
from mmrl.rewards.reward_config import RewardConfig, about_rewards
from mmrl.runs.records import Outcome, SampleRecord, film, short_digest
from mmrl.runs.run_log import metric_label
from mmrl.runs.statistics import with_interval
from mmrl.training.evaluation import Measure, Row, Trial, mean_scores, unscored
from mmrl.training.processes import make_generator, stream_seed
from mmrl.training.recipe import Reference
from mmrl.training.scoring import describe_failure, failure_of
from mmrl.training.settings import EvaluationConfig

if TYPE_CHECKING:
    from PIL.Image import Image

DISTANCE_TIMES = (0.2, 0.4, 0.6, 0.8)
SHOWN_IMAGES = 4
"""Number of images per prompt in the report."""


@dataclass
class DiffusionEvaluationConfig(EvaluationConfig):
    """Evaluation of an image model; images are drawn from fixed seeds; there is no greedy decoding."""

    greedy: bool = False
    """Does not apply to images; must be false."""
    samples: int = 4
    """Images per prompt, drawn from the same seeds in every evaluation."""

    def validate(self) -> None:
        """Check that the fields fit together; raises ValueError."""
        super().validate()
        if self.greedy or self.temperature != 1.0:
            raise ValueError("evaluation.greedy and evaluation.temperature do not apply to images; leave them out")


ScoreImages = Callable[[Sequence[DiffusionTask], np.ndarray, Sequence[bool]], RewardResult]
"""Scores images uint8 (B, height, width, 3), given each row's task and whether it has an image."""


@dataclass
class ImageMeasure(Measure[DiffusionTask]):
    """Rewards and held-out rewards of images, their diversity, and the distance to the base model.

    The seeds only depend on (seed, split, prompt), so evaluations of different steps and runs are paired. Metrics:
    score/<reward> and heldout/<reward> with bootstrap intervals over prompts, diversity/latent, distance/base and
    unscored (a count).
    """

    policy: DiffusionPolicy
    base: Reference
    """The policy at the start of the run."""
    score: ScoreImages
    heldout: Collection[str]
    """Names of reward terms that are not optimised."""
    evaluation: DiffusionEvaluationConfig
    sampler: LatentSamplerConfig
    seed: int
    split: str
    rewards: Sequence[RewardConfig] = ()
    """All terms, for the protocol."""

    @property
    def batch_size(self) -> int:
        """Number of prompts whose images are drawn together."""
        return self.evaluation.batch_tasks

    def run(self, batch: Sequence[Trial[DiffusionTask]], start: int) -> list[Row]:
        """Draw and score the images of some prompts."""
        count = self.evaluation.samples
        tasks = [trial.task for trial in batch]
        text = text_of(self.policy, tasks, torch.arange(len(tasks)).repeat_interleave(count))
        seeds = torch.cat([self._seeds(trial.index) for trial in batch])
        sampler = self.sampler
        # training may sample without guidance what is shown with it
        guidance = sampler.guidance if sampler.eval_guidance is None else sampler.eval_guidance
        latents = sample_latents(
            # the deterministic solver, so that differences come from the weights alone
            self.policy,
            text,
            seeds,
            sampler,
            steps=sampler.eval_steps,
            guidance=guidance,
            solver="euler",
        )
        images, finite = decode_latents(
            self.policy.family, latents, batch=sampler.batch_rows, frames=sampler.kept_frames
        )
        # rows are prompt by prompt, as in `text`
        scored = self.score([task for task in tasks for _ in range(count)], images, finite.tolist())
        # an overflowed image is counted as unscored; it must not make diversity and distance NaN as well
        usable = latents.nan_to_num(0.0, 0.0, 0.0)
        failure = failure_of(scored)
        rows = []
        for index, trial in enumerate(batch):
            own = slice(index * count, (index + 1) * count)
            # the same noise at every evaluation, so distances of different steps are comparable
            noise = stream_seed(self.seed, self.split, trial.index)
            rows.append(
                {
                    "index": trial.index,
                    "repeat": trial.repeat,
                    "task": trial.task,
                    "images": images[own],
                    "terms": {name: values[own] for name, values in scored.terms.items()},
                    "total": scored.total[own],
                    "failure": failure,
                    "diversity": latent_diversity(usable[own]),
                    "distance": base_distance(self.policy, self.base, usable[own], text.select(own), noise),
                }
            )
        return rows

    def metrics(self, rows: Sequence[Row], tasks: Sequence[DiffusionTask]) -> dict[str, float]:
        """Mean rewards with intervals, diversity, distance and the number of missing scores."""
        # the same resamples at every evaluation
        rng = np.random.default_rng(stream_seed(self.seed, "bootstrap", self.split))
        metrics: dict[str, float] = {}
        missing = 0
        for term in rows[0]["terms"] if rows else ():
            scores = [row["terms"][term] for row in rows]
            missing += unscored(scores)
            metrics |= with_interval(self._metric(term), scores, rng)
        if rows:
            metrics["diversity/latent"] = float(np.mean([row["diversity"] for row in rows]))
            metrics["distance/base"] = float(np.mean([row["distance"] for row in rows]))
        # videos (n, F, h, w, 3)
        if rows and rows[0]["images"].ndim == 5:
            metrics["video/flicker"] = float(np.mean([flicker(video) for row in rows for video in row["images"]]))
        return metrics | {"unscored": float(missing)}

    def about(self) -> Row:
        """How images are drawn and scored."""
        names = ("eval_steps", "eval_guidance", "guidance", "negative_prompt", "kept_frames")
        return {
            "horizon": self.sampler.eval_steps,
            "decodings": {"sampled": self.evaluation.samples},
            "bootstrap": stream_seed(self.seed, "bootstrap", self.split),
            "sampling": {name: getattr(self.sampler, name) for name in names},
            "heldout": sorted(self.heldout),
            "rewards": about_rewards(self.rewards),
        }

    def entries(self, row: Row) -> list[Row]:
        """The images of a prompt, with digests of their pixels."""
        return [
            {
                "decoding": "sampled",
                "answer": number,
                "state": row["task"].id,
                "return": row["total"][number],
                "output": short_digest(np.ascontiguousarray(image).tobytes()),
                "scores": {self._metric(term): values[number] for term, values in row["terms"].items()},
            }
            for number, image in enumerate(row["images"])
        ]

    def failure(self, rows: Sequence[Row]) -> str:
        """Error message if no image could be scored, otherwise empty."""
        return describe_failure(rows, self.split)

    def record(self, row: Row) -> SampleRecord:
        """The first images of a prompt."""
        shown = slice(0, SHOWN_IMAGES)
        return SampleRecord(
            id=row["task"].id,
            prompt=row["task"].prompt,
            response="",
            outputs=[shown_output(image, row["task"]) for image in row["images"][shown]],
            reward=float(np.mean(row["total"][shown])),
            terms={name: float(np.mean(values[shown])) for name, values in row["terms"].items()},
        )

    def outcome(self, row: Row) -> Outcome:
        """The mean rewards of a prompt's images."""
        return Outcome(row["task"].id, mean_scores({self._metric(term): own for term, own in row["terms"].items()}))

    def _metric(self, term: str) -> str:
        return f"{'heldout' if term in self.heldout else 'score'}/{metric_label(term)}"

    def _seeds(self, index: int) -> Tensor:
        # by the index in the split, so that `batch_tasks` changes no image
        generator = make_generator(self.seed, "evaluate", self.split, index)
        return torch.randint(2**62, (self.evaluation.samples, 2), generator=generator)


def shown_output(image: np.ndarray, task: DiffusionTask | None = None) -> Image:
    """An image (h, w, 3), or a film strip of video frames (K, h, w, 3), next to the image to be edited, if any."""
    frames = image[None] if image.ndim == 3 else image
    if task is not None and task.image is not None:
        edited = np.broadcast_to(task.image.pixels(*frames.shape[1:3]), frames.shape)
        frames = np.concatenate([edited, frames], axis=2)
    return film(frames)


@contextmanager
def training_cost(policy: DiffusionPolicy, accelerator: Accelerator) -> Iterator[dict[str, float]]:
    """Exclude evaluations from a policy's cost."""
    # training's cost is compared between methods, so evaluations must not count
    spent = dict(policy.cost)
    yield {f"cost/{name}": float(value) for name, value in spent.items()}
    policy.cost.load_state_dict(spent)


def latent_diversity(latents: Tensor) -> float:
    """Mean root-mean-square distance between latents (G, C, H, W) of one prompt; 0 for a single image.

    Standard normal latents give about sqrt(2).
    """
    count = len(latents)
    if count < 2:
        return 0.0
    flat = latents.float().flatten(1)
    distances = torch.pdist(flat) / flat.shape[1] ** 0.5
    return float(distances.mean())


def base_distance(policy: DiffusionPolicy, base: Reference, latents: Tensor, text: TextRows, seed: int) -> float:
    """Mean squared distance between the velocities of policy and base model on noisy versions of x_0 (B, C, H, W)."""
    # the same times and noises for both: separate draws would add their noise to the distance
    generator = torch.Generator().manual_seed(seed)
    noisy = stack_timesteps(latents, len(DISTANCE_TIMES), generator=generator, sigma=torch.tensor(DISTANCE_TIMES))
    rows = text.select(noisy.image)
    anchor = base.score(lambda module: GuidedVelocity(module, rows)(noisy.latents, noisy.sigma))
    own = GuidedVelocity(policy, rows)(noisy.latents, noisy.sigma)
    return float((own.float() - anchor.float()).square().mean())
