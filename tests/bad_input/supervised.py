"""The laboratory's configuration as a supervised one."""

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf


def supervised(lab: Any) -> Path:
    values = OmegaConf.load(lab.config)
    values.recipe, values.evaluation.rewards = "sft", values.pop("rewards")
    for section in ("sampler", "objective"):
        values.pop(section)
    values.trainer.pop("samples_per_task")
    path: Path = lab.folder / "sft.yaml"
    OmegaConf.save(values, path)
    return path
