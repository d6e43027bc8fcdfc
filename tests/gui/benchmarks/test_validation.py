"""`mmrl gui validate`: malformed rows, suspicious boxes, and the test that distinguishes xywh from xyxy."""

import json
import random
import re
import shutil

import pytest
from PIL import Image

from mmrl.cli import main
from mmrl.errors import UserError
from mmrl.gui.benchmarks.benchmark_copies import validate
from mmrl.gui.benchmarks.benchmark_table import BENCHMARKS
from mmrl.gui.grounding.coords import Resize
from mmrl.gui.grounding.grounding_tasks import GroundingSettings, prepare_tasks
from mmrl.vlm.data.dataset import DataConfig, load_tasks
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
        ("excel_windows.json row 8", "the box [300, 10, 330, 40] (xyxy) extends outside the image of 320 x 200")
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
    for words in (
        "no column bbox",
        "contains '3'",
        "contains True",
        "is blank",
        "no image lost.png",
        "expected an object",
    ):
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
        ("own.jsonl line 1", "the box [90, 10, 120, 20] (xyxy) extends outside the image of 100 x 50")
    ]
    for target, wrong in (
        ({"boxes": [good, [1, 2, 3]]}, "a box needs 4 finite numbers [x1, y1, x2, y2], found [1, 2, 3]"),
        ({"bbox": [1, 2, "3", 4]}, "a box needs 4 finite numbers [x1, y1, x2, y2], found [1, 2, '3', 4]"),
        ({"bbox": [1, 2, True, 4]}, "a box needs 4 finite numbers [x1, y1, x2, y2], found [1, 2, True, 4]"),
        ({"polygon": [[1, 2], [3, 4], [5, 6, 7]]}, "a corner needs 2 finite numbers [x, y], found [5, 6, 7]"),
        ({"polygon": [[1, 2], [3, 4]]}, "a polygon needs at least 3 corners, found 2"),
        (
            {"gt_bbox": good, "bbox": None},
            "expected one of the columns bbox, boxes, polygon, point, refusal, no_target, found none",
        ),
    ):
        ((place, reason),) = check(**target).malformed
        assert place == "own.jsonl line 1"
        assert reason.startswith(wrong)


SIZES = [(1920, 1080), (1080, 2340), (1366, 768), (2560, 1440), (800, 600), (390, 844)]
FORMS = {
    "pixels": lambda box, width, height: list(box),
    "fractions": lambda box, width, height: [
        value / side for value, side in zip(box, (width, height) * 2, strict=True)
    ],
    "thousandths": lambda box, width, height: [
        round(1000 * value / side) for value, side in zip(box, (width, height) * 2, strict=True)
    ],
    "xywh": lambda box, width, height: [box[0], box[1], box[2] - box[0], box[3] - box[1]],
    "css": lambda box, width, height: [value / 2 for value in box],
    "outside": lambda box, width, height: [width + 5, height + 5, width + 50, height + 20],
}


def own_table(folder, forms, count=60):
    """Screens of several sizes, each with a box in one of some forms in turn."""
    draw, rows = random.Random(1), []
    for number in range(count):
        width, height = SIZES[number % len(SIZES)]
        if not (folder / f"{number % len(SIZES)}.png").exists():
            Image.new("RGB", (width, height)).save(folder / f"{number % len(SIZES)}.png")
        w, h = width // 10, height // 20
        x, y = draw.randrange(width - w), draw.randrange(height - h)
        box = FORMS[forms[number % len(forms)]]((x, y, x + w, y + h), width, height)
        rows.append({"image": f"{number % len(SIZES)}.png", "instruction": "the box", "bbox": box})
    file = folder / "own.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize(
    ("forms", "said"),
    [
        (["pixels"], ""),
        (["fractions"], "their numbers are fractions"),
        (["fractions", "pixels"], r"30 of 60 have fractions of the image's sides \(own.jsonl line 1, own.jsonl line 3"),
        (["pixels"] * 7 + ["fractions"], r"7 of 60 have fractions of the image's sides \(own.jsonl line 8, "),
        (["thousandths"], "are thousandths"),
        (["thousandths", "pixels"], "have thousandths of the image's sides"),
        (["xywh"], "the file is in the other convention"),
        (["xywh", "pixels"], r"\d+ of 60 have numbers that only fit xywh"),
        (["css"], ""),
        (["pixels"] * 9 + ["outside"], ""),
    ],
    ids=lambda value: "-".join(dict.fromkeys(value)) if isinstance(value, list) else "",
)
def test_validation_and_training_agree_on_rows_and_conventions(tmp_path, forms, said, caplog):
    file = own_table(tmp_path, forms)
    result, loaded = validate(str(file)), load_tasks(DataConfig(path=str(file)))
    assert result.is_usable == (not said)
    if said:
        with pytest.raises(UserError, match=said):
            prepare_tasks(loaded, GroundingSettings(), Resize(28), training=True)
        assert re.search(said, result.convention.sentence)
        assert result.refusal
        return
    kept = prepare_tasks(loaded, GroundingSettings(), Resize(28), training=True)
    left_out = [place for place, reason in result.suspicious if reason.startswith("training skips it")]
    assert len(kept.tasks) == result.rows - len(left_out)
    assert not {task.id for task in kept.tasks} & set(left_out)
    assert len(left_out) == (6 if "outside" in forms else 0)
    for note in result.notes if "css" in forms else ():
        assert "a device pixel ratio of 2.0" in note
        assert note in caplog.text
    assert bool(result.notes) == (forms != ["pixels"])


def test_the_command_names_the_rows_of_a_mixed_table(tmp_path, capsys):
    file = own_table(tmp_path, ["fractions", "pixels"])
    assert main(["gui", "validate", str(file)]) == 2
    out = capsys.readouterr().out
    assert "rows follow different conventions: 30 of 60 have fractions" in out
    assert out.endswith("not usable as it is\n")


def test_a_whole_number_box_of_one_pixel_is_no_fraction(tmp_path):
    file = own_table(tmp_path, ["pixels"])
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[0]["bbox"] = [0, 0, 1, 1]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert validate(str(file)).is_usable
    assert validate(str(file)).suspicious == [("own.jsonl line 1", "training skips it")]


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
    assert "file not found" in capsys.readouterr().err
    assert main(["gui"]) == 2
    assert "ACTION" in capsys.readouterr().err
