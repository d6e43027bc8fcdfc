"""Pairs of images and small runs on them for the tests."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from diffusion.data.image_pairs import ImagePairConfig, write_pairs
from diffusion.diffusion_config import GivenEvaluationConfig
from diffusion.methods.dpo import DiffusionDpoConfig
from diffusion.models.diffusion_policy import DiffusionLora, PipelineConfig
from diffusion.toy.shapes import all_scenes, render_scene
from mmrl.rewards import RewardConfig
from mmrl.runs.tracking import TrackingConfig
from mmrl.training.settings import CheckpointConfig
from tests.diffusion.runs import tiny_model

COUNT = 6


def write_scenes(path: Path, count: int = COUNT, **numbers: Any) -> Path:
    """Pairs of a right and a wrong image of each caption, with scores."""
    scenes = all_scenes(["single"])[: 2 * count]
    rng = np.random.default_rng(0)
    images = np.stack([render_scene(scene, size=32, rng=rng) for scene in scenes])
    chosen, rejected = images[:count], images[count : 2 * count]
    given = {"score_chosen": np.linspace(0.6, 1.0, count), "score_rejected": np.zeros(count)}
    given |= {"text_quality": np.full(count, 10.0)} | numbers
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_pairs(path, [scene.caption for scene in scenes[:count]], chosen, rejected, **given)


def dpo_config(folder: Path, **trainer: Any) -> DiffusionDpoConfig:
    """A two-step run on the pairs."""
    config = DiffusionDpoConfig(
        recipe="diffusion_dpo",
        output_dir=str(folder / "run"),
        model=PipelineConfig(path=str(tiny_model()), lora=DiffusionLora(enabled=False), max_sequence_length=1),
        pairs=ImagePairConfig(path=str(write_scenes(folder / "pairs.npz"))),
        evaluation=GivenEvaluationConfig(
            samples=2,
            records=2,
            rewards=[RewardConfig(name="caption_colour")],
            heldout_rewards=[RewardConfig(name="jpeg_incompressibility")],
        ),
        checkpoint=CheckpointConfig(every=1),
        tracking=TrackingConfig(quiet=True, tensorboard=False, strict=True),
    )
    evaluation = config.evaluation
    evaluation.sampler = dataclasses.replace(evaluation.sampler, steps=4, eval_steps=3)
    options = {"steps": 2, "tasks_per_step": 3, "warmup_steps": 0, "learning_rate": 1e-3} | trainer
    config.trainer = dataclasses.replace(config.trainer, **options)
    return config
