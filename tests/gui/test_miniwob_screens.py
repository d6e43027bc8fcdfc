"""Pointing screens of MiniWoB++: the page rewards a click into each box, and equal seeds give equal screens."""

import json

import pytest

from mmrl.errors import UserError
from mmrl.gui.browser.browser import process_browser
from mmrl.gui.toy.miniwob_screens import PAGES, build_pointing, pointing_samples

pytest.importorskip("miniwob", reason="pip install 'mmrl-suite[miniwob]'")


@pytest.fixture
def drawn(browser, tmp_path):
    """Rows of a screen of each page, and of the same again."""
    browser.close()  # the builder starts the browser of the process
    rows = []
    for name in ("first", "second"):
        path = build_pointing(tmp_path / f"{name}.jsonl", count=len(PAGES), seed=4, most_answers=3)
        rows.append([json.loads(line) for line in path.open()])
    process_browser().close()
    browser.restart(after_failure=False)
    return rows


def test_each_page_has_a_screen_and_a_seed_repeats_it(drawn):
    first, second = drawn
    assert {row["kind"] for row in first} == set(PAGES)
    for row, again in zip(first, second, strict=True):
        boxes = row.get("boxes") or [row["bbox"]]
        x, y = row["answers"][0]
        assert any(left <= x <= right and top <= y <= bottom for left, top, right, bottom in boxes)
        assert 1 <= len(row["answers"]) <= 3
        same = {"id", "image"}
        assert {k: v for k, v in row.items() if k not in same} == {k: v for k, v in again.items() if k not in same}


def test_an_unknown_page_is_refused():
    with pytest.raises(UserError, match="no pointing screens for 'click-pie'; available: click-test-2"):
        next(pointing_samples(1, pages=["click-pie"]))
