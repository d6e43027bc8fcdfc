"""Evaluation in closed loop: a world model, a planner, and arms in physics, by `mmrl evaluate`.

It does not train; `mmrl train` rejects it. The model is a folder, or a run, whose best checkpoint is used; `truth` is
the scenes' own flow, an upper bound for every model.

Source: arXiv 2506.06199, whose protocol is 10 trials per task and arm with random poses.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import nn

from mmrl.errors import UserError
from mmrl.fields import bounded, check_fields, choice, parts_of
from mmrl.files import expanded
from mmrl.runs.export import chosen_checkpoint, is_run
from mmrl.runs.records import short_digest
from mmrl.training.evaluation import Evaluation, evaluate_tasks, held_out_tasks
from mmrl.training.recipe import Step
from robotics.flow3d.closed_loop.flow_episodes import (
    FlowEpisodesConfig,
    LoopConfig,
    StillPoints,
    TrueFlow,
    list_episodes,
)
from robotics.flow3d.closed_loop.measure import FlowLoopMeasure, LoopEvaluationConfig
from robotics.flow3d.closed_loop.runner import FlowEpisodeRunner, Source
from robotics.flow3d.objects.scene import find_flow_arm
from robotics.scenes.scene import model_digest

LOGGER = logging.getLogger("mmrl")
TRUTH = "truth"


@dataclass
class FlowSourceConfig:
    """The source of flow."""

    path: str = ""
    """Folder of a world model, or of the run that trained it; truth = the scenes' own flow."""
    still_share: float = bounded(0.0, at_least=0, below=1)
    """Fraction of the query points given no motion, to measure the effect of wrong points."""


@dataclass
class ComputeConfig:
    """Compute settings of the evaluation."""

    mixed_precision: str = choice("none", ("none",))
    """Numerical precision; only none is supported."""
    threads: int = bounded(1, at_least=0)
    """Number of CPU threads of torch; 0 = unchanged."""


@dataclass
class Flow3dEvaluationConfig:
    """A source of flow, how it is used, and the episodes."""

    recipe: str = ""
    """flow3d_eval."""
    output_dir: str = "runs/flow3d-eval"
    """Folder of episodes, videos and report; finished episodes are not run again."""
    seed: int = 0
    """Seed of the predictions."""
    model: FlowSourceConfig = field(default_factory=FlowSourceConfig)
    """Source of the flow."""
    loop: LoopConfig = field(default_factory=LoopConfig)
    """Verifier, grasps, planner; `loop.seed` is replaced by `seed`."""
    eval_data: dict[str, FlowEpisodesConfig] = field(default_factory=dict)
    """Sets of episodes by name; the first is the headline."""
    evaluation: LoopEvaluationConfig = field(default_factory=LoopEvaluationConfig)
    """Videos and samples."""
    trainer: ComputeConfig = field(default_factory=ComputeConfig)
    """Threads, named as in training runs."""

    def validate(self) -> None:
        """Check the fields; raises ValueError or UserError."""
        check_fields(self)
        if not self.eval_data:
            raise ValueError("eval_data is empty; add a set of episodes, such as eval_data: {seen: {arms: [panda]}}")
        if not self.model.path:
            raise ValueError(
                "model.path is empty; set it to a world model or run folder, or to truth for the true flow"
            )
        for part in parts_of(self):
            if hasattr(part, "validate"):
                part.validate()


class Flow3dEvaluation:
    """The part of a recipe's interface that `mmrl evaluate` uses.

    Args:
        config: model, planner and episodes.

    Raises:
        UserError: the model cannot be read, or a set names something unknown.
    """

    def __init__(self, config: Flow3dEvaluationConfig) -> None:
        self.config = config
        self.eval_tasks = held_out_tasks(config, lambda data, _: list_episodes(data))
        self._folder = world_model_folder(config.model.path)
        self.policy: nn.Module = nn.Identity()
        self._source: Source = TrueFlow
        if self._folder is not None:
            from robotics.flow3d.model import FlowWorldModel

            self.policy = self._source = FlowWorldModel.from_pretrained(self._folder).eval()
        self._source = _disturbed(self._source, config.model.still_share)
        self._runner = FlowEpisodeRunner(dataclasses.replace(config.loop, seed=config.seed), self._source)

    def evaluate(self, policy: nn.Module, split: str, accelerator: Accelerator, step: Step) -> Evaluation:
        """Run the episodes of a set."""
        measures, records = self.measures(policy, split, step), self.config.evaluation.records
        return evaluate_tasks(measures, self.eval_tasks[split], records, accelerator)

    def measures(self, policy: nn.Module, split: str, step: Step) -> list[FlowLoopMeasure]:
        """Success over the episodes of a set."""
        evaluation, folder = self.config.evaluation, expanded(self.config.output_dir)
        return [FlowLoopMeasure(self._runner, evaluation, split, folder, self._conditions())]

    evaluating = staticmethod(nullcontext)

    def close(self) -> None:
        """Free the renderers."""
        self._runner.close()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Ignore the state; an evaluation has none."""

    def _conditions(self) -> dict[str, Any]:
        import mujoco

        settings = dataclasses.asdict(self._runner.settings)
        weights = TRUTH if self._folder is None else folder_digest(self._folder)
        weights = f"{weights}, still {self.config.model.still_share:g}"
        about = {"weights": weights, "settings": json.loads(json.dumps(settings)), "mujoco": mujoco.__version__}
        # a custom arm comes from files that may change between runs, so their digest is a condition too
        names = {name for data in self.config.eval_data.values() for name in data.arms if ":" in name}
        arms = {name: find_flow_arm(name) for name in sorted(names)}
        digests = {
            name: short_digest(repr(arm).encode() + model_digest(arm.load()).encode())
            for name, arm in arms.items()
            if arm
        }
        if digests:
            about["arms"] = digests
        return about


def _disturbed(source: Source, still_share: float) -> Source:
    if not still_share:
        return source
    if isinstance(source, type) or not hasattr(source, "predict"):
        return lambda scene: StillPoints(source(scene), still_share)
    return StillPoints(source, still_share)


def world_model_folder(path: str) -> Path | None:
    """The folder of a world model; None for the true flow."""
    if path == TRUTH:
        return None
    folder = expanded(path)
    if not folder.is_dir():
        raise UserError(f"model.path {path!r} is not a folder; train a world model first, or use {TRUTH}")
    if is_run(folder):
        checkpoint = chosen_checkpoint(folder)
        # averaged weights, if the run kept them
        averaged = checkpoint / "eval_ema"
        folder = averaged if averaged.is_dir() else checkpoint / "model"
        LOGGER.info("evaluating %s", folder)
    return folder


def folder_digest(folder: Path) -> str:
    """Digest of a model's folder."""
    import hashlib

    digest = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        # names count too: weights may not move to another file unnoticed
        digest.update(file.relative_to(folder).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()[:16]
