"""`python -m benchmarks gui`: pages per second of the generator and episodes per second of the environments.

The arms of `pages` draw the same screens; a new document for each page is what a generator without reuse would do. The
arms of `episodes` play different things, so there is no ratio between them: the numbers are what a run can plan with.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

from benchmarks.harness import Arm, BenchOptions, comparison, ratio, run_arms
from benchmarks.long_run import LongRun, compare_long_run
from mmrl.gui.browser.chromium import require_chromium


def long_run(options: BenchOptions) -> dict[str, Any]:
    """Run the comparison of this room."""
    return compare_long_run(turns_run(quick=options.quick), options)


def turns_run(*, quick: bool) -> LongRun:
    """GRPO over episodes; `quick` plays four of two turns a step."""
    tasks, samples, turns, cloning, batch = (2, 2, 2, 2, 2) if quick else (4, 8, 5, 30, 16)
    common: dict[str, Any] = {
        "environment": {
            "factory": "mmrl.agents.toy.grid:GridWorld",
            "kwargs": {"size": 3, "max_steps": turns},
            "adapter": {"task_options": False},
            "workers": 2,
        },
        "conversation": {"system": "Walk. Answer with an action."},
        "actions": {"format": "tag", "on_parse_error": "noop"},
        "episode": {"max_turns": turns},
        "data": {"seeds": 4000},
        "sampler": {"max_new_tokens": 5},
    }
    build = {"family": "qwen3_vl", "patch_size": 14, "hidden": 64, "layers": 2, "vision_hidden": 64, "vision_depth": 1}
    clone = common | {
        "recipe": "agent_clone",
        "model": {
            "path": "{folder}/grid-model",
            "build": "mmrl.agents.toy.build:build_model",
            "build_options": build | {"min_pixels": 3136, "max_pixels": 50176},
        },
        "random_actions": 0.5,
        "evaluation": {"at_start": False, "at_end": False},
        "trainer": {"steps": cloning, "tasks_per_step": batch, "samples_per_task": 1, "learning_rate": 3e-3},
    }
    return LongRun(
        common
        | {
            "recipe": "agent",
            "model": {"path": f"{{folder}}/grid-clone/checkpoints/step-{cloning:06d}/model"},
            "trainer": {"tasks_per_step": tasks, "samples_per_task": samples, "learning_rate": 1e-5},
        },
        prepare={"grid-clone": clone},
        notes=(f"{tasks} grids x {samples} episodes of 1 to {turns} turns with a picture each, one update a step",),
    )


ARMS = "benchmarks.gui.arms"
FULL: dict[str, Any] = {"pages": 24, "episodes": 4}
QUICK: dict[str, Any] = {"pages": 2, "episodes": 1}
ANEW, REUSED, LARGE = "a document a page", "one document", "one document, 1280 x 720"


def compare(options: BenchOptions) -> dict[str, dict[str, Any]]:
    """Run the comparisons of this room.

    Args:
        options: what to run and how often; it has no use for a model or a device.

    Returns:
        One comparison for each chosen name.

    Raises:
        UserError: an unknown name, or playwright or a browser is missing, which all but `long-run` need.
    """
    chosen = options.chosen(NAMES)
    if set(chosen) != {"long-run"}:
        require_chromium()
    return {name: COMPARISONS[name](options) for name in chosen}


def _pages(options: BenchOptions) -> dict[str, Any]:
    size: dict[str, Any] = QUICK if options.quick else FULL
    common = {"pages": size["pages"], "width_px": 448, "height_px": 336}
    reused = {**common, "new_document": False}
    arms = [
        Arm(ANEW, f"{ARMS}:pages_arm", {**common, "new_document": True}, memory=False),
        Arm(REUSED, f"{ARMS}:pages_arm", reused, memory=False),
        Arm(
            LARGE,
            f"{ARMS}:pages_arm",
            {**common, "new_document": False, "width_px": 1280, "height_px": 720},
            memory=False,
        ),
    ]
    runs = run_arms("pages", arms[:2] if options.quick else arms, options)
    ratios = {"time": ratio(runs, ANEW, REUSED, "wall_s"), "CPU time": ratio(runs, ANEW, REUSED)}
    notes = [
        f"{common['pages']} pages: HTML, loading, boxes and names of the controls, instructions, picture",
        "CPU seconds are those of this process, the driver and the browser",
    ]
    return comparison(runs, ratios=ratios, floor={"pages_per_second": _rates(runs, "pages")}, notes=notes)


def _episodes(options: BenchOptions) -> dict[str, Any]:
    size: dict[str, Any] = QUICK if options.quick else FULL
    arms = [Arm("own tasks, experts", f"{ARMS}:tasks_arm", {"episodes": size["episodes"]}, memory=False)]
    if importlib.util.find_spec("miniwob") is not None:
        arms += [Arm("MiniWoB++, one click", f"{ARMS}:miniwob_arm", {"episodes": size["episodes"]}, memory=False)]
    runs = run_arms("episodes", arms, options)
    floor = {"episodes_per_second": _rates(runs, "episodes"), "steps_per_second": _rates(runs, "steps")}
    notes = [
        "own tasks: episodes of the experts, each of another task, a picture after every action",
        "MiniWoB++: click-test, with the same page for all episodes; one action an episode",
        "CPU seconds are those of this process, the driver and the browser",
    ]
    return comparison(runs, floor=floor, notes=notes)


def _rates(runs: dict[str, dict[str, Any]], unit: str) -> dict[str, float]:
    return {name: run["counts"][unit] / run["wall_s"]["total"] for name, run in runs.items() if "wall_s" in run}


COMPARISONS: dict[str, Callable[[BenchOptions], dict[str, Any]]] = {
    "pages": _pages,
    "episodes": _episodes,
    "long-run": long_run,
}
NAMES = tuple(COMPARISONS)
"""Comparisons of this room."""
