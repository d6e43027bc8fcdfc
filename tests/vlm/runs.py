"""Configurations of small real runs for the tests."""

import json
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from mmrl.rewards import RewardConfig
from mmrl.runs.tracking import TrackingConfig
from mmrl.training.settings import BaseTrainerConfig, CheckpointConfig, TrainerConfig
from mmrl.vlm.critic.measures import CriticEvaluationConfig, ScoringEvaluationConfig
from mmrl.vlm.data.dataset import DataConfig
from mmrl.vlm.engine.vlm_sampler import AnswerSampling
from mmrl.vlm.inference.inference_sampler import EngineSamplerConfig
from mmrl.vlm.methods.sft import GivenAnswersConfig
from mmrl.vlm.model.model_config import ModelConfig


def write_questions(folder: Path, count: int = 6, text_only_last: bool = True) -> Path:
    """A few questions with images, the last one without, each with answer and completion."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for index in range(count):
        image = Image.new("RGB", (56, 56), (40 * index % 256, 90, 160))
        ImageDraw.Draw(image).text((20, 20), str(index), fill="white")
        image.save(folder / f"{index}.png")
        row = {
            "id": f"q{index}",
            "problem": "<image>What is 3 plus 4?",
            "answer": str(index),
            "images": [f"{index}.png"],
            "completion": f"<think>3 4</think><answer>{index}</answer>",
            "digits": "3 4",
        }
        if text_only_last and index == count - 1:
            row |= {"problem": "What is 3 plus 4?", "images": []}
        rows.append(row)
    path = folder / "questions.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


def without_images(file: Path) -> None:
    """Leave the images out of written questions."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows = [row | {"images": [], "problem": "What is 3 plus 4?"} for row in rows]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n")


def add_columns(file: Path, **columns: Any) -> None:
    """Give all written questions further columns."""
    rows = [json.loads(line) | columns for line in file.read_text().splitlines()]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n")


def run_config(kind: type[Any], folder: Path, model: Path, **trainer: Any) -> Any:
    """A two-step run of a recipe on a tiny model."""
    data = write_questions(folder / "data")
    options = {"steps": 2, "tasks_per_step": 3, "samples_per_task": 4, "learning_rate": 1e-3} | trainer
    rewards = [RewardConfig(name="format", weight=0.1), RewardConfig(name="exact", weight=0.9)]
    if issubclass(kind, GivenAnswersConfig):
        options.pop("samples_per_task")
        rewards = [RewardConfig(name="format"), RewardConfig(name="exact")]
        parts = {
            "trainer": BaseTrainerConfig(**options),
            "evaluation": ScoringEvaluationConfig(records=2, rewards=rewards, sampler=AnswerSampling(max_new_tokens=6)),
        }
    else:
        parts = {
            "rewards": rewards,
            "sampler": EngineSamplerConfig(max_new_tokens=6),
            "trainer": TrainerConfig(**options),
            "evaluation": CriticEvaluationConfig(records=2),
        }
    return kind(
        recipe="test",
        output_dir=str(folder / "run"),
        model=ModelConfig(path=str(model)),
        data=DataConfig(path=str(data)),
        eval_data={"heldout": DataConfig(path=str(data))},
        checkpoint=CheckpointConfig(every=1),
        tracking=TrackingConfig(quiet=True, tensorboard=False, strict=True),
        **parts,
    )
