"""`python -m benchmarks vlm`: savings from computing each prompt once per group in updates, sampling and whole steps.

The model is built from a configuration with random weights: 21.0 million of them (Qwen2.5-VL or Qwen3-VL, 6 layers of
width 384, a tower of 3 blocks of width 256), or with `--device cuda` the sizes of Qwen2.5-VL-3B in bfloat16. Query and
key weights are multiplied by `workload.ATTENTION_GAIN`. "16:1" and "288:48" are prompt to completion tokens. `--model`
names a model folder instead; with a language model the comparisons without images run, and whole steps at two shapes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from benchmarks.harness import BenchOptions, comparison, ratio, run_arms
from benchmarks.vlm.long_video import compare_long_video
from benchmarks.vlm.setup import CPU_SHAPES, Bench
from benchmarks.vlm.trl_arm import check_installed
from benchmarks.vlm.workload import ATTENTION_GAIN
from mmrl.errors import UserError

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
TEXT_TARGETS = {"62:24": ({"goal": 2.5}, {"goal": 1.5}), "288:48": ({"goal": 3.5}, {"goal": 2.0})}
"""The same for whole steps of SmolLM2, `--model smollm2`."""
OTHER_TARGETS = ({"minimum": 3.0}, {"minimum": 2.0})
"""The same for other families than Qwen-VL."""
IMAGES = ("video", "long-video", "papo", "equality", "turns")
"""Comparisons that a language model cannot run."""


def compare(options: BenchOptions) -> dict[str, dict[str, Any]]:
    """Run the comparisons selected by the options; results of `benchmarks.harness.comparison` by name."""
    names = options.chosen(NAMES)
    if options.against == "trl":
        check_installed()
    bench = Bench(options)
    if bench.text:
        names = _without_images(names, options)
    return {name: COMPARISONS[name](bench) for name in names}


def _without_images(names: list[str], options: BenchOptions) -> list[str]:
    """The comparisons that only need text; raises UserError if another one was requested."""
    if options.only and (refused := [name for name in names if name in IMAGES]):
        left = ", ".join(name for name in NAMES if name not in IMAGES)
        raise UserError(
            f"--only {refused[0]} needs images, which --model {options.model} does not support; available: {left}"
        )
    return [name for name in names if name not in IMAGES]


def _ratios(runs: dict[str, Any], name: str, baseline: str, ours: str, **limits: Any) -> dict[str, Any]:
    """CPU time, judged by the limits, wall time and memory of two arms."""
    return {
        f"{name} time": ratio(runs, baseline, ours, **limits),
        f"{name} wall time": ratio(runs, baseline, ours, "wall_s"),
        f"{name} memory": ratio(runs, baseline, ours, "peak_mb"),
    }


def _update(bench: Bench) -> dict[str, Any]:
    """Forward and backward pass of one group, rows of their own against shared prompts."""
    runs: dict[str, Any] = {}
    ratios: dict[str, Any] = {}
    for name, shape in bench.shapes("16:1", "4:1", "1:1").items():
        rows, tower, shared, pairs = (f"{name} {arm}" for arm in ("rows", "rows, tower once", "shared", "shared, by 2"))
        arms = [
            bench.arm(rows, "arms:update_arm", shape, layout="rows", micro_batch=0),
            bench.arm(shared, "arms:update_arm", shape, layout="shared", micro_batch=0),
            bench.arm(tower, "arms:update_arm", shape, layout="tower once", micro_batch=0, blocks=2),
            bench.arm(pairs, "arms:update_arm", shape, layout="shared", micro_batch=2, blocks=2),
        ]
        runs |= run_arms("update", arms, bench.options)
        ratios |= _ratios(runs, name, rows, shared, **bench.targets(UPDATE_TARGETS.get(name, {})))
        ratios[f"{name} time over rows, tower once"] = ratio(runs, tower, shared)
        goal = bench.targets({"goal": UPDATE_MEMORY_GOALS.get(name, 0.0)})
        ratios[f"{name} memory"] = ratio(runs, rows, shared, "peak_mb", **goal)
    notes = [
        "rows: each completion computes its own copy of prompt and image, with the suite's own code otherwise",
        "by 2: shared, with micro-batches of two completions",
        "memory includes the gradients",
    ]
    return comparison(runs, ratios=ratios, notes=notes)


def _video(bench: Bench) -> dict[str, Any]:
    """Forward and backward pass of one group whose prompt has a video."""
    name, shape = bench.video_shape()
    rows, tower, shared = (f"{name} {arm}" for arm in ("rows", "rows, tower once", "shared"))
    layouts = {rows: "rows", shared: "shared", tower: "tower once"}
    arms = [
        bench.arm(arm, "arms:update_arm", shape, layout=layout, micro_batch=0, blocks=2 if arm == tower else None)
        for arm, layout in layouts.items()
    ]
    runs = run_arms("video", arms, bench.options)
    ratios = _ratios(runs, name, rows, shared)
    ratios[f"{name} time over rows, tower once"] = ratio(runs, tower, shared)
    size = " x ".join(map(str, shape.grid))
    notes = [
        f"{shape.frames} frames of {size} tokens per pair; decoding is not timed: sampling does it, once per prompt"
    ]
    return comparison(runs, ratios=ratios, notes=notes)


def _generation(bench: Bench) -> dict[str, Any]:
    """Sampling one group against `generate` as TRL calls it."""
    ((name, shape),) = bench.shapes("288:48").items()
    arms = [bench.arm("generate", "arms:generate_arm", shape), bench.arm("sampler", "arms:sample_arm", shape)]
    runs = run_arms("generation", arms, bench.options)
    ratios = _ratios(runs, name, "generate", "sampler", **bench.targets({"minimum": 4.0, "goal": 5.0}))
    return comparison(runs, ratios=ratios, notes=["no arm may end a completion before its last token"])


def _step(bench: Bench) -> dict[str, Any]:
    """Whole GRPO steps of the suite and with `--against trl` of TRL's trainer."""
    runs: dict[str, Any] = {}
    ratios: dict[str, Any] = {}
    trl = bench.options.against == "trl"
    for name, shape, model, is_qwen in bench.steps():
        make = functools.partial(bench.arm, shape=shape, model=model)
        ours, low = f"{name} mmrl", f"{name} mmrl bf16"
        arms = [make(ours, "arms:step_arm")]
        if trl:
            fastest = make(f"{name} trl", "trl_arm:step_arm", gradient_checkpointing=False)
            usual = make(f"{name} trl defaults", "trl_arm:step_arm", gradient_checkpointing=True, blocks=1)
            arms = [fastest, usual, *arms]
        if bench.text and bench.options.device == "cpu":
            arms.append(make(low, "arms:step_arm", mixed_precision="bf16"))
        runs |= run_arms("step", arms, bench.options)
        if low in runs:
            ratios |= _ratios(runs, f"{name} float32 over bf16 autocast", ours, low)
        for arm in arms[2:3] if trl else ():
            targets = STEP_TARGETS.get(name, ({}, {})) if is_qwen else OTHER_TARGETS
            if bench.text:
                time, memory = TEXT_TARGETS[name] if bench.packaged and bench.full else ({}, {})
                targets = ({"bound": shape.bound, **time}, memory)
            ratios |= _against_trl(bench, name, arm.name, runs, *targets)
    notes = [
        "one prompt with its group, no KL term, one update with AdamW and clipping at norm 1, trained vision tower",
        "each arm samples its own tokens: the work has the same shape but different tokens",
        "trl: GRPOTrainer with sdpa attention, without activation checkpointing (its default) and without logging",
        "trl defaults: the same with activation checkpointing",
        "memory is the peak above the loaded weights",
    ]
    if bench.options.device == "cpu":
        notes.append("on a CPU trl projects every position to the vocabulary, about 9% of its forward operations")
    return comparison(runs, ratios=ratios, notes=notes)


def _against_trl(
    bench: Bench, name: str, ours: str, runs: dict[str, Any], time: dict[str, Any], memory: dict[str, Any]
) -> dict[str, Any]:
    theirs, label = f"{name} trl", ours.replace(" mmrl", "")
    predicted: dict[str, Any] = {"goal": 6.0} if bench.options.device == "cuda" else {}
    limits = time if bench.text else bench.targets(time) or predicted
    return {
        **_ratios(runs, label, theirs, ours, **limits),
        f"{label} memory": ratio(runs, theirs, ours, "peak_mb", **(memory if bench.text else bench.targets(memory))),
        f"{label} generation": ratio(runs, theirs, ours, stage="generate"),
        f"{label} update": ratio(runs, theirs, ours, stage="update"),
        f"{label} time over trl defaults": ratio(runs, f"{name} trl defaults", ours),
    }


def _papo(bench: Bench) -> dict[str, Any]:
    """Training passes of one PAPO step against an emulation of the public recipe in rows."""
    ((name, shape),) = bench.shapes("4:1").items()
    rows, shared = "rows (emulation)", "shared"
    arms = [
        bench.arm(rows, "arms:papo_arm", shape, layout="rows"),
        bench.arm(shared, "arms:papo_arm", shape, layout="shared"),
    ]
    runs = run_arms("papo", arms, bench.options)
    ratios = _ratios(runs, name, rows, shared, **bench.targets({"minimum": 4.0, "goal": 4.5}))
    notes = [
        "emulation: the public recipe's passes (old, reference, masked, update) in the suite's own code, in rows "
        "with one image each; the recipe itself needs CUDA packages and was not run"
    ]
    return comparison(runs, ratios=ratios, notes=notes)


def _memory(bench: Bench) -> dict[str, Any]:
    """Memory of an update by sharing, micro-batches, and a head without logits."""
    ((name, shape),) = bench.shapes("4:1").items()
    arms = [
        bench.arm(f"{layout}{suffix}", "arms:update_arm", shape, layout=layout, micro_batch=rows, blocks=1)
        for layout in ("rows", "shared")
        for rows, suffix in ((0, ""), (2, ", by 2"), (1, ", by 1"))
    ]
    if bench.full and bench.options.model is None:
        options: dict[str, Any] = {"layout": "shared", "micro_batch": 0, "blocks": 1, "model": bench.wide_model()}
        arms.append(bench.arm("shared, vocabulary 65536", "arms:update_arm", shape, **options))
    runs = run_arms("memory", arms, bench.options)
    ratios = {
        f"{name} memory": ratio(runs, "rows", "shared", "peak_mb"),
        f"{name} memory, shared by 2 over rows by 1": ratio(runs, "shared, by 2", "rows, by 1", "peak_mb"),
        f"{name} time, rows by 1 over shared by 2": ratio(runs, "rows, by 1", "shared, by 2"),
    }
    return comparison(runs, ratios=ratios, notes=["memory includes the gradients"])


def _tricks(bench: Bench) -> dict[str, Any]:
    """Each saving switched off alone in the whole step."""
    ((name, shape),) = bench.shapes("288:48").items()
    off: dict[str, dict[str, Any]] = {
        "everything on": {},
        "prefill not kept": {"keep_prefill": False},
        "no shared prefix": {"layout": "tower once"},
        "no shared prefix, tower for each row": {"layout": "rows"},
    }
    groups = {"tasks_per_step": 4, "reward": "benchmarks.vlm.workload:half_dead_reward"}
    dead = {"4 groups, 2 dead": groups, "4 groups, 2 dead, not skipped": groups | {"skip_zero_advantage_groups": False}}
    arms = [bench.arm(arm, "arms:step_arm", shape, **switched) for arm, switched in (off | dead).items()]
    runs = run_arms("tricks", arms, bench.options)
    ratios = {f"{name} {arm}": ratio(runs, arm, "everything on") for arm in list(off)[1:]}
    ratios[f"{name} dead groups not skipped"] = ratio(runs, *reversed(dead))
    return comparison(
        runs,
        ratios=ratios,
        notes=["each ratio is the time of a step without one optimisation divided by the time with all of them"],
    )


def _equality(bench: Bench) -> dict[str, Any]:
    """Log-probs and gradients of shared prompts against rows of their own, with a negative control."""
    model, shape = bench.small()
    shape = dataclasses.replace(shape, group=4)
    video = dataclasses.replace(bench.video_shape()[1] if bench.options.quick else CPU_SHAPES["4:1 video"], group=4)
    arms = [
        bench.arm(name, "equality:equality_arm", asked, model=model, dtype="float32", timed=False)
        for name, asked in {"equality": shape, "equality, video": video}.items()
    ]
    runs = run_arms("equality", arms, bench.options)
    notes = [f"query and key weights times {ATTENTION_GAIN:g}; two groups, completions of all lengths from 1 to T"]
    return comparison(runs, notes=notes)


def _turns(bench: Bench) -> dict[str, Any]:
    """Episodes of six turns with an image each, read once against again in every turn."""
    ((_, shape),) = bench.shapes("4:1").items()
    shape = dataclasses.replace(shape, completion=shape.prompt // 16, group=shape.group // 2)
    turns = 2 if bench.options.quick else 6
    arms = [
        dataclasses.replace(
            bench.arm(f"{part} {way}", "", shape, anew=way == "anew", turns=turns),
            function=f"benchmarks.agents.turns:{part}_arm",
        )
        for part in ("sample", "update")
        for way in ("anew", "once")
    ]
    runs = run_arms("turns", arms, bench.options)
    limits = bench.targets({"minimum": 3.0, "goal": 3.5})
    ratios: dict[str, Any] = {}
    for part in ("sample", "update"):
        ratios |= _ratios(runs, part, f"{part} again", f"{part} once", **limits)
    notes = [
        f"{shape.group} episodes of {turns} turns: a prompt of {shape.prompt} tokens with an image of "
        f"{shape.image_tokens}, and the same amount again before every later turn; responses of {shape.completion} "
        "tokens",
        "again: every turn reads its conversation from the beginning, with images; the update has one row per turn",
    ]
    return comparison(runs, ratios=ratios, notes=notes)


COMPARISONS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "equality": _equality,
    "update": _update,
    "video": _video,
    "long-video": compare_long_video,
    "generation": _generation,
    "step": _step,
    "papo": _papo,
    "memory": _memory,
    "tricks": _tricks,
    "turns": _turns,
}
NAMES = tuple(COMPARISONS)
