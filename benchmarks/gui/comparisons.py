"""`python -m benchmarks gui`: pages per second of the generator and episodes per second of the environments.

The arms of `pages` draw the same screens; a new document for each page is what a generator without reuse would do. The
arms of `episodes` play different things, so there is no ratio between them: the numbers are what a run can plan with.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

from benchmarks.harness import Arm, BenchOptions, comparison, ratio, run_arms
from mmrl.gui.browser.browser import require_chromium

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
        UserError: an unknown name, or playwright or a browser is missing.
    """
    chosen = options.chosen(NAMES)
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
        f"{common['pages']} pages: HTML, loading, boxes and names of the controls, instructions, screenshot",
        "CPU seconds include this process, the driver and the browser",
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
        "own tasks: episodes of the experts, each on a different task, with a screenshot after every action",
        "MiniWoB++: click-test, with the same page for all episodes; one action per episode",
        "CPU seconds include this process, the driver and the browser",
    ]
    return comparison(runs, floor=floor, notes=notes)


def _rates(runs: dict[str, dict[str, Any]], unit: str) -> dict[str, float]:
    return {name: run["counts"][unit] / run["wall_s"]["total"] for name, run in runs.items() if "wall_s" in run}


COMPARISONS: dict[str, Callable[[BenchOptions], dict[str, Any]]] = {"pages": _pages, "episodes": _episodes}
NAMES = tuple(COMPARISONS)
"""Comparisons of this room."""
