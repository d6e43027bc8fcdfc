"""Hits, groups and averages of grounding benchmarks against their own metric code."""

import pytest

from mmrl.gui.benchmarks.annotations import RowContext, make_target, read_osworld_g, read_ui_vision
from mmrl.gui.benchmarks.benchmark_recipe import Share, mean_of_shares, score_answer, tabulate
from mmrl.gui.benchmarks.benchmark_table import BENCHMARKS
from mmrl.gui.grounding.answers import ParsedPoints
from mmrl.gui.grounding.coords import Box, CoordinateSpace
from mmrl.gui.grounding.samples import GroundingSample
from tests.golden.numbers import FOLDER, load

GOLDEN = load("grounding_benchmarks")
PRO, VISION, MMBENCH, INFI, FOCUS, SEECLICK = GOLDEN.peers
INPUTS = GOLDEN.inputs
WH, MODEL_WH = tuple(INPUTS["original_wh"]), tuple(INPUTS["model_wh"])
SPACE = CoordinateSpace.ABS_RESIZED


def answer(points):
    return ParsedPoints(tuple(map(tuple, points)), "point_2d") if points else ParsedPoints(error="not_json")


def sample_of(target, **groups):
    meta = {"groups": {name: (value,) for name, value in groups.items()}}
    return GroundingSample("screen.png", WH, "?", target, MODEL_WH, meta)


def scores():
    return [
        score_answer(
            answer(entry["points"]),
            sample_of(
                Box(*entry["box"]),
                group=entry["group"],
                type=entry["type"],
                level=entry["level"],
                platform=entry["platform"],
                application="",
            ),
            SPACE,
        )
        for entry in INPUTS["samples"]
    ]


def context(name):
    (form,) = {layout.form for layout in BENCHMARKS[name].layouts}
    return RowContext(FOLDER / "element_grounding_basic.json", 1, "row 1", form)


def correctness(scored):
    return ["wrong_format" if x.wrong_format else "correct" if x.first else "wrong" for x in scored]


def test_hits_and_groups_of_screenspot_pro():
    scored = scores()
    assert correctness(scored) == PRO["correctness"]
    table = tabulate(BENCHMARKS["screenspot_pro"], scored)
    assert table.all.first.value == pytest.approx(PRO["overall"]["action_acc"], rel=1e-12)
    assert table.all.wrong_format.hits == PRO["overall"]["wrong_format_num"]
    for row in table.cells("type"):
        assert row.first.value == pytest.approx(PRO["overall"][f"{row.values[0]}_acc"], rel=1e-12)
    groups = {f"group:{row.values[0]}": row for row in table.cells("group")}
    assert set(groups) == set(PRO["groups"])
    for name, row in groups.items():
        assert (row.first.hits, row.first.n) == tuple(
            PRO["groups"][name][key] for key in ("num_correct_action", "num_total")
        )
    for row in table.cells("group", "type"):
        group, kind = row.values
        assert row.first.value == pytest.approx(PRO["groups"][f"group:{group}"][f"{kind}_acc"], rel=1e-12)


def test_swapped_corners_of_ui_vision():
    found = []
    for number, entry in enumerate(INPUTS["samples"]):
        x1, y1, x2, y2 = entry["box"]
        row = {
            "image_path": "screen.png",
            "prompt_to_evaluate": "?",
            "bbox": [x2, y1, x1, y2] if number % 2 else [x1, y2, x2, y1],
            "image_size": list(WH),
        }
        target = make_target(read_ui_vision(row, context("ui_vision")), WH)
        found.append(score_answer(answer(entry["points"]), sample_of(target), SPACE))
    assert correctness(found) == VISION["correctness"]


def test_averages_of_mmbench_gui():
    table = tabulate(BENCHMARKS["mmbench_gui_l2"], scores())
    assert 100 * table.macro[0] == pytest.approx(MMBENCH["average"], rel=1e-12)
    for row in table.cells("level"):
        assert 100 * row.first.value == pytest.approx(MMBENCH[row.values[0]], rel=1e-12)
    for row in table.cells("level", "platform"):
        assert 100 * row.first.value == pytest.approx(MMBENCH["cells"]["/".join(row.values)], rel=1e-12)


def test_exploration_success_of_infigui():
    scored = scores()
    assert [int(entry.first) for entry in scored] == INFI["correct"]
    assert [int(entry.any) for entry in scored] == INFI["has_correct"]
    table = tabulate(BENCHMARKS["screenspot_pro"], scored)
    assert table.all.first.value == pytest.approx(INFI["correct_accuracy"], rel=1e-12)
    assert table.all.any.value == pytest.approx(INFI["has_correct_accuracy"], rel=1e-12)
    assert table.all.answers == pytest.approx(INFI["avg_num_answers"], rel=1e-12)
    groups = {row.values[0]: row.any.value for row in table.cells("group")}
    assert groups == pytest.approx(INFI["groups"], rel=1e-12)


def test_boxes_polygons_and_refusals_of_osworld_g():
    found = []
    for shape in INPUTS["shapes"]:
        row = {
            "image_path": "screen.png",
            "instruction": "?",
            "box_type": shape["kind"],
            "box_coordinates": shape["numbers"],
            "image_size": list(WH),
        }
        target = make_target(read_osworld_g(row, context("osworld_g")), WH)
        scored = score_answer(answer([shape["point"]]), sample_of(target), CoordinateSpace.ABS_ORIGINAL)
        found.append(scored.first)
    assert found == FOCUS["hits"]


def test_the_average_of_screenspot_is_a_mean_of_six_cells():
    for cells, average in zip(SEECLICK["cells"], SEECLICK["average"], strict=True):
        mean, low, high = mean_of_shares([Share(cell, 100) for cell in cells])
        assert 100 * mean == pytest.approx(average, abs=0.1)  # printed with one decimal, as the cells are
        assert low < mean < high
