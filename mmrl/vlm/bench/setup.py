"""What the comparisons of `python -m benchmarks vlm` share: model, shapes, arms and what counted work would take."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from mmrl.bench.floor import (
    activation_bytes,
    decode_bytes,
    decode_flops,
    dimensions_of,
    forward_flops,
)
from mmrl.bench.harness import Arm, BenchOptions, run_arms
from mmrl.errors import UserError
from mmrl.vlm.bench.workload import Shape, build_model, questions_file

MEBIBYTE = 2**20
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
        from transformers import AutoConfig

        _check(options)
        self.options = options
        self.full = options.device == "cpu" and not options.quick
        self.model = options.model or self._build("3b" if options.device == "cuda" else "21m")
        self.size = dimensions_of(AutoConfig.from_pretrained(self.model))
        self.width = 2 if options.device == "cuda" else 4
        self._rates: dict[str, float] | None = None

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
        """Minimum and goal, which are those of a full run on CPUs with the model that is built by default."""
        usual = self.options.model is None and self.options.family == BenchOptions.family
        return limits if self.full and usual else {}

    def arm(self, name: str, function: str, shape: Shape, *, model: Path | None = None, **options: Any) -> Arm:
        """An arm that works on the benchmark's model, and on questions of a shape."""
        path = model or self.model
        data = questions_file(self.options.folder, path, shape)
        common = {"model": str(path), "data": str(data), "shape": dataclasses.asdict(shape)}
        blocks = options.pop("blocks", None)
        timed = options.pop("timed", True)
        return Arm(name, f"mmrl.vlm.bench.{function}", common | options, blocks=blocks, timed=timed)

    def small(self) -> tuple[Path, Shape]:
        """Model and shape for what needs float32 and no size, on GPUs too."""
        shape = QUICK_SHAPE[1] if self.options.quick else CPU_SHAPES["4:1"]
        return self.options.model or self._build("21m"), shape

    def wide_model(self) -> Path:
        """The model that is built on CPUs, with a vocabulary of 65536."""
        return self._build("21m-64k")

    def prefill_flops(self, shape: Shape) -> float:
        """Operations of reading a prompt with its image once."""
        found = forward_flops(self.size, shape.prompt, [], shape.image_tokens, shared=True, images=shape.images)
        return found["total"]

    def decode(self, shape: Shape) -> tuple[float, float]:
        """Operations of drawing a group's completions after that, and the bytes that are read."""
        sizes = (shape.prompt, [shape.completion] * shape.group)
        return decode_flops(self.size, *sizes), decode_bytes(self.size, *sizes, self.width)

    def weights_mb(self) -> float:
        """Weights, gradients and the two moments of AdamW."""
        index = Path(self.model) / "model.safetensors.index.json"
        if index.is_file():
            size = json.loads(index.read_text(encoding="utf-8"))["metadata"]["total_size"]
        else:
            size = (Path(self.model) / "model.safetensors").stat().st_size
        return float(4.0 * size / MEBIBYTE)

    def floor(self, shape: Shape) -> dict[str, Any]:
        """Operations and bytes of a forward and backward pass over one group, flat and shared."""
        sizes = (shape.prompt, [shape.completion] * shape.group, shape.image_tokens)
        rows, shared = (forward_flops(self.size, *sizes, shared=way, images=shape.images) for way in (False, True))
        kept, few = (activation_bytes(self.size, *sizes, shared=way, width=self.width) for way in (False, True))
        return {
            "forward_flops": {"rows": rows, "shared": shared},
            "update_flops": {"rows": 3 * rows["total"], "shared": 3 * shared["total"]},
            "flop_ratio": rows["total"] / shared["total"],
            "activation_mb": {"rows": kept / MEBIBYTE, "shared": few / MEBIBYTE},
            "byte_ratio": kept / few,
        }

    def reached(self, run: dict[str, Any], training_flops: float, drawn: Shape | None = None) -> dict[str, Any]:
        """Seconds that counted work takes at the rates of this machine, and what share of a run's they are.

        Args:
            run: an arm's summary.
            training_flops: operations on many rows at a time.
            drawn: the shape of the completions that are decoded too; None where none are.
        """
        rates = self.rates()
        if not rates:
            return {}
        flops, floor_s = training_flops, training_flops / rates["tall_flops"]
        if drawn is not None:
            decoding, read = self.decode(drawn)
            floor_s += max(decoding / rates["flat_flops"], read / rates["read_bytes"])
            flops += decoding
        found: dict[str, Any] = {"rates": rates, "floor_s": floor_s}
        if "cpu_s" in run:
            seconds = run["wall_s" if self.options.device == "cuda" else "cpu_s"]["total"]
            found |= {"floor_share": floor_s / seconds, "matmul_utilisation": flops / seconds / rates["tall_flops"]}
        return found

    def bound(self, run: dict[str, Any], floor: dict[str, Any]) -> float | None:
        """What an arm's seconds are over those of the floor; None where either is not known."""
        quantity = "wall_s" if self.options.device == "cuda" else "cpu_s"
        if quantity not in run or "floor_s" not in floor:
            return None
        return float(run[quantity]["total"] / floor["floor_s"])

    def rates(self) -> dict[str, float]:
        """Operations a second of this machine for the many rows of training and the few of decoding."""
        if self._rates is None:
            options = {"hidden": self.size.hidden, "intermediate": self.size.intermediate, "tall": 2048, "flat": 8}
            quick = self.options.quick
            options |= {"operations": 10**7 if quick else 10**10, "read": 2**20 if quick else 2**28}
            arm = Arm("matrix products", "mmrl.bench.floor:matmul_rates", options, timed=False)
            self._rates = run_arms("machine", [arm], self.options)["matrix products"].get("counts", {})
        return self._rates

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
