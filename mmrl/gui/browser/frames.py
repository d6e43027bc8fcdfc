"""Frames of one page shared by the environments of a process; a step is one call, without a screenshot."""

from __future__ import annotations

from mmrl.gui.browser.browser import Browser, BrowserFailure, process_browser
from mmrl.gui.browser.page import GuardedPage

ADD = """([width, height]) => {
  const frame = Object.assign(document.createElement('iframe'), { width, height });
  document.body.append(frame);
  return document.querySelectorAll('iframe').length - 1;
}"""
_PAGES: dict[tuple[int, tuple[int, int]], GuardedPage] = {}
"""Shared pages by browser identity and size."""


class SharedFrame:
    """The frame of an environment.

    Args:
        size: width and height in pixels.
        browser: a running browser; None uses that of the process.
    """

    def __init__(self, size: tuple[int, int], browser: Browser | None) -> None:
        self._size, self._browser = size, browser
        self._place: tuple[GuardedPage, int] | None = None

    def place(self, *, renew: bool) -> tuple[GuardedPage, int]:
        """The page and the number of the frame; if the browser has restarted, `renew` makes a new one.

        Raises:
            BrowserFailure: the browser exited during the episode.
        """
        if self._place is None or not self._place[0].is_open():
            if not renew:
                raise BrowserFailure("the browser exited during the episode")
            page = _shared_page(self._browser or process_browser(), self._size)
            self._place = page, page.evaluate(ADD, list(self._size))
        return self._place

    def forget(self) -> None:
        """Forget the page; it closes with the browser, because other environments have frames in it."""
        self._place = None


def _shared_page(browser: Browser, size: tuple[int, int]) -> GuardedPage:
    if not browser.is_alive():
        browser.restart()
    page = _PAGES.get((id(browser), size))
    if page is None or page.browser is not browser or not page.is_open():
        _PAGES[id(browser), size] = page = GuardedPage(browser, *size)
        page.load_html("<!doctype html><body></body>")
    return page
