"""The actions of an agent on a page: read and checked, then executed.

Everything is checked first, since the driver silently takes clicks far outside the window and fails on NaN. Points are
in the environment's coordinate space and are converted here, once.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmrl.gui.browser.page import open_in_page, refusal_of, restore_closed
from mmrl.gui.grounding.coords import CoordinateSpace, Point, Size, from_original, to_original

if TYPE_CHECKING:
    from mmrl.gui.browser.page import GuardedPage

MAX_TEXT_CHARS = 500
MAX_SCROLL_PX = 5000
SCROLL_PX = 120
"""Pixels per click of the mouse wheel, also used for a scroll without an amount."""
MAX_KEYS = 64
MAX_WAIT_S = 10
MAX_ANSWER_CHARS = 4000
DRAG_STEPS = 4
LONG_PRESS_MS = 600
"""Milliseconds; phones take a touch of half a second as a long one."""
MAX_NAME_CHARS = 200
PHONE = """([action, app]) => {
  const event = new CustomEvent(`mmrl:${action}`, { cancelable: true, detail: { app } });
  if (!window.dispatchEvent(event)) return true;
  if (action !== 'press_back' || !window.navigation || !navigation.canGoBack) return false;
  navigation.back();
  return true;
}"""
"""Tell the page of a phone's button; whether it was handled, by the page or as the browser's way back."""


class ActionError(ValueError):
    """An action that cannot be executed; the message is for the agent."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Viewpoint:
    """The image that the agent sees, and the coordinate space of its points."""

    space: CoordinateSpace
    image_wh: Size
    """(width, height) of the screenshot in pixels."""
    model_wh: Size | None
    """(width, height) of the image for the agent, if it is resized."""
    scale: float
    """Screenshot pixels per CSS pixel."""

    def to_image(self, point: Point) -> Point:
        """A point of the agent in pixels of the screenshot; raises ActionError if it is outside the screenshot."""
        x, y = to_original(point, self.space, self.image_wh, self.model_wh)
        width, height = self.image_wh
        if not (0 <= x <= width and 0 <= y <= height):
            raise ActionError("out_of_bounds", f"The point {_shown(point)} is outside of the picture.")
        return min(x, width - 0.5), min(y, height - 0.5)  # the edge belongs to the image, not to the window

    def from_image(self, point: Point) -> Point:
        """A point of the screenshot in the agent's space: integers, or three decimals for fractions."""
        first, second = from_original(point, self.space, self.image_wh, self.model_wh)
        digits = 3 if self.space in (CoordinateSpace.REL1, CoordinateSpace.REL1_YX) else None
        return round(first, digits), round(second, digits)


@dataclass(frozen=True)
class PageCommand:
    """A checked action; points in pixels of the screenshot."""

    name: str
    points: tuple[Point, ...] = ()
    text: str = ""
    """Text to type, keys by their playwright names separated by spaces, the name of an app, or the final answer."""
    scroll_px: Point = (0, 0)
    """Distance in CSS pixels, right and down."""
    seconds: float = 0.0
    """Time to wait."""


@dataclass(frozen=True)
class ActionKind:
    """One kind of action."""

    read: Callable[[str, dict[str, Any], Viewpoint], PageCommand]
    """Checks the arguments, removes the known ones from the dict, and builds the command."""
    summary: str
    """Its arguments and effect, for prompts."""


def read_action(
    name: str, arguments: Mapping[str, Any], viewpoint: Viewpoint, actions: Mapping[str, ActionKind] | None = None
) -> PageCommand:
    """Check an action, by default one of `ACTIONS`; raises ActionError."""
    known = ACTIONS if actions is None else actions
    if name not in known:
        raise ActionError("unknown_action", f"There is no action {name[:60]!r}; the actions are: {', '.join(known)}.")
    # each reader removes what it knows; what is left over is an argument that the action does not have
    left = dict(arguments)
    command = known[name].read(name, left, viewpoint)
    if left:
        extra = ", ".join(map(str, list(left)[:5]))[:100]
        raise ActionError("wrong_arguments", f"The action {name} has no argument {extra}. {known[name].summary}")
    return command


def execute_command(command: PageCommand, page: GuardedPage) -> None:
    """Execute a command; returns when the page has handled the input.

    Raises:
        ActionError: a popup outside of the page is in the way (it is closed), or the page has no such button.
    """
    # the mouse acts in CSS pixels
    points = [(x / page.scale, y / page.scale) for x, y in command.points]
    with page.browser.limited(f"the action {command.name}"):
        for point in points[:1]:
            # only where the action begins: a native popup takes the input away from the page
            if refused := refusal_of(page.page, point, page.scale):
                raise ActionError("native_popup", refused)
        if command.name in ("click", "double_click"):
            open_in_page(page.page, points[0])
        _perform(command, page, points)
        restore_closed(page.page)


def _perform(command: PageCommand, page: GuardedPage, points: Sequence[Point]) -> None:
    mouse, keyboard = page.page.mouse, page.page.keyboard
    match command.name:
        case "click":
            mouse.click(*points[0])
        case "double_click":
            mouse.dblclick(*points[0])
        case "right_click":
            mouse.click(*points[0], button="right")
        case "drag":
            mouse.move(*points[0])
            mouse.down()
            # in several steps: pages recognise a drag by the motion between
            mouse.move(*points[1], steps=DRAG_STEPS)
            mouse.up()
        case "long_press":
            mouse.move(*points[0])
            mouse.down()
            page.page.wait_for_timeout(LONG_PRESS_MS)
            mouse.up()
        case "press_home" | "press_back" | "open_app":
            if not page.page.evaluate(PHONE, [command.name, command.text]):
                raise ActionError("not_possible", f"The page does not react to {command.name}.")
        case "scroll" | "swipe":
            # the wheel acts on what is under the pointer
            mouse.move(*points[0])
            mouse.wheel(*command.scroll_px)
        case "type":
            keyboard.type(command.text)
        case "key":
            for key in command.text.split(" "):
                keyboard.press(key)
        case "wait" if command.seconds:
            page.page.wait_for_timeout(1000 * command.seconds)


def _at_point(name: str, left: dict[str, Any], viewpoint: Viewpoint) -> PageCommand:
    return PageCommand(name, (viewpoint.to_image(_point(name, left, "point", ("x", "y"))),))


def _drag(name: str, left: dict[str, Any], viewpoint: Viewpoint) -> PageCommand:
    start = _point(name, left, "start", ("x", "y"))
    end = _point(name, left, "end", ("to_x", "to_y"))
    return PageCommand(name, (viewpoint.to_image(start), viewpoint.to_image(end)))


def _scroll(name: str, left: dict[str, Any], viewpoint: Viewpoint) -> PageCommand:
    direction, unit = left.pop("direction", None), left.pop("unit", "pixels")
    if not isinstance(direction, str) or direction not in DIRECTIONS or unit not in ("pixels", "clicks"):
        raise _wrong(name)
    each = SCROLL_PX if unit == "clicks" else 1
    amount = left.pop("amount", SCROLL_PX / each)
    if not _is_number(amount) or not 0 < each * amount <= MAX_SCROLL_PX:
        most = f"1 to {MAX_SCROLL_PX} pixels, or 1 to {MAX_SCROLL_PX // SCROLL_PX} clicks of the wheel"
        raise ActionError("wrong_arguments", f"The amount of a scroll is {most}.")
    amount *= each
    width, height = viewpoint.image_wh
    point = (width / 2, height / 2)
    if left.keys() & {"x", "y", "point"}:
        point = viewpoint.to_image(_point(name, left, "point", ("x", "y")))
    right, down = DIRECTIONS[direction]
    return PageCommand(name, (point,), scroll_px=(right * amount, down * amount))


def _swipe(name: str, left: dict[str, Any], viewpoint: Viewpoint) -> PageCommand:
    """Read a move of the finger, which moves the content along: a scroll in the opposite direction."""
    direction = left.pop("direction", None)
    if not isinstance(direction, str) or direction not in DIRECTIONS or "unit" in left:
        raise _wrong(name)
    side = viewpoint.image_wh[DIRECTIONS[direction][0] == 0]
    moved = {"amount": min(side / viewpoint.scale / 2, MAX_SCROLL_PX)} | left | {"direction": OPPOSITE[direction]}
    left.clear()
    command = _scroll(name, moved, viewpoint)
    left.update(moved)
    return command


def _button(name: str, left: dict[str, Any], viewpoint: Viewpoint) -> PageCommand:
    return PageCommand(name)


def _open_app(name: str, left: dict[str, Any], viewpoint: Viewpoint) -> PageCommand:
    app = left.pop("app_name", None)
    if not isinstance(app, str) or not 0 < len(app) <= MAX_NAME_CHARS:
        raise _wrong(name)
    return PageCommand(name, text=app)


def _type(name: str, left: dict[str, Any], viewpoint: Viewpoint) -> PageCommand:
    text = left.pop("text", None)
    if not isinstance(text, str) or not 0 < len(text) <= MAX_TEXT_CHARS:
        raise ActionError("wrong_arguments", f"The text to type has 1 to {MAX_TEXT_CHARS} characters.")
    if not all(character.isprintable() or character in "\n\t" for character in text):
        raise ActionError("wrong_arguments", "The text to type has characters that no keyboard has.")
    return PageCommand(name, text=text)


def _key(name: str, left: dict[str, Any], viewpoint: Viewpoint) -> PageCommand:
    """Read keys joined by +, or by spaces as in ARPO's hotkeys; or a list of such keys, one after the other."""
    given = left.pop("key", None)
    if not isinstance(given, list):
        return PageCommand(name, text=_one_key(given))
    if not 1 <= len(given) <= MAX_KEYS:
        raise ActionError("wrong_arguments", f"A list of keys has 1 to {MAX_KEYS} of them.")
    return PageCommand(name, text=" ".join(map(_one_key, given)))


def _one_key(given: Any) -> str:
    """A key in playwright's names."""
    parts = given.replace("+", " ").split() if isinstance(given, str) and len(given) < 60 else []
    named = [MODIFIERS.get(part.lower(), "") for part in parts[:-1]]
    last = parts[-1] if parts else ""
    # a printed character stands for itself, a name for its key
    key = last if last in CHARACTERS else KEYS.get(last.lower().replace("_", ""), "")
    if not key or not all(named) or len(set(named)) < len(named):
        examples = (
            "a character, or Enter, Tab, Escape, Backspace, ArrowDown and the like, after Control+, Shift+ or Alt+"
        )
        raise ActionError("wrong_arguments", f"There is no key {str(given)[:40]!r}; a key is {examples}.")
    return "+".join([*named, key])


def _wait(name: str, left: dict[str, Any], viewpoint: Viewpoint) -> PageCommand:
    seconds = left.pop("seconds", 0.0)
    if not _is_number(seconds) or not 0 <= seconds <= MAX_WAIT_S:
        raise ActionError("wrong_arguments", f"The seconds of a wait are 0 to {MAX_WAIT_S}.")
    return PageCommand(name, seconds=float(seconds))


def _end(name: str, left: dict[str, Any], viewpoint: Viewpoint) -> PageCommand:
    answer = left.pop("answer", "")
    if not isinstance(answer, str | int | float) or len(str(answer)) > MAX_ANSWER_CHARS:
        raise ActionError("wrong_arguments", f"The answer is a text of at most {MAX_ANSWER_CHARS} characters.")
    return PageCommand(name, text=str(answer))


def _point(name: str, left: dict[str, Any], whole: str, parts: tuple[str, str]) -> Point:
    """Remove a point from the arguments, given as one pair or as two numbers."""
    pair = left.pop(whole) if whole in left else [left.pop(part, None) for part in parts]
    if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not all(map(_is_number, pair)):
        raise _wrong(name)
    return float(pair[0]), float(pair[1])


def _is_number(value: Any) -> bool:
    # NaN fails the comparison, infinities are above it
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e15


def _wrong(name: str) -> ActionError:
    summary = (ACTIONS | MOBILE_ACTIONS)[name].summary
    return ActionError("wrong_arguments", f"The action {name} needs other arguments. {summary}")


def _shown(point: Point) -> str:
    return f"({point[0]:g}, {point[1]:g})"


DIRECTIONS: dict[str, Point] = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}
OPPOSITE = {"up": "down", "down": "up", "left": "right", "right": "left"}
CHARACTERS = frozenset(string.ascii_letters + string.digits + "-=[];',./`\\")
MODIFIERS = {"ctrl": "Control", "control": "Control", "shift": "Shift", "alt": "Alt", "meta": "Meta", "cmd": "Meta"}
KEYS = {
    "enter": "Enter",
    "return": "Enter",
    "tab": "Tab",
    "esc": "Escape",
    "escape": "Escape",
    "backspace": "Backspace",
    "delete": "Delete",
    "del": "Delete",
    "space": "Space",
    "home": "Home",
    "end": "End",
    "pageup": "PageUp",
    "pagedown": "PageDown",
    **{f"{prefix}{side}": f"Arrow{side.title()}" for prefix in ("", "arrow") for side in DIRECTIONS},
}
"""Lower-case names to playwright's names."""

ACTIONS: dict[str, ActionKind] = {
    "click": ActionKind(_at_point, "click(x, y): press and release the left button."),
    "double_click": ActionKind(_at_point, "double_click(x, y): click twice."),
    "right_click": ActionKind(_at_point, "right_click(x, y): press and release the right button."),
    "drag": ActionKind(_drag, "drag(x, y, to_x, to_y): move with the left button held down."),
    "scroll": ActionKind(_scroll, "scroll(direction): up, down, left or right; optional amount in pixels, and x, y."),
    "type": ActionKind(_type, "type(text): type into what has the focus; \\n is Enter."),
    "key": ActionKind(_key, "key(key): press a key such as Enter, Tab or Control+a."),
    "wait": ActionKind(_wait, "wait(): do nothing."),
    "finish": ActionKind(_end, "finish(): the task is done."),
    "fail": ActionKind(_end, "fail(): the task cannot be done."),
}
"""Actions by name."""

MOBILE_ACTIONS: dict[str, ActionKind] = {
    **{name: kind for name, kind in ACTIONS.items() if name != "right_click"},
    "long_press": ActionKind(_at_point, "long_press(x, y): keep the finger on a point."),
    "swipe": ActionKind(_swipe, "swipe(direction): move the finger up, down, left or right; optional amount and x, y."),
    "open_app": ActionKind(_open_app, "open_app(app_name): open an app by its name."),
    "press_home": ActionKind(_button, "press_home(): go to the home screen."),
    "press_back": ActionKind(_button, "press_back(): go back."),
}
"""Actions of a phone by name."""
