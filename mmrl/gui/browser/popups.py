"""Popups that Chromium draws over a page, out of reach of the driver's clicks: option lists and date pickers.

A screenshot shows such a popup, but a click on it lands on the page beneath. So before a click opens a select, its list
is switched to the browser's `appearance: base-select`, which renders it inside the page, where options can be clicked.
Other popups (date, time and colour pickers, lists opened by keys or by the page) are closed when the agent clicks them,
and the agent gets a message.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.gui.grounding.coords import Point

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from playwright.sync_api import ElementHandle, Frame, Page

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
"""Left, top and scale of a frame's document in CSS pixels of the page around it; null for other elements."""
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
    """Make the select at a point, in CSS pixels, open its list inside the page when clicked."""
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
    for frame in _frames(page):
        frame.evaluate(RESTORE)


def refusal_of(page: Page, point: Point, scale: float) -> str:
    """Why a mouse action at a point, in CSS pixels, would not reach what is shown there; empty if it would.

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
    """A frame's element, and the left, top and scale of its document in CSS pixels of the page around it."""
    element = frame.frame_element()
    left, top, scale = element.evaluate(INSIDE_OF)
    return element, (left, top, scale)


def _frames(page: Page) -> list[Frame]:
    """Frames that are still attached; one may be detached while they are listed."""
    return [frame for frame in page.frames if not frame.is_detached()]


def _screenshot(page: Page) -> NDArray[Any]:
    from PIL import Image

    content = page.screenshot(caret="hide", animations="disabled", scale="device")
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
