"""Small runs of the preference recipe for the tests."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mmrl.runs.tracking import TrackingConfig
from mmrl.training.settings import BaseTrainerConfig, CheckpointConfig
from mmrl.vlm.critic.measures import ScoringEvaluationConfig
from mmrl.vlm.data.dataset import DataConfig
from mmrl.vlm.engine.vlm_sampler import AnswerSampling
from mmrl.vlm.methods.preference import PreferenceRunConfig
from mmrl.vlm.model.model_config import ModelConfig
from tests.vlm.runs import write_questions


def write_pairs(folder: Path, change: Callable[[int, dict[str, Any]], None] | None = None) -> Path:
    """Six pairs with images, the last one without; `change` gets the index and the row."""
    source = write_questions(folder)
    rows = []
    for number, line in enumerate(source.read_text().splitlines()):
        row = json.loads(line)
        row = {
            "id": row["id"],
            "prompt": row["problem"],
            "images": row["images"],
            "chosen": "<answer>7</answer>",
            "rejected": f"<think>3 and {number}</think><answer>{(number + 8) % 10}</answer>",
            "score_chosen": 2.0,
            "score_rejected": 0.5,
            "answer": "7",
            "digits": row["digits"],
        }
        if change is not None:
            change(number, row)
        rows.append(row)
    path = folder / "pairs.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


def pair_config(folder: Path, model: Path, data: Path | None = None, **trainer: Any) -> PreferenceRunConfig:
    """A two-step run on three pairs a step."""
    data = data or write_pairs(folder / "data")
    options = {"steps": 2, "tasks_per_step": 3, "learning_rate": 1e-3} | trainer
    return PreferenceRunConfig(
        recipe="preference",
        output_dir=str(folder / "run"),
        model=ModelConfig(path=str(model)),
        data=DataConfig(path=str(data)),
        eval_data={"heldout": DataConfig(path=str(data))},
        trainer=BaseTrainerConfig(**options),
        evaluation=ScoringEvaluationConfig(records=4, samples=0, sampler=AnswerSampling(max_new_tokens=6)),
        checkpoint=CheckpointConfig(every=1),
        tracking=TrackingConfig(quiet=True, tensorboard=False, strict=True),
    )
