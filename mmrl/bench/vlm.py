"""`mmrl bench vlm`: what computing each prompt once for its group saves in updates, sampling and whole steps.

The model is built from a configuration with random weights: 21.0 million of them (Qwen2.5-VL or Qwen3-VL, 6 layers of
width 384, a tower of 3 blocks of width 256), or with `--device cuda` the sizes of Qwen2.5-VL-3B in bfloat16. Query and
key weights are multiplied by `workload.ATTENTION_GAIN`. "16:1" and "288:48" are prompt to completion tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mmrl.bench.floor import (
    Dimensions,
    activation_bytes,
    decode_flops,
    dimensions_of,
    forward_flops,
)
from mmrl.bench.harness import Arm, BenchOptions, comparison, ratio, run_arms
from mmrl.bench.trl_arm import check_installed
from mmrl.bench.workload import ATTENTION_GAIN, Shape, build_model, questions_file

__all__ = ["NAMES", "compare"]

MEBIBYTE = 2**20
CPU_SHAPES = {
    "16:1": Shape((16, 16), 288, 18),
    "4:1": Shape((16, 16), 288, 72),
    "1:1": Shape((16, 16), 288, 288),
    "288:48": Shape((16, 16), 288, 48),
    "607:32": Shape((24, 24), 607, 32),
}
UPDATE_TARGETS = {
    "16:1": {"minimum": 5.5, "goal": 5.8},
    "4:1": {"minimum": 4.0, "goal": 4.1},
    "1:1": {"minimum": 2.1, "goal": 2.15},
}
UPDATE_MEMORY_GOALS = {"16:1": 5.5, "4:1": 3.8, "1:1": 2.2}
STEP_TARGETS = {
    "288:48": ({"minimum": 4.5, "goal": 6.0}, {"minimum": 3.5, "goal": 4.0}),
    "607:32": ({"minimum": 8.0, "goal": 9.0}, {"minimum": 5.0, "goal": 5.0}),
}
"""Time and memory against TRL."""
CUDA_SHAPE = ("1200:512", Shape((25, 40), 1200, 512))
QUICK_SHAPE = ("40:4", Shape((2, 2), 40, 4, 4))


def compare(options: BenchOptions) -> dict[str, dict[str, Any]]:
    """Run the comparisons that the options name.

    Args:
        options: what to run, how often and on which model.

    Returns:
        Results of `mmrl.bench.harness.comparison` by name.

    Raises:
        UserError: an unknown name, or a library to compare with that is not installed.
    """
    names = options.chosen(NAMES)
    if options.against == "trl":
        check_installed()
    bench = _Bench(options)
    return {name: COMPARISONS[name](bench) for name in names}


class _Bench:
    """The model, the sizes and the arms that the comparisons are made of.

    Args:
        options: what the command line says.
    """

    def __init__(self, options: BenchOptions) -> None:
        from transformers import AutoConfig

        self.options = options
        self.full = options.device == "cpu" and not options.quick
        self.model = options.model or self._build("3b" if options.device == "cuda" else "21m")
        self.size = dimensions_of(AutoConfig.from_pretrained(self.model))
        self._rates: dict[str, float] | None = None

    def shapes(self, *names: str) -> dict[str, Shape]:
        """The shapes of a comparison: those named, or the one of a GPU or of a quick run."""
        if self.full:
            return {name: CPU_SHAPES[name] for name in names}
        return dict([QUICK_SHAPE if self.options.quick else CUDA_SHAPE])

    def targets(self, limits: dict[str, Any]) -> dict[str, Any]:
        """Minimum and goal, which are those of a full run on CPUs."""
        return limits if self.full else {}

    def arm(self, name: str, function: str, shape: Shape, *, model: Path | None = None, **options: Any) -> Arm:
        """An arm that works on the benchmark's model, and on questions of a shape."""
        path = model or self.model
        data = questions_file(self.options.folder, path, shape)
        common = {"model": str(path), "data": str(data), "shape": dataclasses.asdict(shape)}
        blocks = options.pop("blocks", None)
        timed = options.pop("timed", True)
        return Arm(name, f"mmrl.bench.{function}", common | options, blocks=blocks, timed=timed)

    def wide_model(self) -> Path:
        """The same model with a vocabulary of 65536."""
        return self._build("21m-64k")

    def floor(self, shape: Shape) -> dict[str, Any]:
        """Operations and bytes of a forward and backward pass over one group, flat and shared."""
        sizes = (shape.prompt, [shape.completion] * shape.group, shape.image_tokens)
        width = 2 if self.options.device == "cuda" else 4
        forward = {shared: forward_flops(self.size, *sizes, shared=shared) for shared in (False, True)}
        kept = {shared: activation_bytes(self.size, *sizes, shared=shared, width=width) for shared in (False, True)}
        return {
            "forward_flops": {"rows": forward[False], "shared": forward[True]},
            "update_flops": {"rows": 3 * forward[False]["total"], "shared": 3 * forward[True]["total"]},
            "flop_ratio": forward[False]["total"] / forward[True]["total"],
            "activation_mb": {"rows": kept[False] / MEBIBYTE, "shared": kept[True] / MEBIBYTE},
            "byte_ratio": kept[False] / kept[True],
        }

    def reached(self, run: dict[str, Any], training_flops: float, decoding_flops: float = 0.0) -> dict[str, Any]:
        """Seconds that counted operations take at the rates of this machine, and the share of them in a run's."""
        rates = self.rates()
        floor_s = training_flops / rates["tall_flops"] + decoding_flops / rates["flat_flops"]
        found: dict[str, Any] = {"rates": rates, "floor_s": floor_s}
        if "cpu_s" in run:
            seconds = run["wall_s" if self.options.device == "cuda" else "cpu_s"]["total"]
            found |= {"floor_share": floor_s / seconds, "flops_per_second": training_flops / seconds}
        return found

    def rates(self) -> dict[str, float]:
        """Operations a second of this machine for the many rows of training and the few of decoding."""
        if self._rates is None:
            options = {"hidden": self.size.hidden, "intermediate": self.size.intermediate, "tall": 2048, "flat": 8}
            options["operations"] = 10**7 if self.options.quick else 2 * 10**10
            arm = Arm("matrix products", "mmrl.bench.floor:matmul_rates", options, timed=False)
            self._rates = run_arms("machine", [arm], self.options)["matrix products"].get("counts", {})
        return self._rates

    def _build(self, size: str) -> Path:
        size = "quick" if self.options.quick else size
        return build_model(self.options.folder, self.options.family, size)


def _update(bench: _Bench) -> dict[str, Any]:
    """Forward and backward pass of one group, rows of their own against shared prompts."""
    runs: dict[str, Any] = {}
    ratios: dict[str, Any] = {}
    floors: dict[str, Any] = {}
    for name, shape in bench.shapes("16:1", "4:1", "1:1").items():
        rows, tower, shared, pairs = (f"{name} {arm}" for arm in ("rows", "rows, tower once", "shared", "shared, by 2"))
        arms = [
            bench.arm(rows, "vlm_arms:update_arm", shape, layout="rows", micro_batch=0),
            bench.arm(shared, "vlm_arms:update_arm", shape, layout="shared", micro_batch=0),
            bench.arm(tower, "vlm_arms:update_arm", shape, layout="tower once", micro_batch=0, blocks=2),
            bench.arm(pairs, "vlm_arms:update_arm", shape, layout="shared", micro_batch=2, blocks=2),
        ]
        runs |= run_arms("update", arms, bench.options)
        floors[name] = bench.floor(shape)
        bound = floors[name]["flop_ratio"]
        floors[name] |= bench.reached(runs[shared], floors[name]["update_flops"]["shared"])
        limits = bench.targets(UPDATE_TARGETS.get(name, {}))
        ratios[f"{name} time"] = ratio(runs, rows, shared, bound=bound, **limits)
        ratios[f"{name} wall time"] = ratio(runs, rows, shared, "wall_s")
        ratios[f"{name} time over rows, tower once"] = ratio(runs, tower, shared)
        goal = bench.targets({"goal": UPDATE_MEMORY_GOALS.get(name, 0.0)})
        ratios[f"{name} memory"] = ratio(runs, rows, shared, "peak_mb", bound=floors[name]["byte_ratio"], **goal)
    notes = [
        "rows: each completion computes its own copy of prompt and image, with the suite's own code otherwise",
        "by 2: shared, with micro-batches of two completions",
        "memory includes the gradients; the bounds count matrix products and what they keep, and no gradients",
    ]
    return comparison(runs, ratios=ratios, floor=floors, notes=notes)


def _generation(bench: _Bench) -> dict[str, Any]:
    """Sampling one group against `generate` as TRL calls it."""
    ((name, shape),) = bench.shapes("288:48").items()
    arms = [
        bench.arm("generate", "vlm_arms:generate_arm", shape),
        bench.arm("sampler", "vlm_arms:sample_arm", shape),
    ]
    runs = run_arms("generation", arms, bench.options)
    sizes = (shape.prompt, [shape.completion] * shape.group)
    decode = decode_flops(bench.size, *sizes)
    prefill = _prefill_flops(bench.size, shape)
    floor = {"prefill_flops": prefill, "decode_flops": decode}
    floor["flop_ratio"] = (shape.group * prefill + decode) / (prefill + decode)
    floor |= bench.reached(runs["sampler"], prefill, decode)
    ratios = {
        f"{name} time": ratio(runs, "generate", "sampler", **bench.targets({"minimum": 4.0, "goal": 5.0})),
        f"{name} wall time": ratio(runs, "generate", "sampler", "wall_s"),
        f"{name} memory": ratio(runs, "generate", "sampler", "peak_mb"),
    }
    return comparison(runs, ratios=ratios, floor=floor, notes=["no arm may end a completion before its last token"])


def _step(bench: _Bench) -> dict[str, Any]:
    """Whole GRPO steps, of the suite and with `--against trl` of TRL's trainer."""
    runs: dict[str, Any] = {}
    ratios: dict[str, Any] = {}
    floors: dict[str, Any] = {}
    for name, shape in bench.shapes("288:48", "607:32").items():
        ours, theirs = f"{name} mmrl", f"{name} trl"
        arms = [bench.arm(ours, "vlm_arms:step_arm", shape)]
        if bench.options.against == "trl":
            arms = [*_trl_arms(bench, name, shape), *arms]
        runs |= run_arms("step", arms, bench.options)
        floors[name] = _step_floor(bench, shape, runs[ours])
        if bench.options.against == "trl":
            ratios |= _against_trl(bench, name, runs, theirs, ours)
    notes = [
        "one prompt, 8 completions, no KL term, one update with AdamW and clipping at norm 1, trained vision tower",
        "each arm samples its own tokens: the work is equal in shape, not token for token",
        "trl: GRPOTrainer without gradient checkpointing and logging, attention sdpa; trl defaults: as it comes",
    ]
    if bench.options.device == "cpu":
        notes.append("on a CPU trl projects every position to the vocabulary, about 9 % of its forward operations")
    return comparison(runs, ratios=ratios, floor=floors, notes=notes)


def _trl_arms(bench: _Bench, name: str, shape: Shape) -> list[Arm]:
    fastest = bench.arm(f"{name} trl", "trl_arm:step_arm", shape, gradient_checkpointing=False)
    default = bench.arm(f"{name} trl defaults", "trl_arm:step_arm", shape, gradient_checkpointing=True, blocks=1)
    return [fastest, default]


def _against_trl(bench: _Bench, name: str, runs: dict[str, Any], theirs: str, ours: str) -> dict[str, Any]:
    time, memory = STEP_TARGETS.get(name, ({}, {}))
    predicted: dict[str, Any] = {"goal": 6.0} if bench.options.device == "cuda" else {}
    return {
        f"{name} time": ratio(runs, theirs, ours, **(bench.targets(time) or predicted)),
        f"{name} wall time": ratio(runs, theirs, ours, "wall_s"),
        f"{name} memory": ratio(runs, theirs, ours, "peak_mb", **bench.targets(memory)),
        f"{name} generation": ratio(runs, theirs, ours, stage="generate"),
        f"{name} update": ratio(runs, theirs, ours, stage="update"),
        f"{name} time over trl defaults": ratio(runs, f"{name} trl defaults", ours),
    }


def _step_floor(bench: _Bench, shape: Shape, run: dict[str, Any]) -> dict[str, Any]:
    """A step needs each prompt once: sampling leaves it, with its history, to the update."""
    training = bench.floor(shape)["update_flops"]
    decode = decode_flops(bench.size, shape.prompt, [shape.completion] * shape.group)
    prefill = _prefill_flops(bench.size, shape)
    flops = {
        "rows": training["rows"] + shape.group * prefill + decode,
        "shared": training["shared"] + decode,
    }
    weights = _weight_bytes(bench)
    floor = {"flops": flops, "flop_ratio": flops["rows"] / flops["shared"], "weights_and_optimiser_mb": weights}
    return floor | bench.reached(run, training["shared"], decode)


def _papo(bench: _Bench) -> dict[str, Any]:
    """Training passes of one PAPO step against an emulation of the public recipe in rows."""
    ((name, shape),) = bench.shapes("4:1").items()
    arms = [
        bench.arm("rows (emulation)", "vlm_arms:papo_arm", shape, layout="rows"),
        bench.arm("shared", "vlm_arms:papo_arm", shape, layout="shared"),
    ]
    runs = run_arms("papo", arms, bench.options)
    floor = bench.floor(shape)
    forward = floor["forward_flops"]
    # old, reference and masked pass and an update of three; without the old pass five
    flops = {"rows": 6 * forward["rows"]["total"], "shared": 5 * forward["shared"]["total"]}
    floor |= {"flops": flops, "flop_ratio": flops["rows"] / flops["shared"]}
    floor |= bench.reached(runs["shared"], flops["shared"])
    limits = bench.targets({"minimum": 4.0, "goal": 4.5})
    ratios = {
        f"{name} time": ratio(runs, "rows (emulation)", "shared", bound=floor["flop_ratio"], **limits),
        f"{name} wall time": ratio(runs, "rows (emulation)", "shared", "wall_s"),
        f"{name} memory": ratio(runs, "rows (emulation)", "shared", "peak_mb"),
    }
    notes = [
        "emulation: the public recipe's passes (old, reference, masked, update) in the suite's own code, in rows with "
        "an image each; its program itself needs CUDA packages and was not run"
    ]
    return comparison(runs, ratios=ratios, floor=floor, notes=notes)


def _memory(bench: _Bench) -> dict[str, Any]:
    """What bounds the memory of an update: sharing, micro-batches, and a head without logits."""
    ((name, shape),) = bench.shapes("4:1").items()
    arms = [
        bench.arm(f"{layout}{suffix}", "vlm_arms:update_arm", shape, layout=layout, micro_batch=rows, blocks=1)
        for layout in ("rows", "shared")
        for rows, suffix in ((0, ""), (2, ", by 2"), (1, ", by 1"))
    ]
    arms += [
        bench.arm(
            "shared, vocabulary 65536",
            "vlm_arms:update_arm",
            shape,
            model=bench.wide_model(),
            layout="shared",
            micro_batch=0,
            blocks=1,
        )
    ] * bench.full
    runs = run_arms("memory", arms, bench.options)
    ratios = {
        f"{name} memory": ratio(runs, "rows", "shared", "peak_mb"),
        f"{name} memory, shared by 2 over rows by 1": ratio(runs, "shared, by 2", "rows, by 1", "peak_mb"),
        f"{name} time, rows by 1 over shared by 2": ratio(runs, "rows, by 1", "shared, by 2"),
    }
    tokens = shape.group * shape.completion
    floor = bench.floor(shape) | {"logits_never_held_mb": {str(v): tokens * v * 4 / MEBIBYTE for v in (8192, 65536)}}
    return comparison(runs, ratios=ratios, floor=floor, notes=["memory includes the gradients"])


def _tricks(bench: _Bench) -> dict[str, Any]:
    """Each saving switched off alone in the whole step."""
    ((name, shape),) = bench.shapes("288:48").items()
    off: dict[str, dict[str, Any]] = {
        "everything on": {},
        "no lean decoder": {"lean": False},
        "prefill not kept": {"keep_prefill": False},
        "no shared prefix": {"layout": "tower once"},
        "no shared prefix, tower for each row": {"layout": "rows"},
    }
    groups = {"tasks_per_step": 4, "reward": "mmrl.bench.workload:half_dead_reward"}
    dead = {"4 groups, 2 dead": groups, "4 groups, 2 dead, not skipped": groups | {"skip_dead_groups": False}}
    arms = [bench.arm(arm, "vlm_arms:step_arm", shape, **switched) for arm, switched in (off | dead).items()]
    runs = run_arms("tricks", arms, bench.options)
    ratios = {f"{name} {arm}": ratio(runs, arm, "everything on") for arm in list(off)[1:]}
    ratios[f"{name} dead groups not skipped"] = ratio(runs, *reversed(dead))
    return comparison(runs, ratios=ratios, notes=["each ratio is the time of a step without one saving over with all"])


def _equality(bench: _Bench) -> dict[str, Any]:
    """Log-probs and gradients of shared prompts against rows of their own, with a negative control."""
    ((_, shape),) = bench.shapes("4:1").items()
    arm = bench.arm("equality", "equality:equality_arm", dataclasses.replace(shape, group=4), timed=False)
    runs = run_arms("equality", [arm], bench.options)
    notes = [f"query and key weights times {ATTENTION_GAIN:g}; two groups, completions of all lengths from 1 to T"]
    return comparison(runs, notes=notes)


def _prefill_flops(size: Dimensions, shape: Shape) -> float:
    """Operations of reading a prompt with its image once."""
    whole = forward_flops(size, shape.prompt, [], shape.image_tokens, shared=True)
    return whole["total"]


def _weight_bytes(bench: _Bench) -> float:
    """MB of weights, gradients and the two moments of AdamW."""
    import json

    index = Path(bench.model) / "model.safetensors.index.json"
    if index.is_file():
        size = json.loads(index.read_text(encoding="utf-8"))["metadata"]["total_size"]
    else:
        size = (Path(bench.model) / "model.safetensors").stat().st_size
    return 4.0 * size / MEBIBYTE


COMPARISONS: dict[str, Callable[[_Bench], dict[str, Any]]] = {
    "equality": _equality,
    "update": _update,
    "generation": _generation,
    "step": _step,
    "papo": _papo,
    "memory": _memory,
    "tricks": _tricks,
}
NAMES = tuple(COMPARISONS)
