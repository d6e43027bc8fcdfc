"""`mmrl gui validate`: malformed rows, suspicious boxes, and the test that distinguishes xywh from xyxy."""

from __future__ import annotations

import json
import shutil

import pytest
from PIL import Image

from mmrl.cli import main
from mmrl.errors import UserError
from mmrl.gui.benchmarks.loading import validate
from mmrl.gui.benchmarks.table import BENCHMARKS
from tests.gui.benchmarks.copies import BOXES, COPIES, relative, screenspot, screenspot_pro, write_json, xywh


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_published_copy_is_usable_and_its_convention_is_reported(name, tmp_path):
    result = validate(str(COPIES[name](tmp_path / "copy")), name)
    assert result.is_usable
    assert (result.malformed, result.suspicious) == ([], [])
    # corners read as width and height leave the image; sizes read as corners have no area
    assert result.convention.verdict == "right"


def altered(tmp_path, change):
    """One file of a copy of ScreenSpot-Pro, each box changed."""
    copy = screenspot_pro(tmp_path / "copy")
    file = copy / "annotations" / "excel_windows.json"
    rows = json.loads(file.read_text())
    for row in rows:
        row["bbox"] = change(row["bbox"])
    return write_json(file, rows)


def test_a_file_in_the_other_convention_is_found(tmp_path):
    result = validate(str(altered(tmp_path, xywh)), "screenspot_pro")
    assert result.convention.verdict == "wrong"
    assert result.convention.other == "xywh"
    assert not result.is_usable


def test_fractions_declared_as_pixels_are_found(tmp_path):
    result = validate(str(altered(tmp_path, relative)), "screenspot_pro")
    assert result.convention.verdict == "wrong"
    assert "fractions" in result.convention.sentence


def test_pixels_declared_as_fractions_are_found(tmp_path):
    copy = COPIES["mmbench_gui_l2"](tmp_path / "copy")
    rows = json.loads((copy / "L2_annotations.json").read_text())
    for row in rows:
        row["bbox"] = [row["bbox"][0] * 320, row["bbox"][1] * 200, row["bbox"][2] * 320, row["bbox"][3] * 200]
    write_json(copy / "L2_annotations.json", rows)
    assert "pixels" in validate(str(copy), "mmbench_gui_l2").convention.sentence


def test_boxes_that_fit_both_conventions_are_called_ambiguous(tmp_path):
    result = validate(str(altered(tmp_path, lambda box: [10, 10, 60, 60])), "screenspot_pro")
    assert result.convention.verdict == "ambiguous"
    assert result.is_usable


def test_one_bad_box_in_many_is_listed_but_does_not_decide(tmp_path):
    copy = screenspot_pro(tmp_path / "copy")
    file = copy / "annotations" / "excel_windows.json"
    rows = json.loads(file.read_text()) * 60
    rows[7] = rows[7] | {"bbox": [300, 10, 330, 40]}
    write_json(file, rows)
    result = validate(str(file), "screenspot_pro")
    assert result.suspicious == [
        ("excel_windows.json row 8", "the box [300, 10, 330, 40] (xyxy) leaves the image of 320 x 200")
    ]
    assert result.convention.verdict == "right"


def test_malformed_rows_are_listed_with_number_and_reason(tmp_path):
    copy = screenspot(tmp_path / "copy")
    file = copy / "screenspot_web.json"
    good = json.loads(file.read_text())[0]
    bad = [
        {key: value for key, value in good.items() if key != "bbox"},
        good | {"bbox": [1, 2, "3", 4]},
        good | {"bbox": [1, 2, True, 4]},
        good | {"instruction": "  "},
        good | {"img_filename": "lost.png"},
        "no object",
    ]
    write_json(file, [good, *bad])
    result = validate(str(file))
    assert result.benchmark.name == "screenspot"
    assert [place for place, _ in result.malformed] == [f"screenspot_web.json row {row}" for row in range(2, 8)]
    reasons = " | ".join(reason for _, reason in result.malformed)
    for words in ("no column bbox", "holds '3'", "holds True", "is blank", "no image lost.png", "expected an object"):
        assert words in reasons


def test_nan_is_no_number_of_a_box(tmp_path):
    file = altered(tmp_path, lambda box: box)
    file.write_text(file.read_text().replace("310", "NaN"))
    assert "expected finite numbers" in validate(str(file), "screenspot_pro").malformed[0][1]


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_file_is_recognised_by_its_columns(name, tmp_path):
    copy = COPIES[name](tmp_path / "copy")
    layout = BENCHMARKS[name].layouts[0]
    file = next(file for pattern in layout.files for file in sorted(copy.glob(pattern)))
    renamed = file.with_name(f"mine_web_basic{file.suffix}")
    shutil.move(file, renamed)
    found = validate(str(renamed)).benchmark
    assert found.known_by == (BENCHMARKS[name].known_by or BENCHMARKS["screenspot_v2"].known_by)


def test_an_unknown_file_is_an_error_that_names_the_benchmarks(tmp_path):
    with pytest.raises(UserError, match=r"mine.json.*\(question\).*--benchmark: screenspot"):
        validate(str(write_json(tmp_path / "mine.json", [{"question": "?"}])))


def test_a_folder_without_a_benchmark_is_an_error_that_names_them(tmp_path):
    with pytest.raises(UserError, match=r"is a folder.*--benchmark: screenspot, screenspot_v2"):
        validate(str(tmp_path))


def test_all_boxes_of_own_data_are_checked(tmp_path):
    Image.new("RGB", (100, 50)).save(tmp_path / "a.png")
    good = [10, 10, 20, 20]

    def check(**target):
        file = tmp_path / "own.jsonl"
        file.write_text(json.dumps({"image": "a.png", "instruction": "the button", **target}) + "\n")
        return validate(str(file))

    assert check(boxes=[good, good]).is_usable
    assert check(boxes=[good, good]).convention.boxes == 2
    assert check(boxes=[good, [90, 10, 120, 20]]).suspicious == [
        ("own.jsonl line 1", "the box [90, 10, 120, 20] (xyxy) leaves the image of 100 x 50")
    ]
    for target, wrong in (
        ({"boxes": [good, [1, 2, 3]]}, "boxes holds [1, 2, 3]"),
        ({"polygon": [[1, 2], [3, 4], [5, 6, 7]]}, "polygon holds [5, 6, 7]"),
        ({"polygon": [[1, 2], [3, 4]]}, "polygon holds [(1, 2), (3, 4)]"),
    ):
        ((place, reason),) = check(**target).malformed
        assert place == "own.jsonl line 1"
        assert reason == f"{wrong}; expected boxes of 4 numbers, or at least 3 corners"


def test_without_images_sizes_come_from_the_annotation(tmp_path):
    copy = screenspot_pro(tmp_path / "copy")
    shutil.rmtree(copy / "images")
    result = validate(str(copy), "screenspot_pro")
    assert result.is_usable
    assert result.convention.boxes == 2 * len(BOXES)
    assert any("images are not checked" in note for note in result.notes)


def test_the_command_prints_and_exits_as_the_others_do(tmp_path, capsys):
    copy = screenspot(tmp_path / "copy")
    assert main(["gui", "validate", str(copy / "screenspot_web.json")]) == 0
    out = capsys.readouterr().out
    assert "ScreenSpot: 5 rows" in out
    assert "the declared convention is right" in out
    write_json(copy / "screenspot_web.json", [{"bbox": []}])
    assert main(["gui", "validate", str(copy), "--benchmark", "screenspot"]) == 2
    assert "screenspot_web.json row 1: no column data_type" in capsys.readouterr().out
    assert main(["gui", "validate", str(copy), "--benchmark", "screenspot", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["malformed"][0]["place"] == "screenspot_web.json row 1"
    assert main(["gui", "validate", str(tmp_path / "nothing.json")]) == 2
    assert "no such file" in capsys.readouterr().err
    assert main(["gui"]) == 2
    assert "ACTION" in capsys.readouterr().err
