"""Screens drawn without a browser: repeatable, unambiguous, and a warm start that is trapped as described."""

import json
from collections import Counter

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngImageFile

from mmrl.errors import UserError
from mmrl.gui.grounding.answers import answer_tokens
from mmrl.gui.grounding.coords import Box
from mmrl.gui.grounding.samples import (
    AnyOf,
    GroundingSample,
    Polygon,
    Refusal,
    image_size,
    sample_row,
    target_of,
    write_samples,
)
from mmrl.gui.toy.icons import ICONS, build_icons, draw_icon, icon_samples
from mmrl.vlm.model.processor import load_processor
from tests.gui.screens import small_model


def pixels(samples):
    return [np.asarray(sample.image) for sample in samples]


@pytest.mark.parametrize("grid", [{}, {"colored": True, "fewest_icons": 2}])
def test_the_same_seed_draws_the_same_pixels(grid):
    first, again, other = (list(icon_samples(4, seed=seed, worked=True, grid=grid)) for seed in (1, 1, 2))
    assert all((a == b).all() for a, b in zip(pixels(first), pixels(again), strict=True))
    assert [sample_row(sample) for sample in first] == [sample_row(sample) for sample in again]
    assert any((a != b).any() for a, b in zip(pixels(first), pixels(other), strict=True))


def test_every_icon_looks_different_and_is_taken_for_another_one():
    drawn = {name: np.asarray(draw_icon(name, 32, (0, 0, 0), (255, 255, 255))) for name in ICONS}
    for name, icon in ICONS.items():
        assert icon.taken_for in ICONS
        assert icon.taken_for != name
        assert all(name not in words.lower().split() for words in icon.functions)
        for other in ICONS:
            assert name == other or (drawn[name] != drawn[other]).mean() > 0.05, (name, other)
    words = [text for icon in ICONS.values() for text in icon.functions]
    assert len({*words, *ICONS}) == len(words) + len(ICONS), "no instruction fits two icons"


def test_the_box_holds_its_icon_and_no_other():
    for sample in icon_samples(20, seed=4):
        x1, y1, x2, y2 = (int(number) for number in sample.target)
        image = np.asarray(sample.image).astype(int)
        assert 0 <= x1 < x2 <= image.shape[1]
        assert 0 <= y1 < y2 <= image.shape[0]
        paper = image[0, 0] if not sample.target.contains((0, 0)) else image[-1, -1]
        assert (image[y1:y2, x1:x2] != paper).any()
        assert sample.instruction in (sample.meta["icon"], ICONS[sample.meta["icon"]].functions[0])


def test_worked_answers_are_trapped_by_functions_and_right_by_names():
    hits, counts = {"name": [], "function": []}, {"one": Counter(), "some": Counter()}
    samples = list(icon_samples(600, seed=5, worked=True, grid={"fewest_icons": 3, "colored": True}))
    for sample in samples:
        points = [tuple(point) for point in sample.meta["answers"]]
        hits[sample.meta["kind"]].append(sample.target.contains(points[0]))
        counts[sample.meta["ask"]][len(points)] += 1
        assert len(set(points)) == len(points)
    assert all(hits["name"])
    assert np.mean(hits["function"]) < 0.05
    assert {*counts["one"]} == {1}
    assert {*counts["some"]} == {1, 2, 3}
    assert "answers" not in next(icon_samples(1, seed=5)).meta


def test_unknown_kinds_are_refused():
    for options in ({"kinds": ["colour"]}, {"kinds": []}, {"ask": "all"}):
        with pytest.raises(ValueError, match="name, function"):
            next(icon_samples(1, seed=0, **options))


def test_a_table_of_screens_reads_back(tmp_path):
    targets = [
        Box(1, 2, 30, 40),
        AnyOf((Box(1, 2, 3, 4), Box(5, 6, 7, 8))),
        Polygon(((0, 0), (9, 0), (0, 9))),
        Refusal(),
    ]
    image = Image.new("RGB", (50, 40), "blue")
    samples = [
        GroundingSample(image, (50, 40), f"nr {i}", target, meta={"kind": "x"}) for i, target in enumerate(targets)
    ]
    path = write_samples(tmp_path / "a.jsonl", samples)
    rows = [json.loads(line) for line in path.open()]
    assert [target_of(row) for row in rows] == targets
    assert [row["kind"] for row in rows] == ["x"] * 4
    assert all(image_size(path.parent / row["image"]) == (50, 40) for row in rows)
    with pytest.raises(UserError, match="jsonl"):
        write_samples(tmp_path / "a.json", samples)


def test_the_size_of_a_turned_photo_is_that_of_the_upright_one(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (50, 40)).save(tmp_path / "turned.jpg", exif=exif)
    assert image_size(tmp_path / "turned.jpg") == (40, 50)


def test_building_twice_gives_the_same_file(tmp_path):
    first = build_icons(tmp_path / "a.jsonl", count=3, seed=1).read_text()
    assert build_icons(tmp_path / "a.jsonl", count=3, seed=1).read_text() == first


def test_the_fixed_parts_of_an_answer_are_one_token_each(tmp_path):
    tokenizer = load_processor(str(small_model(tmp_path / "m"))).tokenizer
    for token in answer_tokens(list(ICONS)):
        assert len(tokenizer.encode(token, add_special_tokens=False)) == 1
    text = '[{"label": "disk", "point_2d": [12, 345]}, {"label": "bell", "point_2d": [6, 7]}]'
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == 11
    assert tokenizer.decode(ids) == text


def test_icons_stand_anywhere_and_few_icons_leave_cells_empty():
    samples = list(icon_samples(300, seed=6, worked=True, listings=1.0, grid={"fewest_icons": 2}))
    cells = {(s.meta["icon"], int(s.target.center[0] // 32), int(s.target.center[1] // 32)) for s in samples}
    assert len(cells) > 100, "of 12 icons in 12 cells"
    assert {len(sample.meta["labels"]) for sample in samples} == set(range(2, 13))
    for sample in samples:
        assert sample.instruction == "everything"
        assert sample.meta["labels"] == sorted(sample.meta["labels"])
        assert sample.target.contains(sample.meta["answers"][sample.meta["labels"].index(sample.meta["icon"])])


def test_the_size_of_a_screenshot_is_read_without_its_pixels(tmp_path, monkeypatch):
    screen, exif = Image.new("RGB", (50, 40), "red"), Image.Exif()
    exif[0x0112] = 6
    screen.save(tmp_path / "plain.png")
    screen.save(tmp_path / "turned.png", exif=exif)
    content = (tmp_path / "turned.png").read_bytes()
    start = content.index(b"eXIf") - 4
    end = start + 12 + int.from_bytes(content[start : start + 4], "big")
    last = content.index(b"IEND") - 4
    # a PNG may name its orientation after its pixels
    (tmp_path / "late.png").write_bytes(content[:start] + content[end:last] + content[start:end] + content[last:])
    assert image_size(tmp_path / "turned.png") == image_size(tmp_path / "late.png") == (40, 50)
    (tmp_path / "cut.png").write_bytes((tmp_path / "plain.png").read_bytes()[:-30])
    with pytest.raises(OSError, match="truncated"):
        image_size(tmp_path / "cut.png")
    monkeypatch.setattr(PngImageFile, "load", None)
    assert image_size(tmp_path / "plain.png") == (50, 40)
