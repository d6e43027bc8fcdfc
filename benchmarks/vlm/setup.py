"""Shared parts of the VLM comparisons: model, shapes and arms."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from benchmarks.harness import Arm, BenchOptions
from benchmarks.vlm.workload import Shape, build_model, questions_file
from mmrl.errors import UserError

CPU_SHAPES = {
    "16:1": Shape((16, 16), 288, 18),
    "4:1": Shape((16, 16), 288, 72),
    "1:1": Shape((16, 16), 288, 288),
    "288:48": Shape((16, 16), 288, 48),
    "607:32": Shape((24, 24), 607, 32),
    "4:1 video": Shape((8, 8), 384, 96, frames=8),
}
CUDA_SHAPE = ("1200:512", Shape((25, 40), 1200, 512))
QUICK_SHAPE = ("40:4", Shape((2, 2), 40, 4, 4))
CUDA_VIDEO = ("1200:512 video", Shape((10, 10), 1200, 512, frames=20))
QUICK_VIDEO = ("80:4 video", Shape((2, 2), 80, 4, 4, frames=4))


class Bench:
    """The model, the sizes and the arms that the comparisons are made of."""

    def __init__(self, options: BenchOptions) -> None:
        _check(options)
        self.options = options
        self.full = options.device == "cpu" and not options.quick
        self.model = options.model or self._build("3b" if options.device == "cuda" else "21m")

    def shapes(self, *names: str) -> dict[str, Shape]:
        """The shapes of a comparison: those named, or the one of a GPU or of a quick run."""
        if self.full:
            return {name: CPU_SHAPES[name] for name in names}
        return dict([QUICK_SHAPE if self.options.quick else CUDA_SHAPE])

    def video_shape(self) -> tuple[str, Shape]:
        """Name and shape of a group whose prompt has a video in place of an image."""
        if self.full:
            return "4:1 video", CPU_SHAPES["4:1 video"]
        return QUICK_VIDEO if self.options.quick else CUDA_VIDEO

    def targets(self, limits: dict[str, Any]) -> dict[str, Any]:
        """Minimum and goal, which are those of a full run on CPUs with the default model."""
        usual = self.options.model is None and self.options.family == BenchOptions.family
        return limits if self.full and usual else {}

    def arm(self, name: str, function: str, shape: Shape, *, model: Path | None = None, **options: Any) -> Arm:
        """An arm that works on the benchmark's model, and on questions of a shape."""
        path = model or self.model
        data = questions_file(self.options.folder, path, shape)
        common = {"model": str(path), "data": str(data), "shape": dataclasses.asdict(shape)}
        blocks, timed = options.pop("blocks", None), options.pop("timed", True)
        return Arm(name, f"benchmarks.vlm.{function}", common | options, blocks=blocks, timed=timed)

    def small(self) -> tuple[Path, Shape]:
        """Model and shape of comparisons that need float32 and no size, on GPUs too."""
        shape = QUICK_SHAPE[1] if self.options.quick else CPU_SHAPES["4:1"]
        return self.options.model or self._build("21m"), shape

    def wide_model(self) -> Path:
        """The default model on CPUs, with a vocabulary of 65536."""
        return self._build("21m-64k")

    def _build(self, size: str) -> Path:
        size = "quick" if self.options.quick else size
        return build_model(self.options.folder, self.options.family, size)


def _check(options: BenchOptions) -> None:
    if options.model is not None and options.family != BenchOptions.family:
        raise UserError("--family says which model is built, --model names one that exists; give one of them")
    if options.model is not None and not (options.model / "config.json").is_file():
        raise UserError(f"--model {options.model} is not a model folder: it has no config.json")
    if options.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise UserError("--device cuda: there is no GPU that this PyTorch can use")
