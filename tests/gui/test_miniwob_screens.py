"""Pointing screens of MiniWoB++: the page rewards a click into each box, and equal seeds give equal screens."""

import json

import pytest

from mmrl.errors import UserError
from mmrl.gui.browser.browser import process_browser
from mmrl.gui.toy.miniwob_screens import LIST, PAGES, build_pointing, pointing_samples

pytest.importorskip("miniwob", reason="pip install 'mmrl-suite[miniwob]'")


@pytest.fixture
def build(browser, tmp_path):
    """Builds a file of screens and returns its rows."""
    browser.close()  # the builder starts the browser of the process

    def rows(name, **options):
        path = build_pointing(tmp_path / f"{name}.jsonl", **options)
        return [json.loads(line) for line in path.open()]

    yield rows
    process_browser().close()
    browser.restart(after_failure=False)


def test_each_page_has_a_screen_and_a_seed_repeats_it(build):
    first, second = (build(name, count=len(PAGES), seed=4, most_answers=3) for name in ("first", "second"))
    assert {row["kind"] for row in first} == set(PAGES)
    for row, again in zip(first, second, strict=True):
        boxes = row.get("boxes") or [row["bbox"]]
        x, y = row["answers"][0]
        assert any(left <= x <= right and top <= y <= bottom for left, top, right, bottom in boxes)
        assert row["labels"][0] in row["instruction"]
        assert 1 <= len(row["answers"]) == len(row["labels"]) <= 3
        same = {"id", "image"}
        assert {k: v for k, v in row.items() if k not in same} == {k: v for k, v in again.items() if k not in same}


def test_listings_name_every_candidate_and_swapped_screens_keep_the_questions(build, tmp_path):
    rows = build("listed", count=len(PAGES), seed=4, check=False, most_answers=1, listings=1.0)
    assert {row["instruction"] for row in rows} == {LIST}
    assert {len(row["labels"]) for row in rows if row["kind"] == "click-color"} == {4}
    own = build("own", count=3, seed=4, check=False, pages=["click-color"])[1:]
    other = build("other", count=2, seed=4, check=False, pages=["click-color"], swapped=True)
    for row, swapped in zip(own, other, strict=True):
        assert (swapped["id"], swapped["instruction"], swapped.get("bbox")) == (
            row["id"],
            row["instruction"],
            row.get("bbox"),
        )
        assert (tmp_path / swapped["image"]).read_bytes() != (tmp_path / row["image"]).read_bytes()


def test_screens_without_a_click_are_those_of_loaded_pages(build):
    loaded, continued = (list(pointing_samples(2 * len(PAGES), seed=4, check=check)) for check in (True, False))
    assert [sample.meta for sample in loaded] == [sample.meta for sample in continued]
    assert [sample.target for sample in loaded] == [sample.target for sample in continued]
    assert all(one.image.tobytes() == other.image.tobytes() for one, other in zip(loaded, continued, strict=True))


def test_an_unknown_page_is_refused():
    with pytest.raises(UserError, match="no pointing screens for 'click-pie'; available: click-test-2"):
        next(pointing_samples(1, pages=["click-pie"]))
