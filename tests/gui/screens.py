"""Small screens and models for the tests of this package."""

from pathlib import Path
from typing import Any

from mmrl.gui.grounding.grounding_tasks import FIRST_CORRECT, GroundingSettings
from mmrl.gui.toy.icons import build_icons, build_model
from mmrl.runs.tracking import TrackingConfig
from mmrl.training.settings import BaseTrainerConfig, CheckpointConfig, TrainerConfig
from mmrl.vlm.data.dataset import DataConfig
from mmrl.vlm.engine.vlm_sampler import AnswerSampling, SamplerConfig
from mmrl.vlm.methods.sft import GivenAnswersConfig
from mmrl.vlm.model.model_config import ModelConfig
from mmrl.vlm.vlm_config import VlmEvaluationConfig, scoring_evaluation

SMALL = {"hidden": 24, "layers": 1, "heads": 2, "kv_heads": 1, "vision_hidden": 16, "vision_depth": 1}


def small_model(folder: Path, family: str = "qwen2_5_vl") -> Path:
    return build_model(folder, family=family, **SMALL)


def run_config(kind: type[Any], folder: Path, model: Path, *, family: str = "qwen2_5_vl", **trainer: Any) -> Any:
    """A two-step run on icon screens."""
    screens = build_icons(folder / "screens.jsonl", count=6, worked=True)
    options = {"steps": 2, "tasks_per_step": 3, "samples_per_task": 4, "learning_rate": 1e-3} | trainer
    if issubclass(kind, GivenAnswersConfig):
        options.pop("samples_per_task")
        scored = scoring_evaluation(
            records=2, by=["kind"], sampler=AnswerSampling(max_new_tokens=24), accuracy_reward=FIRST_CORRECT
        )
        parts = {"trainer": BaseTrainerConfig(**options), "evaluation": scored}
    else:
        parts = {
            "sampler": SamplerConfig(max_new_tokens=24),
            "trainer": TrainerConfig(**options),
            "evaluation": VlmEvaluationConfig(records=2, by=["kind"]),
        }
    return kind(
        recipe="aepo",
        output_dir=str(folder / "run"),
        model=ModelConfig(path=str(model)),
        grounding=GroundingSettings(family=family, template="some: {instruction}", seen=["heldout"]),
        data=DataConfig(path=str(screens)),
        eval_data={"heldout": DataConfig(path=str(screens))},
        checkpoint=CheckpointConfig(every=1),
        tracking=TrackingConfig(quiet=True, tensorboard=False, strict=True),
        **parts,
    )
