"""A browser page that cannot be navigated away from, its controls, and the popups that Chromium draws over it.

Dialogs, downloads, new windows and other URLs are blocked and reported. Caret, animations and transitions are hidden,
so that the same page always gives a bit-identical screenshot. The controls are read from the DOM: boxes, roles and
accessible names, with a test of visibility.

Popups that Chromium draws over a page, out of reach of the driver's clicks: option lists and date pickers.

A screenshot shows such a popup, but a click on it lands on the page beneath. So before a click opens a select, its list
is switched to the browser's `appearance: base-select`, which renders it inside the page, where options can be clicked.
Other popups (date, time and colour pickers, lists opened by keys or by the page) are closed when the agent clicks them,
and the agent gets a message.
"""

from __future__ import annotations

import contextlib
import io
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

import numpy as np

from mmrl.errors import UserError
from mmrl.files import open_image_file
from mmrl.gui.browser.browser import Browser, BrowserFailure
from mmrl.gui.grounding.coords import Box, Point

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from playwright.sync_api import Dialog, Download, ElementHandle, Frame, Page, Request, Route


DEEPEST_FRAME = 8
"""Maximum depth of nested frames that are searched."""
CLOSED = (
    "A {kind} was open, which takes no clicks. It is closed, and nothing was clicked; open it again and use keys such "
    "as ArrowDown and Enter, or type the value into the field."
)

AT_POINT = """([x, y]) => {
  let top = document.elementFromPoint(x, y);
  for (let inner; top && top.shadowRoot; top = inner) {
    inner = top.shadowRoot.elementFromPoint(x, y);
    if (!inner || inner === top) break;
  }
  return top && top.closest('select, iframe, frame');
}"""
INSIDE_OF = """frame => {
  if (!['iframe', 'frame'].includes(frame.localName)) return null;
  const box = frame.getBoundingClientRect(), style = getComputedStyle(frame);
  const scale = frame.offsetWidth ? box.width / frame.offsetWidth : 1;
  return [box.left + scale * (frame.clientLeft + parseFloat(style.paddingLeft)),
    box.top + scale * (frame.clientTop + parseFloat(style.paddingTop)), scale];
}"""
"""Left, top and scale of a frame's document in CSS pixels of the enclosing page; null for other elements."""
OPEN_IN_PAGE = """select => {
  const SELECTOR = 'select[mmrl-picker]', KEPT = Symbol.for('mmrl.pickers');
  if (select.localName !== 'select' || select.multiple || select.size > 1 || select.matches(':disabled')
    || select.hasAttribute('mmrl-picker') || !CSS.supports('appearance: base-select')
    || !CSS.supports('selector(:open)') || select.matches(':open')) return false;
  const style = getComputedStyle(select), root = select.getRootNode();
  const look = { boxSizing: 'border-box', width: `${select.offsetWidth}px`, height: `${select.offsetHeight}px`,
    minInlineSize: '0', minBlockSize: '0', alignItems: 'center' };
  for (const name of ['font', 'color', 'background', 'border', 'borderRadius', 'padding', 'margin']) {
    look[name] = style[name];
  }
  if (style.appearance !== 'none' && style.paddingLeft === '0px') look.padding = '0 4px';  // drawn, not in the style
  const icon = style.appearance === 'none' ? `${SELECTOR}::picker-icon { display: none }` : '';
  const sheet = document.createElement('style');
  sheet.textContent = `
    ${SELECTOR}::picker(select) { appearance: base-select; background: #efefef; color: #000; border: 1px solid #767676;
      border-radius: 0; margin: 0; padding: 0; box-shadow: none; font: ${style.font}; }
    ${SELECTOR} option { min-block-size: 24px; padding: 0 4px; gap: 0; outline: none; }
    ${SELECTOR} option::checkmark { display: none; }
    ${SELECTOR} option:checked, ${SELECTOR} option:enabled:hover, ${SELECTOR} option:enabled:focus {
      background: #1967d2; color: #fff; }
    ${icon}`;
  (root.head || (root === document ? document.documentElement : root)).append(sheet);
  (document[KEPT] = document[KEPT] || []).push({ select, sheet, style: select.getAttribute('style') });
  select.setAttribute('mmrl-picker', '');
  for (const [name, value] of Object.entries(look)) select.style[name] = value;
  select.style.setProperty('appearance', 'base-select', 'important');
  return true;
}"""
RESTORE = """() => {
  const KEPT = Symbol.for('mmrl.pickers'), kept = document[KEPT] || [];
  document[KEPT] = kept.filter(({ select, sheet, style }) => {
    if (select.isConnected && select.matches(':open')) return true;
    sheet.remove();
    select.removeAttribute('mmrl-picker');
    if (style === null) select.removeAttribute('style'); else select.setAttribute('style', style);
    return false;
  });
  return document[KEPT].length;
}"""
NATIVE = """() => {
  const known = CSS.supports('selector(:open)');
  const types = ['date', 'datetime-local', 'month', 'week', 'time', 'color'];
  const pickers = types.map(type => `input[type=${type}]`).join();
  const look = root => {
    for (const element of root.querySelectorAll('*')) {
      const inner = element.shadowRoot && look(element.shadowRoot);
      if (inner) return inner;
      const list = element.matches('select:not([mmrl-picker])'), picker = element.matches(pickers);
      // browsers that do not know :open may have opened what has the focus
      if ((list || picker) && (known ? element.matches(':open') : root.activeElement === element)) {
        return list ? 'list of options' : `${element.type} picker`;
      }
    }
    return '';
  };
  return look(document);
}"""


def open_in_page(page: Page, point: Point) -> None:
    """Make the select element at a point (in CSS pixels) open its list inside the page when clicked."""
    frame: Frame | None = page.main_frame
    # elementFromPoint stops at a frame, so the point is converted to the inner document and looked up again.
    (x, y), scale = point, 1.0
    for _ in range(DEEPEST_FRAME):
        if frame is None:
            return
        found = frame.evaluate_handle(AT_POINT, [x, y]).as_element()
        if found is None:
            return
        inside = found.evaluate(INSIDE_OF)
        if inside is None:
            found.evaluate(OPEN_IN_PAGE)
            return
        left, top, scale = inside
        (x, y), frame = ((x - left) / scale, (y - top) / scale), found.content_frame()


def restore_closed(page: Page) -> None:
    """Restore the original style of selects whose list is closed."""
    from playwright.sync_api import Error

    for frame in _frames(page):
        # a document that the action leaves cannot answer, and needs no style any more
        with contextlib.suppress(Error):
            frame.evaluate(RESTORE)


def refusal_of(page: Page, point: Point, scale: float) -> str:
    """Why a mouse action at a point (in CSS pixels) would not reach what is shown there; empty if it would.

    A popup outside the page is closed first; its area is where the screenshot changes.
    """
    kind = next(filter(None, (frame.evaluate(NATIVE) for frame in _frames(page))), "")
    if not kind:
        return ""
    # The page cannot ask where a native popup is drawn, but closing it changes exactly the pixels that it covered.
    shown = _screenshot(page)
    page.keyboard.press("Escape")  # the popup takes the key, the page gets none
    rows, columns = np.nonzero((shown != _screenshot(page)).any(-1))
    x, y = point[0] * scale, point[1] * scale
    inside = len(rows) and columns.min() <= x <= columns.max() + 1 and rows.min() <= y <= rows.max() + 1
    return CLOSED.format(kind=kind) if inside else ""


def content_box(frame: Frame) -> tuple[ElementHandle, tuple[float, float, float]]:
    """A frame's element, and the left, top and scale of its document in CSS pixels of the enclosing page."""
    element = frame.frame_element()
    left, top, scale = element.evaluate(INSIDE_OF)
    return element, (left, top, scale)


def _frames(page: Page) -> list[Frame]:
    """Frames that are still attached; one may be detached while they are listed."""
    return [frame for frame in page.frames if not frame.is_detached()]


def _screenshot(page: Page) -> NDArray[Any]:
    content = page.screenshot(caret="hide", animations="disabled", scale="device")
    return np.asarray(open_image_file(io.BytesIO(content), ["PNG"]).convert("RGB"))


ADDRESS = "http://page.invalid/"
"""Address of pages given as HTML, so that a form or a reload makes a request that can be blocked."""
FREEZE = """async () => {
  const style = document.createElement('style');
  style.textContent = '*, *::before, *::after { caret-color: transparent !important; animation: none !important; '
    + 'transition: none !important; scroll-behavior: auto !important; }';
  (document.head || document.documentElement).append(style);
  await document.fonts.ready;
  // a screenshot shows the last drawn frame, and the first one after loading may still contain motion
  await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
}"""
FRAME_CLIP = """(frame, boxes) => {
  const cut = frame.getBoundingClientRect(), style = getComputedStyle(frame);
  const gone = style.display === 'none' || style.visibility !== 'visible' || Number(style.opacity) < 0.1;
  return boxes.map(([x1, y1, x2, y2]) => {
    const box = [Math.max(x1, cut.left, 0), Math.max(y1, cut.top, 0), Math.min(x2, cut.right, innerWidth),
      Math.min(y2, cut.bottom, innerHeight)];
    if (gone) return [box, 'style'];
    if (box[2] - box[0] < 2 || box[3] - box[1] < 2) return [box, 'outside'];
    if (frame.closest('[inert]')) return [box, 'inert'];
    let top = document.elementFromPoint((box[0] + box[2]) / 2, (box[1] + box[3]) / 2);
    while (top && top.shadowRoot && top !== frame) {
      const inner = top.shadowRoot.elementFromPoint((box[0] + box[2]) / 2, (box[1] + box[3]) / 2);
      if (!inner || inner === top) break;
      top = inner;
    }
    return [box, top === frame ? '' : style.pointerEvents === 'none' ? 'inert' : 'covered'];
  });
}"""
"""The visible part of a frame's boxes, and why a click at their centre does not reach them."""
SETTLE = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
PAUSE_MS = 20
"""Milliseconds between two looks at whether a page has arrived."""


class GuardedPage:
    """One page in a separate context.

    Args:
        browser: a running browser.
        width: of the visible part in CSS pixels.
        height: in CSS pixels.
        scale: device pixels of a CSS pixel; the screenshot has width * scale columns.
        locale: language reported to the page.
    """

    def __init__(self, browser: Browser, width: int, height: int, scale: float = 1.0, locale: str = "en-US") -> None:
        self.browser = browser
        self.scale = scale
        self.generation = browser.generation
        self.allow_hosts = frozenset(browser.settings.allow_hosts)
        """Hosts that the page may reach, from the settings of the browser."""
        self.blocked: Counter[str] = Counter()
        """Requests to other hosts that were blocked since a page was loaded, by host."""
        self._events: list[str] = []
        self._loading = False
        self._awaited = self._arrived = False
        self._html = ""
        self._files: Path | None = None
        self._context = browser.open_context(width, height, scale, locale)
        with browser.limited("opening a page"):
            self._page: Page = self._context.new_page()
            # Registered after the page itself was opened, or it would be closed as a foreign window.
            self._context.on("page", self._close_window)
            self._page.on("dialog", self._dismiss)
            self._page.on("download", self._refuse_download)
            self._page.on("framenavigated", self._note_address)
            if self.allow_hosts:
                self._page.on("request", self._note_request)
                self._page.on("requestfinished", self._note_end)
                self._page.on("requestfailed", self._note_end)
            self._page.route("**/*", self._check_request)

    @property
    def page(self) -> Page:
        """The playwright page; wrap calls in `browser.limited`."""
        return self._page

    def is_open(self) -> bool:
        """Whether the page's browser still runs."""
        return self.generation == self.browser.generation and self.browser.is_alive()

    def load_html(self, html: str, *, new_document: bool = True) -> None:
        """Show a page."""
        self._html = html
        self._files = None
        # set_content keeps the document, and needs one at ADDRESS to write into
        if new_document or self._page.url != ADDRESS:
            self._load(lambda: self._page.goto(ADDRESS, wait_until="load"), "loading the page")
        else:
            self._load(lambda: self._page.set_content(html, wait_until="load"), "loading the page")

    def load_file(self, file: Path, folder: Path | None = None) -> None:
        """Show a local file, which may load only other files of `folder` (by default the file's parent)."""
        self._files = (file.parent if folder is None else folder).resolve()
        self._load(lambda: self._page.goto(file.as_uri(), wait_until="load"), f"loading {file}")

    def load_url(self, url: str) -> None:
        """Show a page of an allowed host.

        Args:
            url: address with scheme and host.

        Raises:
            UserError: the host is not among `BrowserSettings.allow_hosts`.
            BrowserFailure: the page does not load, or its status is an error.
        """
        if not self._may_reach(url):
            allowed = ", ".join(sorted(self.allow_hosts)) or "none"
            raise UserError(f"{url} is not of an allowed host; browser.allow_hosts has: {allowed}")
        self._files = None
        self._load(lambda: self._open(url), f"loading {url}")

    def _open(self, url: str) -> None:
        answer = self._page.goto(url, wait_until="load")
        if answer is not None and not answer.ok:
            raise BrowserFailure(f"{url} answered with status {answer.status}")

    def _load(self, load: Callable[[], Any], what: str) -> None:
        self.browser.pages += 1
        self._loading = True
        self.blocked.clear()
        try:
            with self.browser.limited(what):
                self._page.mouse.move(0, 0)  # at its last position it would hover over something
                load()
                self._page.evaluate(FREEZE)
        finally:
            self._loading = False
            self._awaited = self._arrived = False
        # What the page attempted while loading is not the agent's doing.
        self._events.clear()

    def evaluate(self, script: str, argument: Any = None) -> Any:
        """Evaluate a JavaScript function in the page."""
        with self.browser.limited("a script in the page"):
            return self._page.evaluate(script, argument)

    def settle(self) -> None:
        """Wait until changes of the page are drawn; on allowed hosts, also until a page that was opened has loaded.

        Raises:
            BrowserFailure: the page does not load within the browser's `timeout_s`.
        """
        if not self.allow_hosts:
            self.evaluate(SETTLE)
            return
        deadline = time.monotonic() + self.browser.settings.timeout_s
        with self.browser.limited("waiting for a page"):
            while not self._is_settled():
                if time.monotonic() > deadline:
                    raise BrowserFailure(f"a page did not load within {self.browser.settings.timeout_s:g} s")
                # events arrive while the driver waits
                self._page.wait_for_timeout(PAUSE_MS)

    def _is_settled(self) -> bool:
        """Whether no page is awaited, the last one is prepared, and its changes are drawn."""
        from playwright.sync_api import Error

        try:
            if self._arrived:
                self._page.wait_for_load_state("load")
                self._arrived = False
                self._page.evaluate(FREEZE)
            self._page.evaluate(SETTLE)
        except Error:
            # the document was replaced meanwhile; a browser that died fails in the next call
            return False
        return not self._awaited and not self._arrived

    def screenshot(self) -> NDArray[np.uint8]:
        """The visible part as (H, W, 3) uint8 RGB."""
        with self.browser.limited("a screenshot"):
            # the protocol's own captureScreenshot is 10 ms faster, but ignores the scale
            content = self._page.screenshot(caret="hide", animations="disabled", scale="device")
        return np.asarray(open_image_file(io.BytesIO(content), ["PNG"]).convert("RGB"))

    def take_events(self) -> list[str]:
        """Blocked attempts by the page since the last call, such as "dialog: Really?" or "download: a.zip"."""
        found, self._events = self._events, []
        return found

    def close(self) -> None:
        """Close the page and its context."""
        # a context of an earlier start is gone with its browser
        if self.is_open():
            self.browser.close_context(self._context)

    def _dismiss(self, dialog: Dialog) -> None:
        self._events.append(f"dialog: {dialog.message[:200]}")
        dialog.dismiss()

    def _refuse_download(self, download: Download) -> None:
        self._events.append(f"download: {download.suggested_filename[:200]}")

    def _close_window(self, window: Page) -> None:
        self._events.append("window")
        window.close()

    def _note_address(self, frame: Frame) -> None:
        if frame != self._page.main_frame or self._loading:
            return
        self._awaited = False
        if self._may_reach(frame.url):
            self._arrived = True
        else:
            # about:blank and a reload of a page without an address make no request that could be refused
            self._events.append(f"left the page: {frame.url[:200]}")

    def _note_request(self, request: Request) -> None:
        # the driver checks only the first request of a redirect; the rest fails because its host has no address
        if request.redirected_from is not None and _is_remote(request.url) and not self._may_reach(request.url):
            self._block(request.url)
        elif self._is_main(request):
            self._awaited = True

    def _note_end(self, request: Request) -> None:
        # downloads and answers without content end without a new page
        if self._is_main(request):
            self._awaited = False

    def _is_main(self, request: Request) -> bool:
        """Whether a request opens another page in the window."""
        return request.is_navigation_request() and request.frame == self._page.main_frame

    def _block(self, url: str) -> None:
        self.blocked[urlsplit(url).hostname or ""] += 1

    def _check_request(self, route: Route) -> None:
        request = route.request
        if self._loading and request.url == ADDRESS:
            route.fulfill(body=self._html, content_type="text/html; charset=utf-8")
            return
        # Also while loading: a page's own scripts and images must not read files outside its folder.
        if not self._may_read(request.url):
            self._events.append(f"file: {request.url[:200]}")
            route.abort("aborted")
            return
        if self._may_reach(request.url):
            route.continue_()
            return
        if _is_remote(request.url):
            self._block(request.url)
        if self._loading or not request.is_navigation_request():
            route.continue_()  # offline or without an address, so that it fails
            return
        self._events.append(f"navigation: {request.url[:200]}")
        route.abort("aborted")  # this reason keeps the page; any other shows an error page instead

    def _may_reach(self, url: str) -> bool:
        """Whether a URL is one of an allowed host."""
        return _is_remote(url) and urlsplit(url).hostname in self.allow_hosts

    def _may_read(self, url: str) -> bool:
        """Whether a URL is not a file, or is a file in the page's folder."""
        parts = urlsplit(url)
        if parts.scheme != "file":
            return True
        # resolve() follows links and "..", which could otherwise lead out of the folder
        return self._files is not None and Path(url2pathname(parts.path)).resolve().is_relative_to(self._files)


def _is_remote(url: str) -> bool:
    return urlsplit(url).scheme in ("http", "https", "ws", "wss")


@dataclass(frozen=True)
class Element:
    """A control of a page."""

    key: str
    """Its `data-key`, which mmrl's own pages give to every control; empty elsewhere."""
    tag: str
    role: str
    """ARIA role: the explicit one, or the tag's default."""
    name: str
    """Accessible name: aria-labelledby, aria-label, label, contents, then alt, title or placeholder."""
    text: str
    """Its visible text."""
    box: Box
    """Visible part in pixels of the screenshot; for a wrapped link, its largest line."""
    hidden: str = ""
    """Reason why it cannot be clicked: style, outside (the window or a frame), covered, or inert (also without pointer
    events); empty if it can be clicked."""
    visible_share: float = 1.0
    """Fraction of its area that is visible."""
    icon_only: bool = False
    """Whether it shows an icon and no text."""
    type: str = ""
    """Type of an input."""
    disabled: bool = False
    checked: bool = False
    value: str = ""
    row: str = ""
    """`data-row` of the row or card that contains it."""
    focused: bool = False
    all_selected: bool = False
    """Whether typing would replace its whole text."""
    data: Mapping[str, str] = field(default_factory=dict)
    """Its data attributes."""

    @property
    def visible(self) -> bool:
        """Whether a click on its center reaches it."""
        return not self.hidden

    @property
    def center(self) -> Point:
        """Center of its visible part in pixels of the screenshot."""
        return self.box.center


def read_elements(page: GuardedPage) -> list[Element]:
    """The controls of a page, invisible ones included, with boxes in pixels of the screenshot.

    Controls are in document order; a frame's controls follow those of the page around it.
    """
    with page.browser.limited("reading the controls"):
        entries = _entries_of(page.page.main_frame)
    return [_element(entry, page.scale) for entry in entries]


def _entries_of(frame: Frame) -> list[dict[str, Any]]:
    """The controls of a frame and its nested frames, with boxes in CSS pixels of the frame's document."""
    # frame by frame: a script of the page cannot look into frames of other origins
    entries: list[dict[str, Any]] = json.loads(frame.evaluate(read_script()))
    for inner in frame.child_frames:
        # a frame may vanish while its page is read
        if inner.is_detached():
            continue
        element, (left, top, scale) = content_box(inner)
        found = _entries_of(inner)
        for entry in found:
            edges = zip(entry["box"], (left, top, left, top), strict=True)
            # from the frame's document to that of the page around it
            entry["box"] = [offset + scale * edge for edge, offset in edges]
        # A control visible in its frame can still be cut off or covered by the page around the frame.
        answers = element.evaluate(FRAME_CLIP, [entry["box"] for entry in found])
        # the frame's own reason comes first
        for entry, (box, hidden) in zip(found, answers, strict=True):
            entries.append(entry | {"box": box, "hidden": entry["hidden"] or hidden})
    return entries


def parse_elements(answer: str, scale: float = 1.0) -> list[Element]:
    """The controls in a result of `read_script`, with boxes in pixels of a screenshot with the given scale."""
    return [_element(entry, scale) for entry in json.loads(answer)]


def _element(entry: Mapping[str, Any], scale: float) -> Element:
    return Element(**{**entry, "box": Box(*(edge * scale for edge in entry["box"]))})


@cache
def read_script() -> str:
    """The JavaScript function that reads the controls of a document, as JSON."""
    return Path(__file__).with_name("read_elements.js").read_text(encoding="utf-8")
