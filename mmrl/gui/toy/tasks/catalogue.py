"""The tasks by name, their pages, and random disturbances."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from mmrl.errors import UserError
from mmrl.fields import bounded
from mmrl.gui.toy.tasks import checkout, launcher, login, mail, search, settings, todo
from mmrl.gui.toy.tasks.case import Case, Move, TaskKind, View, click

FOLDER = Path(__file__).parent
HORIZON = 100
"""Number of actions with disturbances."""
POPUPS = (
    ("Subscribe to our news?", "No thanks"),
    ("This site uses cookies.", "Decline"),
    ("Rate this page!", "Later"),
    ("A new version is out.", "Close"),
)


@dataclass(frozen=True)
class Disturbances:
    """Random events in an episode, drawn from its seed."""

    popup: float = bounded(0.0, at_least=0, at_most=1)
    """Probability per action that a pop-up covers the page until it is dismissed."""
    flip: float = bounded(0.0, at_least=0, at_most=1)
    """Probability per action that the layout is mirrored."""
    delay: float = bounded(0.0, at_least=0, at_most=1)
    """Probability per change of view that loading takes one to three actions."""

    def draw(self, seed: int) -> dict[str, Any]:
        """The events of an episode."""
        draw = Random(f"disturbance/{seed}")
        ticks = range(1, HORIZON)
        popups = [
            {"tick": tick, "x": draw.randint(2, 40), "y": draw.randint(5, 60), "text": text, "button": label}
            for tick in ticks
            for text, label in [draw.choice(POPUPS)]
            if draw.random() < self.popup
        ]
        flips = [tick for tick in ticks if draw.random() < self.flip]
        delays = [draw.randint(1, 3) if draw.random() < self.delay else 0 for _ in ticks]
        return {"popups": popups, "flips": flips, "delays": delays}


def make_case(name: str, seed: int, sub_goals: int = 2, distractors: int = 2) -> Case:
    """A case of a task."""
    if name not in TASKS:
        raise UserError(f"unknown task {name!r}; available: {', '.join(TASKS)}")
    most = TASKS[name].most_goals
    if not 1 <= sub_goals <= most:
        raise UserError(f"sub_goals is {sub_goals}; the task {name} supports 1 to {most}")
    if not 0 <= distractors <= MOST_DISTRACTORS:
        raise UserError(f"distractors is {distractors}; expected 0 to {MOST_DISTRACTORS}")
    return TASKS[name].make(Random(f"{name}/{seed}"), sub_goals, distractors)


def page_html(name: str, case: Case, disturbance: dict[str, Any]) -> str:
    """The page of a case."""
    data = json.dumps([dict(case.config), disturbance]).replace("<", "\\u003c")
    call = f"startTask({_file(f'{TASKS[name].page or name}.js')}, ...{data});"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><style>{_file("page.css")}</style></head><body>'
        f"<script>{_file('runtime.js')}</script><script>{call}</script></body></html>"
    )


def expert_move(name: str, case: Case, view: View) -> Move:
    """The expert's next move: dismiss a pop-up, wait while the page loads, else the task's own move."""
    if view.report["popup"]:
        return click(view, "dismiss")
    if view.report["loading"]:
        return "wait", {}
    return TASKS[name].expert(case, view)


@cache
def _file(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8").strip()


MOST_DISTRACTORS = 3
TASKS: dict[str, TaskKind] = {
    "login": TaskKind(login.make, login.expert, 3, "Fill in a form and log in."),
    "search": TaskKind(search.make, search.expert, 3, "Find entries over pages of results and choose them."),
    "todo": TaskKind(todo.make, todo.expert, 4, "Add, tick off and delete entries of a list."),
    "settings": TaskKind(settings.make, settings.expert, 3, "Change options in tabs, leave the others, save."),
    "mail": TaskKind(mail.make, mail.expert, 4, "Open mails; archive, delete or star them."),
    "checkout": TaskKind(checkout.make, checkout.expert, 4, "Go through cart, delivery and payment."),
    "launcher": TaskKind(launcher.make_named, launcher.expert, 3, "Open apps by name, in order."),
    "wishes": TaskKind(launcher.make_wished, launcher.expert, 3, "Open apps by what they are for.", "launcher"),
}
"""Tasks by name."""
