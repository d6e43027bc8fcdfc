"""Scores of made-up grounding answers by the benchmarks' own metric code."""

import itertools
import re
from typing import Any

import numpy as np

from tests.golden.make.peers import Clone, Made

PRO = (
    "likaixin2000/ScreenSpot-Pro-GUI-Grounding",
    "bd8bbbb470fbc4fda2a4fa9ec90bd2572507794e",
    "eval_screenspot_pro.py",
)
VISION = ("uivision/UI-Vision", "2b79355f962a2db1402ce0ad3d261aa9cb74b855", "eval/grounding/eval_uivision.py")
MMBENCH = ("open-compass/MMBench-GUI", "896ddf1d3aa4d6464d0c55c6416518f889d78d77", "benchmarks/matrics.py")
INFI = ("InfiXAI/InfiGUI-G1", "22208e4d4826626731292fa08bb73ec9fc6f9b15", "eval/prompts.py")
FOCUS = ("showlab/FocusUI", "894ddcb45c0512c611fec6b966645e9ddff6e28c", "evaluation/os_world_g_eval.py")
SEECLICK = ("njucckevin/SeeClick", "0ef37ac4d7aaf37ba7b990e3e3c3ca77e1fb8f93", "readme.md")
SAMPLES = 60
WH, MODEL_WH = (1920, 1080), (1932, 1092)


def make(*paths: str) -> Made:
    clones = [Clone(path, name, commit) for path, (name, commit, _) in zip(paths, PEERS, strict=True)]
    pro, vision, mmbench, infi, focus, seeclick = clones
    samples = make_samples()
    inputs = {"original_wh": WH, "model_wh": MODEL_WH, "samples": samples, "shapes": make_shapes()}
    peers = [
        screenspot_pro(pro, samples),
        ui_vision(vision, samples),
        mmbench_gui(mmbench, samples),
        infigui(infi, samples),
        osworld_g(focus, inputs["shapes"]),
        seeclick_table(seeclick),
    ]
    return "GUI grounding: hits, groups and averages of six benchmarks", inputs, peers, *clones


def make_samples() -> list[dict[str, Any]]:
    """Boxes of a screen with the answers of a model that is often near: none, one, two or three points."""
    rng = np.random.RandomState(5)
    samples = []
    for number in range(SAMPLES):
        x, y = rng.randint(0, WH[0] - 420), rng.randint(0, WH[1] - 220)
        box = [int(x), int(y), int(x + rng.randint(20, 400)), int(y + rng.randint(10, 200))]
        points = []
        for _ in range(rng.randint(0, 4)):
            near = rng.randint(0, 2)
            cx, cy = (box[0] + box[2]) / 2 * MODEL_WH[0] / WH[0], (box[1] + box[3]) / 2 * MODEL_WH[1] / WH[1]
            spread = 30 if near else 500
            points.append([int(cx + rng.randint(-spread, spread)), int(cy + rng.randint(-spread, spread))])
        samples.append(
            {
                "box": box,
                "points": points,
                "group": ("Office", "Creative", "Dev")[int(rng.randint(0, 3))],
                "type": ("text", "icon")[int(rng.randint(0, 2))],
                "level": ("basic", "advanced")[number % 3 == 0],
                "platform": ("os_windows", "os_web")[number // 2 % 2],
            }
        )
    return samples


def make_shapes() -> list[dict[str, Any]]:
    """Targets of OSWorld-G with a point each: boxes with a size, a concave polygon, refusals."""
    rng = np.random.RandomState(7)
    outline = [300, 200, 900, 200, 900, 700, 600, 400, 300, 700]
    shapes = [
        {"kind": "polygon", "numbers": outline, "point": [*map(float, p)]} for p in rng.randint(150, 950, (20, 2))
    ]
    shapes += [
        {"kind": "bbox", "numbers": [400.5, 300.25, 120.5, 80.5], "point": [float(x), float(y)]}
        for x, y in rng.randint(280, 560, (20, 2))
    ]
    points = [[-1.0, -1.0], [-1.0, 5.0], [400.0, 300.0]]
    return shapes + [
        {"kind": kind, "numbers": numbers, "point": point}
        for kind, numbers in (("refusal", [0, 0, 0, 0]), ("bbox", [0, 0, 50, 50]))
        for point in points
    ]


def first_point(sample: dict[str, Any]) -> list[float] | None:
    """The first point as a share of the image's sides, as the official scripts want it."""
    if not sample["points"]:
        return None
    x, y = sample["points"][0]
    return [x / MODEL_WH[0], y / MODEL_WH[1]]


def screenspot_pro(clone: Clone, samples: list[dict[str, Any]]) -> dict[str, Any]:
    file = PRO[2]
    judge = clone.function(file, "eval_sample_positive_gt")
    collect = clone.function(file, "collect_results_to_eval")
    combine = clone.function(file, "make_combinations", itertools=itertools)
    count = clone.function(file, "calc_metric_for_result_list", collect_results_to_eval=collect)
    names = {"collect_results_to_eval": collect, "make_combinations": combine, "calc_metric_for_result_list": count}
    simple = clone.function(file, "evaluate_leaderboard_simple_style", **names)
    results = [
        {
            "correctness": judge({"bbox": entry["box"], "img_size": WH}, {"point": first_point(entry)}),
            "group": entry["group"],
            "ui_type": entry["type"],
        }
        for entry in samples
    ]
    calls = [f"{file}:{name}" for name in ("eval_sample_positive_gt", "calc_metric_for_result_list")]
    return {
        "program": clone.name,
        "calls": [*calls, f"{file}:evaluate_leaderboard_simple_style"],
        "relative": 1e-12,
        "correctness": [entry["correctness"] for entry in results],
        "overall": count(results),
        "groups": simple(results),
    }


def ui_vision(clone: Clone, samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Every other box with swapped corners."""
    file = VISION[2]
    judge = clone.function(file, "eval_sample_positive_gt")
    count = clone.function(file, "calc_metric_for_result_list_simple")
    results = []
    for number, entry in enumerate(samples):
        x1, y1, x2, y2 = entry["box"]
        box = [x2, y1, x1, y2] if number % 2 else [x1, y2, x2, y1]
        results.append({"correctness": judge({"bbox": box, "image_size": WH}, {"point": first_point(entry)})})
    return {
        "program": clone.name,
        "calls": [f"{file}:eval_sample_positive_gt", f"{file}:calc_metric_for_result_list_simple"],
        "relative": 1e-12,
        "correctness": [entry["correctness"] for entry in results],
        "overall": count(results),
    }


def mmbench_gui(clone: Clone, samples: list[dict[str, Any]]) -> dict[str, Any]:
    scores = {"basic": {}, "advanced": {}}  # type: dict[str, dict[str, dict[str, list[int]]]]
    for entry in samples:
        point, (x1, y1, x2, y2) = first_point(entry), entry["box"]
        value = -1
        if point is not None:
            value = int(x1 <= point[0] * WH[0] <= x2 and y1 <= point[1] * WH[1] <= y2)
        cells = scores[entry["level"]].setdefault(entry["platform"], {"icon": [], "text": []})
        cells[entry["type"]].append(value)
    found = clone.function(MMBENCH[2], "level2_calculate_scores")(scores)
    return {
        "program": clone.name,
        "calls": [f"{MMBENCH[2]}:level2_calculate_scores"],
        "relative": 1e-12,
        **{key.split()[0].lower(): found[key] for key in ("Average accuracy", "Basic accuracy", "Advanced accuracy")},
        "cells": {
            f"{level}/{platform}": float(found[level][platform]["Total accuracy"])
            for level in scores
            for platform in scores[level]
        },
    }


def infigui(clone: Clone, samples: list[dict[str, Any]]) -> dict[str, Any]:
    inside = clone.function(INFI[2], "is_point_inside_element")
    prompt = clone.function(INFI[2], "InfiguiG1Prompt", is_point_inside_element=inside, extract_and_parse_json=None)
    prompt.calculate_metrics.__globals__["InfiguiG1Prompt"] = prompt
    names = ("create_hierarchical_stats", "update_stats")
    data = {name: clone.function("eval/data.py", name) for name in names}
    finish = clone.function("eval/data.py", "finalize_stats")
    finish.__globals__["finalize_stats"] = finish
    group = clone.function("eval/data.py", "_update_hierarchical_stats", **data)
    group.__globals__["_update_hierarchical_stats"] = group
    statistics = clone.function(
        "eval/data.py",
        "calculate_hierarchical_statistics",
        finalize_stats=finish,
        _update_hierarchical_stats=group,
        **data,
    )
    results = {}
    for number, entry in enumerate(samples):
        sx, sy = MODEL_WH[0] / WH[0], MODEL_WH[1] / WH[1]
        x1, y1, x2, y2 = entry["box"]
        box = {"x1": x1 * sx, "y1": y1 * sy, "x2": x2 * sx, "y2": y2 * sy}
        predictions = [{"point_2d": point} for point in entry["points"]]
        results[number] = prompt.calculate_metrics({}, predictions, box)
    found = statistics(results, [{"group": [entry["group"]]} for entry in samples], prompt)
    return {
        "program": clone.name,
        "calls": [f"{INFI[2]}:InfiguiG1Prompt.calculate_metrics", "eval/data.py:calculate_hierarchical_statistics"],
        "relative": 1e-12,
        "correct": [results[number]["correct"] for number in range(len(samples))],
        "has_correct": [results[number]["has_correct"] for number in range(len(samples))],
        **{key: found[key] for key in ("correct_accuracy", "has_correct_accuracy", "avg_num_answers")},
        "groups": {name: part["has_correct_accuracy"] for name, part in found["subgroups"].items()},
    }


def osworld_g(clone: Clone, shapes: list[dict[str, Any]]) -> dict[str, Any]:
    file = FOCUS[2]
    point = clone.function(file, "normalize_point")
    normalize = clone.function("evaluation/shared_grounding_eval.py", "normalize_bbox")
    read = clone.function(file, "parse_and_normalize_gt", normalize_bbox=normalize, normalize_point=point)
    tests = {name: clone.function(file, name) for name in ("point_in_bbox", "point_in_polygon")}
    hit = clone.function(file, "hit_gt", **tests)
    found = []
    for shape in shapes:
        x, y = shape["point"]
        found.append(bool(hit(x / WH[0], y / WH[1], read(shape["kind"], shape["numbers"], *WH))))
    return {
        "program": clone.name,
        "calls": [f"{file}:parse_and_normalize_gt", f"{file}:hit_gt"],
        "relative": 1e-12,
        "hits": found,
    }


def seeclick_table(clone: Clone) -> dict[str, Any]:
    """ScreenSpot's table: text and icon on three platforms, and the average that is printed for them."""
    lines = (clone.path / SEECLICK[2]).read_text().splitlines()
    rows = [re.findall(r"(\d+\.\d+)%", line) for line in lines if line.startswith("|")]
    kept = [[float(number) for number in row] for row in rows if len(row) == 7]
    return {
        "program": clone.name,
        "calls": [f"{SEECLICK[2]}: Evaluation Results"],
        "relative": 1e-3,
        "because": "published with one decimal",
        "cells": [row[:6] for row in kept],
        "average": [row[6] for row in kept],
    }


PEERS = (PRO, VISION, MMBENCH, INFI, FOCUS, SEECLICK)
