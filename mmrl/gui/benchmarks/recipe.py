"""Evaluation of a vision-language model on published grounding benchmarks: `mmrl evaluate configs/gui/eval_....yaml`.

It trains nothing; `mmrl train` refuses it. The model is a folder, a hub id or the folder of a run, whose best
checkpoint is taken. Screens are resized once, by the rule of qwen-vl-utils, after a limit on visual tokens; the
question names the resized size; points are converted to pixels of the original screen and compared with the published
boxes.

Source: InfiXAI/InfiGUI-G1 eval/eval.py (protocol: greedy, 1024 new tokens, 5600 visual tokens, first and any point).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from mmrl.errors import UserError
from mmrl.fields import bounded, check_fields, choice, parts_of
from mmrl.gui.benchmarks.evaluation import GroundingEvaluationOptions, GroundingMeasure, GroundingTask
from mmrl.gui.benchmarks.loading import BenchmarkConfig, load_benchmark
from mmrl.gui.benchmarks.prompts import PromptConfig, asks_refusals, question
from mmrl.gui.benchmarks.table import find_benchmark
from mmrl.gui.coords import FAMILIES, MAX_TOKENS, MIN_TOKENS, Resize
from mmrl.gui.samples import GroundingSample
from mmrl.hub.images import image_pixels_option
from mmrl.training.export import chosen_checkpoint
from mmrl.training.loop.evaluation import Evaluation, evaluate_tasks
from mmrl.training.loop.settings import PRECISIONS
from mmrl.vlm.model_config import ModelConfig
from mmrl.vlm.models import load_policy
from mmrl.vlm.policy import VlmPolicy
from mmrl.vlm.sampling import SamplerConfig

LOGGER = logging.getLogger("mmrl")
VISUAL_TOKENS = 5600
NEW_TOKENS = 1024


@dataclass
class ComputeConfig:
    """How the evaluation computes."""

    mixed_precision: str = choice("none", PRECISIONS)
    """Autocast: none or bf16."""
    threads: int = bounded(0, at_least=0)
    """CPU threads of torch; 0 = leave as it is."""


@dataclass
class GreedyConfig:
    """How answers are decoded: always the most likely token."""

    max_new_tokens: int = bounded(NEW_TOKENS, at_least=1)
    """Longest answer in tokens."""
    stop: list[str] = field(default_factory=list)
    """An answer ends with the token that completes one of these strings."""

    @property
    def sampler(self) -> SamplerConfig:
        """The same for the sampler."""
        return SamplerConfig(max_new_tokens=self.max_new_tokens, stop=self.stop)


@dataclass
class GroundingEvaluationConfig:
    """A model, how it is asked, and the benchmarks."""

    recipe: str = ""
    """grounding_eval."""
    output_dir: str = "runs/grounding-eval"
    """Folder of answers, tables and pictures; answers that are there are not computed again."""
    seed: int = 0
    """Seed of whatever a model's code draws; answers are greedy."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """Model; `path` may also be a run's folder. `min_pixels` and `max_pixels` bound the resized screen; empty: 4 and
    16384 tokens."""
    visual_tokens: int = bounded(VISUAL_TOKENS, at_least=0)
    """Larger screens are first scaled to this many visual tokens, as in InfiGUI-G1's evaluation; 0 = not."""
    prompt: PromptConfig = field(default_factory=PromptConfig)
    """How the model is asked."""
    eval_data: dict[str, BenchmarkConfig] = field(default_factory=dict)
    """Benchmarks by a name of your choice."""
    sampler: GreedyConfig = field(default_factory=GreedyConfig)
    """Longest answer and stop strings."""
    evaluation: GroundingEvaluationOptions = field(default_factory=GroundingEvaluationOptions)
    """Batches, parser, pictures."""
    max_image_pixels: int = image_pixels_option()
    """Largest screen in pixels, checked by its header before it is decoded."""
    trainer: ComputeConfig = field(default_factory=ComputeConfig)
    """Precision and threads, under the names that they have in training runs."""

    def validate(self) -> None:
        """Check the fields and that there is something to evaluate; raises ValueError or UserError."""
        check_fields(self)
        if not self.eval_data:
            raise ValueError("eval_data is empty; name a benchmark: eval_data: {name: {benchmark: ..., path: ...}}")
        for data in self.eval_data.values():
            find_benchmark(data.benchmark)
        for part in parts_of(self):
            if hasattr(part, "validate"):
                part.validate()


class GroundingEvaluation:
    """What `mmrl evaluate` needs of a recipe."""

    def __init__(self, config: GroundingEvaluationConfig) -> None:
        self.config = config
        samples = {name: load_benchmark(data) for name, data in config.eval_data.items()}
        self.preset = config.prompt.resolved(config.model.path)
        model = replace(config.model, path=_model_path(config.model.path))
        self.policy: VlmPolicy = load_policy(model)
        self.policy.check_response_length(config.sampler.max_new_tokens)
        self.resize = self._make_resize()
        self._check_space()
        self.eval_tasks = {name: self._tasks(found) for name, found in samples.items()}

    def evaluate(self, policy: VlmPolicy, split: str, accelerator: Accelerator) -> Evaluation:
        """Answer a benchmark and write its results."""
        config = self.config
        tasks = self.eval_tasks[split]
        measure = GroundingMeasure(
            policy=policy,
            benchmark=find_benchmark(config.eval_data[split].benchmark),
            tasks=tasks,
            preset=self.preset,
            options=config.evaluation,
            sampler=config.sampler.sampler,
            split=split,
            run_dir=Path(config.output_dir),
            setting=self._setting(split),
        )
        return evaluate_tasks([measure], tasks, config.evaluation.records, accelerator)

    def close(self) -> None:
        """Nothing is left open."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing of a training run's state changes an evaluation."""

    def _tasks(self, samples: list[GroundingSample]) -> list[GroundingTask]:
        refusals = asks_refusals(samples)
        found = []
        for sample in samples:
            try:
                fitted = sample.fitted(self.resize)
            except ValueError as error:
                raise UserError(f"{sample.meta['place']}: {error}") from None
            task = question(fitted, self.preset, refusals, self.config.max_image_pixels)
            found.append(GroundingTask(fitted, task))
        return found

    def _make_resize(self) -> Resize:
        """The one resize, and a processor that leaves its result as it is."""
        layout, model = self.policy.layout, self.config.model
        factor = layout.patch_size * layout.merge_size
        shrink_to = self.config.visual_tokens * factor**2 or None
        low, high = model.min_pixels or MIN_TOKENS * factor**2, model.max_pixels or MAX_TOKENS * factor**2
        self.policy.processor.image_processor.size = {"shortest_edge": low, "longest_edge": high}
        return Resize(factor, low, high, shrink_to)

    def _check_space(self) -> None:
        family = FAMILIES.get(self.policy.network.config.model_type)
        if family is not None and family.space is not self.preset.space:
            LOGGER.warning(
                "points are read as %s; models of type %s were trained to write %s (prompt.space)",
                self.preset.space,
                self.policy.network.config.model_type,
                family.space,
            )

    def _setting(self, split: str) -> dict[str, Any]:
        """Everything that a number depends on, for the reader of the results."""
        import transformers

        config, preset = self.config, self.preset
        return {
            "model": config.model.path,
            "dtype": config.model.dtype,
            "mixed_precision": config.trainer.mixed_precision,
            "prompt": config.prompt.preset,
            "system": preset.system,
            "user": preset.user,
            "prefix": preset.prefix,
            "coordinate_space": str(preset.space),
            "visual_tokens": config.visual_tokens,
            "min_pixels": self.resize.min_pixels,
            "max_pixels": self.resize.max_pixels,
            "factor": self.resize.factor,
            "max_new_tokens": config.sampler.max_new_tokens,
            "stop": list(config.sampler.stop),
            "decoding": "greedy",
            "parser": config.evaluation.parser,
            "suspicious_boxes": sum(bool(entry.sample.meta["suspicious"]) for entry in self.eval_tasks[split]),
            "language": config.eval_data[split].language,
            "transformers": transformers.__version__,
        }


def _model_path(path: str) -> str:
    """The folder of a run stands for its best checkpoint, else its newest one."""
    folder = Path(path).expanduser()
    if (folder / "checkpoints").is_dir() and (folder / "config.yaml").is_file():
        chosen = chosen_checkpoint(folder) / "model"
        LOGGER.info("evaluating %s", chosen)
        return str(chosen)
    return path
