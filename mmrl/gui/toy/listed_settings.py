"""Switches in tabs on a live page, which a language model reads as a numbered list of controls.

The agent answers with a number, and that control is clicked. All environments of a process are frames of one page, and
an action is one call into it, without a screenshot: milliseconds, so that a run takes minutes.
The reward is 1 where exactly the wanted switches were changed when it saved, and 0 before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

from mmrl.agents.environments.environment import ACTION_ERROR, SUCCESS, Action, Observation
from mmrl.errors import UserError
from mmrl.gui.browser.browser import Browser
from mmrl.gui.browser.frames import SharedFrame
from mmrl.gui.browser.page import Element, parse_elements, read_script
from mmrl.gui.toy.tasks import settings
from mmrl.gui.toy.tasks.case import Case, View
from mmrl.gui.toy.tasks.catalogue import Disturbances, expert_move, page_html

SIZE = 320, 240
MOST_CONTROLS = 8
"""Controls of a page with four tabs."""
READ = f"({read_script()})"
BEGIN = """([index, html, read]) => {
  const frame = document.querySelectorAll('iframe')[index].contentWindow;
  frame.document.open();
  frame.document.write(html);
  frame.document.close();
  frame.read = frame.eval(read);
  return JSON.stringify([frame.task.report(), frame.read()]);
}"""
ACT = """([index, point]) => {
  const frame = document.querySelectorAll('iframe')[index].contentWindow;
  if (point) frame.document.elementFromPoint(...point).click();
  return JSON.stringify([frame.task.tick(), frame.read()]);
}"""


class ListedSettings:
    """Settings in tabs, two switches in each.

    Args:
        wanted: switches to change.
        tabs: of the page, in the order of a random draw.
        max_steps: clicks after which the episode is truncated.
        browser: a running browser; None uses that of the process.

    Raises:
        UserError: a number is out of range.
    """

    def __init__(self, wanted: int = 1, tabs: int = 3, max_steps: int = 6, browser: Browser | None = None) -> None:
        if not 1 <= tabs <= len(settings.TABS):
            raise UserError(f"tabs is {tabs}; expected 1 to {len(settings.TABS)}")
        if not 1 <= wanted <= 2 * tabs:
            raise UserError(f"wanted is {wanted}; a page with {tabs} tabs supports 1 to {2 * tabs} switches")
        if max_steps < 1:
            raise UserError(f"max_steps is {max_steps}; must be at least 1")
        self._wanted, self._tabs, self._max_steps = wanted, tabs, max_steps
        self._frame = SharedFrame(SIZE, browser)
        self._case, self._steps = Case("", {}), 0
        self._elements: list[Element] = []
        self._report: dict[str, Any] = {}

    @property
    def actions(self) -> Mapping[str, str]:
        """The numbers of controls."""
        return {str(number + 1): f"click control {number + 1}" for number in range(MOST_CONTROLS)}

    def reset(self, task: Mapping[str, Any], seed: int) -> tuple[Observation, Mapping[str, Any]]:
        """Show the page of a seed; the first observation begins with the instruction."""
        if task:
            raise UserError(f"pages are drawn only from the seed, but the task has an entry {next(iter(task))!r}")
        self._case, self._steps = settings.make_switches(Random(f"switches/{seed}"), self._wanted, self._tabs - 1), 0
        self._call(BEGIN, page_html("settings", self._case, Disturbances().draw(seed)), READ)
        return Observation(f"{self._case.instruction}\n{self._listing()}"), self._facts()

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, Mapping[str, Any]]:
        """Click a control in the list; a number that is not in the list costs a step."""
        self._steps += 1
        index, shown = int(action.name) - 1 if action.name.isdecimal() else -1, self._shown()
        known = 0 <= index < len(shown) and not action.arguments
        self._call(ACT, list(shown[index].center) if known else None)
        success, ended = bool(self._report["success"]), bool(self._report["done"])
        facts = {**self._facts(), SUCCESS: success} | ({} if known else {ACTION_ERROR: "unknown_control"})
        text = self._listing() if known else f"There is no control {action.name[:20]!r}.\n{self._listing()}"
        return Observation(text), float(success), ended, not ended and self._steps >= self._max_steps, facts

    def expert(self) -> Action:
        """The number of the next control on the way to the goal."""
        view = View({element.key: element for element in self._shown()}, self._report)
        _, point = expert_move("settings", self._case, view)
        centers = [element.center for element in self._shown()]
        return Action(str(1 + centers.index((point["x"], point["y"]))))

    def close(self) -> None:
        """Forget the page; it closes with the browser, because other environments have frames in it."""
        self._frame.forget()

    def _facts(self) -> dict[str, Any]:
        """The listing identifies the state; the instruction and errors above it do not belong to it."""
        return {"anchor": self._listing()}

    def _shown(self) -> list[Element]:
        return [element for element in self._elements if element.visible]

    def _listing(self) -> str:
        return "\n".join(
            f"{number} {element.role} {element.name}"
            + ((" on" if element.checked else " off") if element.role == "checkbox" else "")
            for number, element in enumerate(self._shown(), start=1)
        )

    def _call(self, script: str, *arguments: Any) -> None:
        """Call a script in the frame of this environment, and read the task's report and the controls."""
        page, index = self._frame.place(renew=script == BEGIN)
        self._report, elements = json.loads(page.evaluate(script, [index, *arguments]))
        self._elements = parse_elements(elements)


def build_model(path: str | Path, **options: Any) -> Path:
    """Build a tiny random language model that reads the lists and writes a number in three tokens.

    Args:
        path: folder to write.
        options: of `build_tiny_generic`.
    """
    from mmrl.vlm.toy.tiny_generic import build_tiny_generic

    switches = [name for options in settings.TABS.values() for name, values in options.items() if not values]
    words = (
        *settings.TABS,
        *switches,
        " tab ",
        " checkbox ",
        " button ",
        "Save",
        "Reset",
        ", then save.",
        " on",
        " off",
    )
    corpus = ["Turn ", "turn ", "Click.", "There is no control ", *words]
    tokens = ("<action>", "</action>", "Turn ", ", turn ", *words)
    return build_tiny_generic(path, corpus=corpus, tokens=tokens, **options)
