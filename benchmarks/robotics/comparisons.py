"""`python -m benchmarks sim`: images of MuJoCo scenes against a loop over `mujoco.Renderer` with default settings.

The scene is a 6-axis arm with a gripper and two cubes on a table, with the shadows that a light has by default. Both
sides step the same scenes through the same actions and deliver the same number of images; the states agree bit for
bit, and the images show the same objects in the same pixels, without shadows and without smoothed edges. A
separate row renders only the image at the end of each chunk, as a policy with action chunks needs.

How many control steps of the tabletop tasks a second holds, in processes, in threads and with Gymnasium's own vector
environment, is in `benchmarks.robotics.throughput`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from benchmarks.harness import Arm, BenchOptions, comparison, ratio, run_arms
from benchmarks.robotics.light_steps import LIGHT, compare_light_steps
from benchmarks.robotics.reading import compare_reading
from benchmarks.robotics.throughput import compare_throughput
from benchmarks.robotics.warp_steps import compare_warp
from mmrl.errors import UserError
from robotics.sim.warp_physics import find_warp

ARMS = "benchmarks.robotics.arms"
SIZES_PX = (64, 128, 224)
READING = {f"reading-{size}": size for size in (64, 224, 640)}
"""Comparisons that need PyAV, and the side of their images."""
MINIMUM, GOAL = 20.0, 40.0
"""Required and target ratio of images per second to the default loop."""
SHORT_REPETITIONS = 10
"""Repetitions of the arms that take a fraction of a second."""

FULL: dict[str, Any] = {"scenes": 8, "steps": 8, "chunk": 8, "substeps": 10, "physics_steps": 48}
QUICK: dict[str, Any] = {"scenes": 2, "steps": 2, "chunk": 2, "substeps": 2, "physics_steps": 2}
LOOP = "loop over mujoco.Renderer"
ONE, TWO, CHUNKS, LEAST = "rollout", "rollout, 2 workers", "rollout, end of chunk", "physics and bytes"


def compare(options: BenchOptions) -> dict[str, dict[str, Any]]:
    """Run the comparisons of this room.

    Args:
        options: what to run and how often; it has no use for a model, and only `warp` has one for a device.

    Returns:
        One comparison for each chosen name.

    Raises:
        UserError: an unknown name, another library to compare with, or mujoco, a renderer, (`reading-*`) av or (`warp`)
            mujoco_warp is missing.
    """
    if options.against not in (None, "mujoco"):
        raise UserError(f"--against {options.against}: the sim benchmarks always compare with mujoco, and only with it")
    chosen = [name for name in options.chosen(NAMES) if name in options.only or name not in EXTRAS]
    if importlib.util.find_spec("av") is None:
        if any(name in READING for name in options.only):
            raise UserError(f"{', '.join(READING)} need av, which is not installed: pip install 'mmrl-suite[vla]'")
        chosen = [name for name in chosen if name not in READING]
    if importlib.util.find_spec("mujoco") is None:
        raise UserError("the benchmarks of sim need mujoco, which is not installed: pip install 'mmrl-suite[sim]'")
    if "warp" in chosen:
        find_warp()
    from robotics.sim import require_backend

    backend = require_backend()
    results = {name: COMPARISONS[name](options, backend.name) for name in chosen}
    for found in results.values():
        found["notes"].append(f"renderer: {backend.name}, {backend.device}")
    return results


def _images(options: BenchOptions, backend: str, size_px: int) -> dict[str, Any]:
    common: dict[str, Any] = (QUICK if options.quick else FULL) | {"size_px": size_px, "backend": backend}
    ours = common | {"repetitions": max(SHORT_REPETITIONS, options.repetitions), "workers": 1}
    ours |= {"compare_images": False}
    arms = [
        Arm(LOOP, f"{ARMS}:loop_arm", common),
        Arm(ONE, f"{ARMS}:rollout_arm", ours | {"chunk": 1, "compare_images": True}),
        Arm(TWO, f"{ARMS}:rollout_arm", ours | {"chunk": 1, "workers": 2}),
        Arm(CHUNKS, f"{ARMS}:rollout_arm", ours),
        Arm(LEAST, f"{ARMS}:least_arm", ours),
    ]
    runs = run_arms(f"images, {size_px} px", arms, options)
    bound = ratio(runs, LOOP, LEAST).get("median")
    per_image = partial(ratio, runs, LOOP, minimum=MINIMUM, goal=GOAL)
    return comparison(
        runs,
        ratios={
            "image for image": per_image(ONE, bound=bound),
            "image for image, wall": per_image(ONE, "wall_s"),
            "image for image, wall, 2 workers": per_image(TWO, "wall_s"),
            "control steps, images at the end of chunks": ratio(runs, LOOP, CHUNKS),
            "control steps, images at the end of chunks, wall": ratio(runs, LOOP, CHUNKS, "wall_s"),
        },
        floor=_floor(runs),
        notes=[
            f"{common['scenes']} scenes, {common['steps']} control steps of {common['substeps']} physics steps; "
            f"chunks of {common['chunk']} actions; the loop has one renderer for all scenes",
            "bound: the time for the physics and for writing the images' bytes once, as if drawing were free",
        ],
    )


def _floor(runs: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    counts = {name: run["counts"] for name, run in runs.items() if "counts" in run}
    least = runs[LEAST].get("cpu_s", {}).get("total")
    per_second = {
        name: run["counts"]["images"] / run["wall_s"]["total"] for name, run in runs.items() if "counts" in run
    }
    return {"counts": counts, "physics_and_bytes_cpu_s": least, "images_per_second": per_second}


def _image(options: BenchOptions, backend: str, size_px: int) -> dict[str, Any]:
    common: dict[str, Any] = {"size_px": size_px, "backend": backend, "images": 1 if options.quick else 40}
    brief = common | {"repetitions": max(SHORT_REPETITIONS, options.repetitions)}
    arms = [
        Arm("default", f"{ARMS}:image_arm", common | {"way": "default"}),
        Arm("no shadows", f"{ARMS}:image_arm", brief | {"way": "no shadows"}),
        Arm("no multisampling either", f"{ARMS}:image_arm", brief | {"way": "no multisampling"}),
        Arm("fixed parts once", f"{ARMS}:image_arm", brief | {"way": "ours"}),
    ]
    runs = run_arms(f"one image, {size_px} px", arms, options)
    counted = {name: run for name, run in runs.items() if "counts" in run}
    return comparison(
        runs,
        ratios={name: ratio(runs, "default", name) for name in runs if name != "default"},
        floor={
            "bytes": size_px * size_px * 3,
            "cpu_ms": {name: 1e3 * run["cpu_s"]["total"] / run["counts"]["images"] for name, run in counted.items()},
        },
    )


def _physics(options: BenchOptions, backend: str) -> dict[str, Any]:
    common: dict[str, Any] = (QUICK if options.quick else FULL) | {"backend": backend}
    common |= {"steps": common["physics_steps"], "repetitions": max(SHORT_REPETITIONS, options.repetitions)}
    ways: dict[str, dict[str, Any]] = {
        "mj_step": {"way": "mj_step"},
        "mj_step(nstep)": {"way": "nstep"},
        "mujoco.rollout": {"way": "rollout", "workers": 0},
        "mujoco.rollout, 2 threads": {"way": "rollout", "workers": 2},
        "states only": {"way": "ours", "workers": 1, "chunk": 1},
        "states only, chunks": {"way": "ours", "workers": 1},
        "states only, chunks, 2 workers": {"way": "ours", "workers": 2},
    }
    arms = [Arm(name, f"{ARMS}:physics_arm", common | way) for name, way in ways.items()]
    runs = run_arms("physics", arms, options)
    counted = {name: run for name, run in runs.items() if "counts" in run}
    step_us = {name: 1e6 * run["cpu_s"]["total"] / run["counts"]["physics_steps"] for name, run in counted.items()}
    others = [name for name in ways if name != "mj_step"]
    return comparison(
        runs,
        ratios={name: ratio(runs, "mj_step", name) for name in others}
        | {f"{name}, wall": ratio(runs, "mj_step", name, "wall_s") for name in others},
        floor={"cpu_us_per_physics_step": step_us},
        notes=[
            f"mujoco.rollout takes all actions at once, a chunk is {common['chunk']} control steps, and the other rows "
            "take one at a time",
        ],
    )


def _of_any_backend(
    compare: Callable[..., dict[str, Any]], *given: Any
) -> Callable[[BenchOptions, str], dict[str, Any]]:
    """A comparison that draws nothing."""
    return lambda options, backend: compare(options, *given)


COMPARISONS: dict[str, Callable[[BenchOptions, str], dict[str, Any]]] = {
    **{f"images-{size}": partial(_images, size_px=size) for size in SIZES_PX},
    **{f"image-{size}": partial(_image, size_px=size) for size in SIZES_PX},
    "physics": _physics,
    "throughput-states": partial(compare_throughput, size_px=0),
    "throughput-128": partial(compare_throughput, size_px=128),
    **{f"light-{env}": _of_any_backend(compare_light_steps, env) for env in LIGHT},
    **{name: _of_any_backend(compare_reading, size) for name, size in READING.items()},
    "warp": _of_any_backend(compare_warp),
}
EXTRAS = ("warp",)
"""Comparisons that run only on request, because they need more than this package."""
NAMES = tuple(COMPARISONS)
