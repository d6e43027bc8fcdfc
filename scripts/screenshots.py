"""Pictures of a run's report and of its watch page for the documentation: `python scripts/screenshots.py runs/grpo`.

Needs Chromium, as the browser tasks do.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from mmrl.gui.browser.browser import require_chromium

PROJECT = Path(__file__).resolve().parent.parent
SIZE = {"width": 1100, "height": 760}


def main(run: Path) -> None:
    """Write docs/report.png and docs/watch.png."""
    command = [sys.executable, "-m", "mmrl.cli", "watch", str(run), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watch, sync_playwright() as playwright:
        try:
            assert watch.stdout is not None
            address = re.search(r"http://\S+?(?=;|\s)", watch.stdout.readline())
            assert address is not None
            browser = playwright.chromium.launch(executable_path=require_chromium(), args=["--no-sandbox"])
            page = browser.new_page(viewport=SIZE, color_scheme="light")
            for name, place in (("report", (run / "report.html").resolve().as_uri()), ("watch", address[0])):
                page.goto(place)
                page.wait_for_timeout(1500)
                _save(page, run, name)
        finally:
            watch.terminate()


def _save(page: Page, run: Path, name: str) -> None:
    """A picture in few colours, with paths as seen from the folder of the runs."""
    folder = f"{run.resolve().parent.parent}/"
    page.evaluate(
        """folder => {
            const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
            while (texts.nextNode()) texts.currentNode.data = texts.currentNode.data.replaceAll(folder, "");
        }""",
        folder,
    )
    image = Image.open(io.BytesIO(page.screenshot())).convert("RGB").quantize(64)
    image.save(PROJECT / f"docs/{name}.png", optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
