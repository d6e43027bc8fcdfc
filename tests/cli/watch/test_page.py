"""The page in a real browser: it follows a run, and what a model wrote stays text."""

import numpy as np
import pytest
from PIL import Image

from mmrl.errors import UserError
from mmrl.gui.browser.browser import find_chromium, require_chromium
from mmrl.runs.records import SampleRecord, write_samples
from tests.cli.watch.runs import append

HOSTILE = "<img src=x onerror=\"document.title='run'\"><script>document.title='run'</script>"


@pytest.fixture
def page():
    try:
        require_chromium()
    except UserError as error:
        pytest.skip(str(error))
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
        opened = browser.new_page(viewport={"width": 390, "height": 800})
        opened.problems = []
        opened.on("console", lambda message: opened.problems.append(message.text) if message.type == "error" else None)
        opened.on("pageerror", lambda error: opened.problems.append(str(error)))
        yield opened
        browser.close()


@pytest.mark.slow
def test_the_page_follows_a_run(server, page, tmp_path):
    folder = tmp_path / "run"
    image = Image.fromarray(np.zeros((8, 8, 3), np.uint8))
    write_samples(folder, 1, "train", [SampleRecord("first", "q", "early", None, [image])])
    write_samples(folder, 2, "train", [SampleRecord("second", "q", HOSTILE)])
    page.goto(server.address)
    page.get_by_text("step 3 of 10").wait_for()
    assert "token" not in page.url
    page.get_by_role("slider", name="Reward, step").focus()
    page.keyboard.press("Home")
    page.get_by_text("0.1 at 1").wait_for()
    append(folder / "metrics.jsonl", {"step": 4, "time": 1004.0, "reward/mean": 0.75})
    page.get_by_text("step 4 of 10").wait_for()
    page.get_by_text(HOSTILE).wait_for()
    page.locator("#slider").focus()
    page.keyboard.press("ArrowLeft")
    page.get_by_text("early").wait_for()
    page.locator("#samples img").scroll_into_view_if_needed()
    page.wait_for_function("document.querySelector('#samples img').naturalWidth == 8")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.title() == "mmrl watch"
    assert page.problems == []
