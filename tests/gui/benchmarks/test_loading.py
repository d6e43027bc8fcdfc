"""Every published format gives the same boxes in pixels of the stored image; no row is dropped or altered."""

import json

import pytest
from PIL import Image

from mmrl.errors import UserError
from mmrl.gui.benchmarks.benchmark_copies import BenchmarkConfig, load_benchmark
from mmrl.gui.benchmarks.benchmark_table import BENCHMARKS
from mmrl.gui.grounding.coords import Box
from mmrl.gui.grounding.samples import Polygon, Refusal
from tests.gui.benchmarks.copies import (
    BOXES,
    COPIES,
    HEIGHT,
    WIDTH,
    mmbench_gui_l2,
    osworld_g,
    screenspot,
    screenspot_parquet,
    screenspot_pro,
    ui_vision,
    write_json,
)


def load(name, path, **options):
    return load_benchmark(BenchmarkConfig(benchmark=name, path=str(path), **options))


def test_every_benchmark_has_a_copy():
    assert set(COPIES) == set(BENCHMARKS)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_boxes_are_in_pixels_of_the_stored_image(name, tmp_path):
    samples = load(name, COPIES[name](tmp_path / "copy"))
    boxes = [sample for sample in samples if isinstance(sample.target, Box)]
    assert len(boxes) % len(BOXES) == 0
    for sample in boxes:
        number = int(sample.instruction.split()[-1])
        assert sample.target == pytest.approx(BOXES[number], abs=1e-9)
        assert sample.original_wh == (WIDTH, HEIGHT)
        assert sample.load_image().size == (WIDTH, HEIGHT)
    assert len({sample.meta["id"] for sample in samples}) == len(samples)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_column_of_the_tables_has_values(name, tmp_path):
    benchmark = BENCHMARKS[name]
    samples = load(name, COPIES[name](tmp_path / "copy"))
    for column in (*benchmark.columns, *benchmark.details):
        assert any(sample.meta["groups"][column] for sample in samples), column


def test_the_parquet_mirror_gives_the_same_boxes(tmp_path):
    samples = load("screenspot", screenspot_parquet(tmp_path / "copy"))
    assert [tuple(sample.target) for sample in samples] == [pytest.approx(box) for box in BOXES]
    platforms = [sample.meta["groups"]["platform"][0] for sample in samples]
    assert platforms == ["mobile", "desktop", "web", "desktop", "mobile"]
    assert samples[0].load_image().size == (WIDTH, HEIGHT)


def test_the_platform_of_screenspot_is_that_of_the_file(tmp_path):
    samples = load("screenspot", screenspot(tmp_path / "copy"))
    assert [sample.meta["groups"]["platform"] for sample in samples[:: len(BOXES)]] == [
        ("mobile",),
        ("desktop",),
        ("web",),
    ]


def test_one_file_of_a_copy_finds_the_images_above_it(tmp_path):
    copy = ui_vision(tmp_path / "copy")
    samples = load("ui_vision", copy / "annotations" / "element_grounding" / "element_grounding_spatial.json")
    assert len(samples) == len(BOXES)
    assert {sample.meta["groups"]["setting"] for sample in samples} == {("spatial",)}


def test_the_category_of_ui_vision_is_that_of_its_application(tmp_path):
    samples = load("ui_vision", ui_vision(tmp_path / "copy"))
    groups = {sample.meta["groups"]["application"] + sample.meta["groups"]["category"] for sample in samples}
    assert groups == {("GIMP", "Creativity"), ("Chromium", "Browsers")}


def test_an_annotated_size_other_than_the_image_scales_the_box(tmp_path):
    copy = screenspot_pro(tmp_path / "copy")
    screen = copy / "images" / "excel" / "screen.png"
    Image.open(screen).resize((WIDTH // 2, HEIGHT // 2)).save(screen)
    samples = load("screenspot_pro", copy)
    assert samples[0].original_wh == (WIDTH // 2, HEIGHT // 2)
    x1, y1, x2, y2 = BOXES[0]
    first = next(sample for sample in samples if sample.instruction == "element 0")
    assert tuple(first.target) == (x1 / 2, y1 / 2, x2 / 2, y2 / 2)


def test_minus_one_and_pixels_of_mmbench_gui_are_read_as_its_loader_does(tmp_path):
    copy = mmbench_gui_l2(tmp_path / "copy")
    rows = json.loads((copy / "L2_annotations.json").read_text())
    rows[0]["bbox"], rows[1]["bbox"] = [-1, 0.5, 0.25, 1], [16, 20, 64, 40]
    write_json(copy / "L2_annotations.json", rows)
    samples = load("mmbench_gui_l2", copy)
    assert tuple(samples[0].target) == (0, HEIGHT / 2, WIDTH / 4, HEIGHT)
    assert tuple(samples[1].target) == (16, 20, 64, 40)


def test_osworld_g_has_polygons_refusals_and_categories(tmp_path):
    samples = {sample.meta["id"]: sample for sample in load("osworld_g", osworld_g(tmp_path / "copy"))}
    assert samples["s-p"].target == Polygon(((0, 0), (40, 0), (0, 40)))
    assert samples["s-r"].target == Refusal()
    assert samples["s-1"].meta["groups"]["category"] == ("text_matching", "layout")
    assert samples["s-2"].meta["groups"]["category"] == ()


def test_chinese_instructions(tmp_path):
    samples = load("screenspot_pro", screenspot_pro(tmp_path / "copy"), language="cn")
    assert samples[0].instruction.startswith("元素")


def test_a_box_that_training_would_drop_stays(tmp_path):
    copy = screenspot_pro(tmp_path / "copy")
    file = copy / "annotations" / "excel_windows.json"
    rows = json.loads(file.read_text())
    rows[0]["bbox"], rows[1]["bbox"] = [50, 50, 50, 50], [300, 180, 400, 260]
    write_json(file, rows)
    samples = {sample.meta["id"]: sample for sample in load("screenspot_pro", copy)}
    assert samples["excel_0"].target == Box(50, 50, 50, 50)
    assert samples["excel_0"].target.contains((50, 50))
    assert samples["excel_1"].target == Box(300, 180, 400, 260)
    assert [name for name, sample in samples.items() if sample.meta["suspicious"]] == ["excel_0", "excel_1"]


def test_boxes_in_another_convention_are_refused(tmp_path, caplog):
    copy = screenspot(tmp_path / "copy")
    for file in copy.glob("*.json"):
        rows = json.loads(file.read_text())
        write_json(file, [row | {"bbox": list(BOXES[number])} for number, row in enumerate(rows)])
    load("screenspot", copy)
    assert "100.0% fit xyxy: the file is in the other convention" in caplog.text
    for file in copy.glob("*.json"):
        write_json(file, json.loads(file.read_text()) * 2)
    # with 30 boxes it is no coincidence
    with pytest.raises(UserError, match=r"in the other convention; set .*path to a copy whose boxes are xywh"):
        load("screenspot", copy)


def test_a_malformed_row_is_an_error_that_names_it(tmp_path):
    copy = screenspot(tmp_path / "copy")
    file = copy / "screenspot_web.json"
    rows = json.loads(file.read_text())
    rows[1]["bbox"] = [1, 2, 3]
    del rows[3]["instruction"]
    write_json(file, rows)
    with pytest.raises(UserError, match=r"2 rows are .*screenspot_web.json row 2: bbox has 3 numbers.*mmrl gui valid"):
        load("screenspot", copy)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("screenspot", "contains none of its annotation files; expected screenspot_mobile"),
        ("nope", "unknown benchmark"),
    ],
)
def test_a_wrong_folder_or_name_says_what_exists(name, words, tmp_path):
    with pytest.raises(UserError, match=words):
        load(name, tmp_path)


def test_samples_may_be_cut_for_a_trial(tmp_path):
    assert len(load("screenspot", screenspot(tmp_path / "copy"), max_samples=4)) == 4
