"""Pages of MiniWoB++ that a language model reads as a numbered list and acts on by writing a number.

A line is something to do: click a control, type a text that the instruction quotes, choose an option, or scroll. Lines
whose text the instruction contains begin with a star. So an agent clicks and types with texts of the instruction, as in
workflow-guided exploration, and needs no pixels. All environments of a process are frames of one page, without
screenshots. Clicks are the events of the package's own `core.elementClick`, preceded by those of the pointer.

The reward is 1 where the page gives its full raw reward, and 0 otherwise: with the pages' own -1 for a wrong click an
agent learns to do nothing. `raw_reward` in `info` has the page's own. Autocompletion does not wait for the clock.

Source: actions: arXiv 1802.08802; pages: Farama-Foundation/miniwob-plusplus miniwob/html/core/core.js.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import Any

from mmrl.agents.environments.environment import ACTION_ERROR, SUCCESS, Action, Observation
from mmrl.errors import UserError
from mmrl.gui.browser.browser import Browser, BrowserFailure
from mmrl.gui.browser.frames import SharedFrame
from mmrl.gui.browser.miniwob import FULL_REWARD, TASK_FIELDS, page_file
from mmrl.gui.browser.page import read_script

TASKS = (
    "click-link",
    "click-button-sequence",
    "click-tab-2",
    "click-collapsible-2",
    "click-checkboxes",
    "click-option",
    "login-user",
    "use-autocomplete",
    "choose-list",
    "scroll-text-2",
)
"""Pages with an expert: links, an order of clicks, tabs, sections, boxes, radio buttons, typing, completion, lists,
scrolling."""
SIZE = 160, 210
MOST_LINES = 20
KNOWN = "name => name in (window.sources ??= {})"
KEEP = "([name, html]) => { window.sources[name] = html; }"
BEGIN = """async ([index, name, seed, read]) => {
  const frame = document.querySelectorAll('iframe')[index];
  await new Promise(done => { frame.onload = done; frame.srcdoc = window.sources[name]; });
  const page = frame.contentWindow, core = page.core;
  page.Math.seedrandom(seed);
  core.setDataMode('train');
  core.EPISODE_MAX_TIME = 1e9;  // above 2^31 ms the timer would fire at once
  if (page.jQuery) page.jQuery.fx.off = true;
  if (page.jQuery && page.jQuery.ui && page.jQuery.ui.autocomplete) {
    page.jQuery.ui.autocomplete.prototype.options.delay = 0;
  }
  core.startEpisodeReal();
  for (let turn = 0; !page.WOB_TASK_READY && turn < 200; turn += 1) await new Promise(done => setTimeout(done, 25));
  page.readLines = page.eval(`(${read})`);
  const said = core.getUtterance();
  return JSON.stringify({ ...page.readLines(), ready: page.WOB_TASK_READY,
    instruction: typeof said === 'string' ? said : said.utterance });
}"""
ACT = """async ([index, line]) => {
  const page = document.querySelectorAll('iframe')[index].contentWindow;
  if (line !== null) page.actOn(line);
  await new Promise(done => setTimeout(done));  // handlers without delay
  return JSON.stringify(page.readLines());
}"""
LINES = """() => {
  const READ = %s;
  const at = control => {
    const [x1, y1, x2, y2] = control.box;
    return document.elementFromPoint((x1 + x2) / 2, (y1 + y2) / 2);
  };
  const press = element => {
    const types = ['mouseover', 'mousemove', 'mousedown', 'mouseup'];
    const mouse = type => new MouseEvent(type, { bubbles: true, cancelable: true, view: window });
    for (const type of types) element.dispatchEvent(mouse(type));
    if (element.focus) element.focus();
    if (element.click) element.click();
    else element.dispatchEvent(mouse('click'));
  };
  const enter = (element, text) => {
    element.focus();
    element.dispatchEvent(new KeyboardEvent('keydown', { key: text.slice(-1), bubbles: true }));
    element.value = text;
    for (const type of ['input', 'keyup', 'change']) element.dispatchEvent(new Event(type, { bubbles: true }));
  };
  const choose = (element, number) => {
    const option = element.options[number];
    option.selected = element.multiple ? !option.selected : true;
    for (const type of ['input', 'change']) element.dispatchEvent(new Event(type, { bubbles: true }));
  };
  const scroll = (element, way) => {
    element.scrollTop += way * element.clientHeight;
    element.dispatchEvent(new Event('scroll'));
  };
  window.actOn = line => window.doings[line.number](line.text);
  window.doings = [];
  const lines = [];
  const add = (line, action) => { lines.push({ ...line, number: window.doings.length }); window.doings.push(action); };
  const texts = control => control.role === 'textbox' && !control.disabled;
  for (const control of JSON.parse(READ()).filter(control => !control.hidden && control.role !== 'presentation')) {
    const element = at(control), whole = element && (element.closest('select, textarea, input') || element);
    if (!whole) continue;
    if (whole.localName === 'select') {
      [...whole.options].forEach((option, number) => add({ act: 'choose', name: option.text, on: option.selected,
        value: '' }, () => choose(whole, number)));
      continue;
    }
    const long = whole.localName === 'textarea' && whole.scrollHeight > whole.clientHeight + 1;
    if (long) {
      const left = whole.scrollHeight - whole.clientHeight - whole.scrollTop;
      if (left > 1) add({ act: 'scroll', name: 'down', on: null, value: '' }, () => scroll(whole, 1));
      if (whole.scrollTop > 1) add({ act: 'scroll', name: 'up', on: null, value: '' }, () => scroll(whole, -1));
      continue;
    }
    if (texts(control)) {
      add({ act: 'type', name: control.name, on: null, value: whole.value }, text => enter(whole, text));
      continue;
    }
    const ticked = ['checkbox', 'radio'].includes(control.role) ? Boolean(control.checked) : null;
    add({ act: control.role, name: control.name || control.text || control.value, on: ticked, value: '' },
      () => press(whole));
  }
  return { lines, done: window.WOB_DONE_GLOBAL, reward: window.WOB_RAW_REWARD_GLOBAL };
}"""
SCRIPT = re.compile(r'<script[^>]*\bsrc="([^"]+)"[^>]*>\s*</script>')
STYLE = re.compile(r'<link[^>]*\bhref="([^"]+)"[^>]*>')
QUOTED = re.compile(r'"([^"]+)"')
WORDS = re.compile(r"\w+")


@dataclass(frozen=True)
class Line:
    """Something to do on a page."""

    number: int
    """Its index among the page's controls, which several lines may share."""
    act: str
    """type, choose, scroll, or the role of the control that is clicked."""
    name: str
    on: bool | None
    """Whether it is ticked or chosen; None if it cannot be either."""
    value: str
    """Current text of a field."""
    text: str = ""
    """Text that is typed."""
    field: int = 0
    """Number of the field to type into, from 1."""

    def shown(self, instruction: str) -> str:
        """The line without its number, starred if the instruction contains its text."""
        about = self.text or self.name
        star = "*" if about and _contains(instruction, about) else ""
        mark = "" if self.on is None else " on" if self.on else " off"
        field = f" into {self.field} {self.name} = {self.value}".rstrip() if self.act == "type" else ""
        return f"{star}{self.act} {about}{field}{mark}"


class ListedMiniWob:
    """Pages of MiniWoB++ as numbered lists of possible actions; a task is {"name", "seed"}, else drawn from the seed.

    Args:
        tasks: pages that a reset without a name draws from.
        max_steps: actions after which the episode is truncated.
        browser: a running browser; None uses that of the process.

    Raises:
        UserError: there is no such page, or a number is out of range.
    """

    def __init__(self, tasks: Sequence[str] = TASKS, max_steps: int = 8, browser: Browser | None = None) -> None:
        if not tasks:
            raise UserError("tasks is empty; list MiniWoB++ pages, or remove it")
        for name in tasks:
            page_file(name)
        if max_steps < 1:
            raise UserError(f"max_steps is {max_steps}; must be at least 1")
        self._tasks, self._max_steps = tuple(tasks), max_steps
        self._frame = SharedFrame(SIZE, browser)
        self._name = self._instruction = ""
        self._steps = 0
        self._lines: list[Line] = []
        self._seen: set[str] = set()
        """Names of the controls that were clicked in this episode, for the expert."""
        self._report: dict[str, Any] = {}

    @property
    def actions(self) -> Mapping[str, str]:
        """The numbers of lines."""
        return {str(number): f"line {number}" for number in range(1, MOST_LINES + 1)}

    def reset(self, task: Mapping[str, Any], seed: int) -> tuple[Observation, Mapping[str, Any]]:
        """Show a page; the first observation begins with the instruction."""
        unknown = [str(key) for key in task if key not in TASK_FIELDS]
        if unknown:
            raise UserError(f"a task has no entry {unknown[0]!r}; it may have {', '.join(TASK_FIELDS)}")
        self._name = str(task.get("name") or Random(f"task/{seed}").choice(self._tasks))
        self._steps, self._seen = 0, set()
        self._call(BEGIN, self._name, str(task.get("seed", seed)), _read())
        if not self._report["ready"]:
            raise BrowserFailure(f"the page {self._name} was not ready within 5 seconds")
        self._instruction = str(self._report["instruction"])
        self._list()
        return Observation(f"{self._instruction}\n{self._listing()}"), self._facts()

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, Mapping[str, Any]]:
        """Execute a line; a number that is not in the list costs a step."""
        self._steps += 1
        index = int(action.name) - 1 if action.name.isdecimal() else -1
        known = 0 <= index < len(self._lines) and not action.arguments
        chosen = self._lines[index] if known else None
        self._seen |= {chosen.name} if chosen else set()
        self._call(ACT, {"number": chosen.number, "text": chosen.text} if chosen else None)
        self._list()
        ended, raw = bool(self._report["done"]), float(self._report["reward"])
        success = ended and raw >= FULL_REWARD
        facts = {**self._facts(), SUCCESS: success, "raw_reward": raw} | (
            {} if known else {ACTION_ERROR: "unknown_line"}
        )
        text = self._listing() if known else f"There is no line {action.name[:20]!r}.\n{self._listing()}"
        return Observation(text), float(success), ended, not ended and self._steps >= self._max_steps, facts

    def expert(self) -> Action:
        """The number of the line that solves the page's next step; raises UserError for pages without an expert."""
        if self._name not in EXPERTS:
            raise UserError(f"the page {self._name} has no expert; these have: {', '.join(EXPERTS)}")
        wanted = EXPERTS[self._name](self._instruction, self._lines, self._seen)
        return Action(str(1 + self._lines.index(wanted)))

    def close(self) -> None:
        """Forget the page; it closes with the browser, because other environments have frames in it."""
        self._frame.forget()

    def _facts(self) -> dict[str, Any]:
        """The listing with its page identifies the state."""
        return {"anchor": f"{self._name}\n{self._listing()}", "task": {"name": self._name}}

    def _list(self) -> None:
        """Read the lines of the report: a field has one for each text that the instruction quotes."""
        found = [Line(**line) for line in self._report["lines"]]
        quoted = list(dict.fromkeys(QUOTED.findall(self._instruction)))
        fields = [line.number for line in found if line.act == "type"]
        self._lines = []
        for line in found:
            if line.act == "type":
                place = 1 + fields.index(line.number)
                self._lines += [replace(line, text=text, field=place) for text in quoted]
            else:
                self._lines.append(line)
        del self._lines[MOST_LINES:]

    def _listing(self) -> str:
        return "\n".join(
            f"{number} {line.shown(self._instruction)}" for number, line in enumerate(self._lines, start=1)
        )

    def _call(self, script: str, *arguments: Any) -> None:
        """Call a script in the frame of this environment, and read its report."""
        page, index = self._frame.place(renew=script == BEGIN)
        if script == BEGIN and not page.evaluate(KNOWN, self._name):  # half a megabyte, sent once
            page.evaluate(KEEP, [self._name, _whole_page(self._name)])
        self._report = json.loads(page.evaluate(script, [index, *arguments]))
        page.take_events()  # pictures are not loaded


def _contains(instruction: str, text: str) -> bool:
    """Whether an instruction has all words of a text, in their order."""
    words, wanted = WORDS.findall(instruction.lower()), WORDS.findall(text.lower())
    return bool(wanted) and any(words[at : at + len(wanted)] == wanted for at in range(len(words)))


@cache
def _read() -> str:
    return LINES % f"({read_script()})"


@cache
def _whole_page(name: str) -> str:
    """A page with its scripts and styles inside, so that a frame needs no file."""
    path = page_file(name)

    def script(found: re.Match[str]) -> str:
        content = (path.parent / found[1]).read_text(encoding="utf-8")
        return "<script>" + content.replace("</script", "<\\/script") + "</script>"

    def style(found: re.Match[str]) -> str:
        # without pictures, which a frame without an address cannot load
        content = (path.parent / found[1]).read_text(encoding="utf-8")
        return "<style>" + re.sub(r"url\([^)]*\)", "none", content) + "</style>"

    html = re.sub(SCRIPT, script, path.read_text(encoding="utf-8"))
    # links to places of the page itself are told by their address
    return re.sub(r"<head>", '<head><base href="about:srcdoc">', re.sub(STYLE, style, html), count=1)


def _named(lines: Sequence[Line], name: str) -> Line | None:
    return next((line for line in lines if line.name.lower() == name.lower() and line.act != "type"), None)


def _button(lines: Sequence[Line]) -> Line:
    return next(line for line in lines if line.act == "button")


def _open_until_seen(instruction: str, lines: Sequence[Line], seen: set[str]) -> Line:
    """The quoted link, or the next tab or section that was not opened."""
    link = _named([line for line in lines if line.act != "tab"], QUOTED.findall(instruction)[-1])
    tabs = [line for line in lines if line.act == "tab"]
    return link or next((line for line in tabs if line.name not in seen), tabs[0])


def _in_order(instruction: str, lines: Sequence[Line], seen: set[str]) -> Line:
    wanted = [line for name in ("ONE", "TWO") if name not in seen for line in lines if line.name == name]
    return (wanted or list(lines))[0]  # a button may cover the other


def _tick(instruction: str, lines: Sequence[Line], seen: set[str]) -> Line:
    """Tick or choose what the instruction lists, then submit."""
    names = re.sub(r"^Select (.*?)(?: from the list)? and click Submit\.$", r"\1", instruction).split(", ")
    open_ones = [line for line in lines if line.on is False and line.name in names]
    return open_ones[0] if open_ones else _button(lines)


def _fill(instruction: str, lines: Sequence[Line], seen: set[str]) -> Line:
    """The first quoted text into the first field, the second into the second, then the button."""
    fields = list(dict.fromkeys(line.number for line in lines if line.act == "type"))
    for field, text in zip(fields, QUOTED.findall(instruction), strict=False):
        wanted = next(line for line in lines if line.number == field and line.text == text)
        if wanted.value != text:
            return wanted
    return _button(lines)


def _complete(instruction: str, lines: Sequence[Line], seen: set[str]) -> Line:
    """The beginning into the field, then the item with the quoted ends, then the button."""
    begin, *rest = QUOTED.findall(instruction)
    end = rest[0] if rest else ""
    field = next(line for line in lines if line.act == "type" and line.text == begin)
    if field.value.startswith(begin) and field.value.endswith(end) and len(field.value) > len(begin):
        return _button(lines)
    items = [line for line in lines if line.act not in ("type", "button")]
    fitting = [line for line in items if line.name.startswith(begin) and line.name.endswith(end)]
    return fitting[0] if fitting else field


def _scroll(instruction: str, lines: Sequence[Line], seen: set[str]) -> Line:
    way = "down" if "bottom" in instruction else "up"
    return next((line for line in lines if line.act == "scroll" and line.name == way), _button(lines))


def _quoted(instruction: str, lines: Sequence[Line], seen: set[str]) -> Line:
    wanted = _named(lines, QUOTED.findall(instruction)[0])
    return wanted or lines[0]


EXPERTS = {
    "click-link": _quoted,
    "click-button-sequence": _in_order,
    "click-tab-2": _open_until_seen,
    "click-collapsible-2": _open_until_seen,
    "click-checkboxes": _tick,
    "click-option": _tick,
    "login-user": _fill,
    "use-autocomplete": _complete,
    "choose-list": _tick,
    "scroll-text-2": _scroll,
}
