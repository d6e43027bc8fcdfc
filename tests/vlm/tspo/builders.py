"""A small CLIP, clips and runs of TSPO that take a fraction of a second."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

from mmrl.runs.tracking import TrackingConfig
from mmrl.training.settings import CheckpointConfig, TrainerConfig
from mmrl.vlm.data.dataset import DataConfig
from mmrl.vlm.toy.needles import build_needles
from mmrl.vlm.toy.tiny_clip import build_clip
from mmrl.vlm.tspo.tspo_config import FeatureConfig, PickConfig, TemporalAgentConfig, TspoConfig, TspoEvaluationConfig

_KEPT: list[Any] = []  # folders that are deleted with the process
FRAMES = 22


@functools.cache
def data_folder() -> Path:
    """A folder with clip/ (hardly trained) and needles.jsonl: four clips of 22 frames, the needle 8 of them."""
    folder = tempfile.TemporaryDirectory(prefix="needles-")
    _KEPT.append(folder)
    path = Path(folder.name)
    build_clip(path / "clip", width=16, hidden=16, layers=1, steps=1, examples=1)
    build_needles(path / "needles.jsonl", count=4, frames=FRAMES, decoys=0)
    return path


def needle_config(folder: Path, **changes: Any) -> TspoConfig:
    """A run of two steps on these clips."""
    data = data_folder()
    config = TspoConfig(
        recipe="tspo",
        output_dir=str(folder / "run"),
        features=FeatureConfig(path=str(data / "clip"), cache=str(folder / "features")),
        agent=TemporalAgentConfig(heads=2, window=4),
        data=DataConfig(path=str(data / "needles.jsonl")),
        # this CLIP is hardly trained: at the usual temperature some groups would draw the same frames
        picks=PickConfig(count=6, temperature=0.5, final_temperature=0.4),
        trainer=TrainerConfig(steps=2, tasks_per_step=2, samples_per_task=4, learning_rate=1e-2, threads=1),
        evaluation=TspoEvaluationConfig(samples=0, records=2),
        checkpoint=CheckpointConfig(every=1),
        tracking=TrackingConfig(quiet=True, tensorboard=False),
    )
    config.answerer.min_frames = 2
    for name, value in changes.items():
        setattr(config, name, value)
    return config
