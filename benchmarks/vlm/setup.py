"""Shared parts of the VLM comparisons: model, shapes and arms."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import Arm, BenchOptions
from benchmarks.vlm.workload import GENERIC, Shape, build_model, questions_file
from mmrl.errors import UserError
from mmrl.files import read_json_object
from mmrl.hub.packaged import PACKAGED, resolve_packaged

CPU_SHAPES = {
    "16:1": Shape((16, 16), 288, 18),
    "4:1": Shape((16, 16), 288, 72),
    "1:1": Shape((16, 16), 288, 288),
    "288:48": Shape((16, 16), 288, 48),
    "607:32": Shape((24, 24), 607, 32),
    "4:1 video": Shape((8, 8), 384, 96, frames=8),
}
CUDA_SHAPE = ("1200:512", Shape((25, 40), 1200, 512))
TEXT_SHAPES = {"62:24": Shape((0, 0), 62, 24), "288:48": Shape((0, 0), 288, 48)}
"""Whole steps of the language model given by `--model`."""
QUICK_SHAPE = ("40:4", Shape((2, 2), 40, 4, 4))
TEXT_ONLY = {"qwen3": (0, 0)}
"""Image grid of families without images."""
CUDA_VIDEO = ("1200:512 video", Shape((10, 10), 1200, 512, frames=20))
QUICK_VIDEO = ("80:4 video", Shape((2, 2), 80, 4, 4, frames=4))


class Bench:
    """The model, sizes and arms of the comparisons."""

    def __init__(self, options: BenchOptions) -> None:
        self.packaged = options.model is not None and str(options.model) in PACKAGED
        """Whether `--model` is a packaged model; the targets for whole steps of a language model only apply to it."""
        if self.packaged:
            options = dataclasses.replace(options, model=Path(resolve_packaged(str(options.model))))
        _check(options)
        self.options = options
        self.full = options.device == "cpu" and not options.quick
        self.model = options.model or self.build(options.family)
        self.text = options.model is not None and _reads_text_alone(options.model)
        """Whether `--model` is a language model, whose prompts have no image."""

    def shapes(self, *names: str) -> dict[str, Shape]:
        """The shapes of a comparison: those named, or the one of a GPU or of a quick run."""
        found = {name: CPU_SHAPES[name] for name in names} if self.full else {}
        found = found or dict([QUICK_SHAPE if self.options.quick else CUDA_SHAPE])
        grid = {"grid": (0, 0)} if self.text else {}
        return {name: dataclasses.replace(shape, **grid) for name, shape in found.items()}

    def steps(self) -> Iterator[tuple[str, Shape, Path, bool]]:
        """Name, shape and model of the measured whole steps, and whether the model is a Qwen-VL."""
        options = self.options
        if self.text:
            shapes = TEXT_SHAPES if self.full else self.shapes()
            yield from ((name, shape, self.model, False) for name, shape in shapes.items())
        elif options.family not in GENERIC:
            yield from ((name, shape, self.model, True) for name, shape in self.shapes("288:48", "607:32").items())
        if options.device == "cpu" and options.model is None and options.family in (BenchOptions.family, *GENERIC):
            ((name, shape),) = self.shapes("288:48").items()
            for family in GENERIC if options.family == BenchOptions.family else (options.family,):
                own = dataclasses.replace(shape, grid=TEXT_ONLY.get(family, shape.grid))
                yield f"{family} {name}", own, self.build(family), False

    def video_shape(self) -> tuple[str, Shape]:
        """Name and shape of a group whose prompt has a video instead of an image."""
        if self.full:
            return "4:1 video", CPU_SHAPES["4:1 video"]
        return QUICK_VIDEO if self.options.quick else CUDA_VIDEO

    def targets(self, limits: dict[str, Any]) -> dict[str, Any]:
        """Minimum and goal, which apply to a full run on CPUs with the default model."""
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
        """Model and shape of comparisons that need float32 but no particular size, on GPUs too."""
        shape = QUICK_SHAPE[1] if self.options.quick else CPU_SHAPES["4:1"]
        return self.options.model or self.build(self.options.family, "21m"), shape

    def wide_model(self) -> Path:
        """The default model on CPUs, with a vocabulary of 65536."""
        return self.build(self.options.family, "21m-64k")

    def build(self, family: str, size: str = "") -> Path:
        """A model of a family; the size depends on the device unless one is given."""
        size = size or ("3b" if self.options.device == "cuda" else "21m")
        return build_model(self.options.folder, family, "quick" if self.options.quick else size, self.options.device)


def _reads_text_alone(model: Path) -> bool:
    """Whether the configuration of a model folder names no part for images."""
    return "vision_config" not in read_json_object(model / "config.json")


def _check(options: BenchOptions) -> None:
    if options.model is not None and options.family != BenchOptions.family:
        raise UserError("--family builds a model, --model uses an existing one; pass only one of them")
    if options.family in GENERIC and (options.only != ["step"] or options.device == "cuda"):
        raise UserError(f"--family {options.family} is only supported by --only step, on a CPU")
    if options.model is not None and not (options.model / "config.json").is_file():
        raise UserError(f"--model {options.model} is not a model folder: it has no config.json")
    if options.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise UserError("--device cuda: this PyTorch found no usable GPU")
