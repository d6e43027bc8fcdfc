"""The built-in tasks as Gymnasium and agent environments; importing this module registers them.

env = WebTaskEnv(WebTaskSettings(tasks=("login",)))  # or gymnasium.make("mmrl.gui.toy.web_env:mmrl/WebLogin-v0")
observation, info = env.reset(seed=0, options={"task": {"name": "login", "seed": 3, "sub_goals": 1}})
observation, reward, terminated, truncated, info = env.step({"name": "click", "arguments": {"x": 100, "y": 50}})
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

from mmrl.agents.environments.action_formats import SAY
from mmrl.agents.environments.environment import Action, Observation
from mmrl.errors import UserError
from mmrl.fields import bounded, check_fields
from mmrl.gui.browser.browser import Browser
from mmrl.gui.browser.page import GuardedPage
from mmrl.gui.browser.page_env import (
    PageEnv,
    PageEnvSettings,
    PageVerdict,
    WebAgentEnv,
    register_environments,
    settings_from,
)
from mmrl.gui.grounding.answers import answer_text, parse_answer
from mmrl.gui.toy.tasks.case import Case, View
from mmrl.gui.toy.tasks.catalogue import TASKS, Disturbances, expert_move, make_case, page_html

TASK_FIELDS = ("name", "seed", "sub_goals", "distractors")
TICK = """async () => {
  const frames = () => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
  await frames();
  const report = window.task.tick();
  await frames();
  return report;
}"""


@dataclass(frozen=True)
class WebTaskSettings(PageEnvSettings):
    """Choice of tasks, their difficulty, and random disturbances."""

    tasks: tuple[str, ...] = tuple(TASKS)
    """Tasks to draw from if a reset does not name one; see `mmrl.gui.toy.tasks.catalogue.TASKS`."""
    sub_goals: int = bounded(2, at_least=1)
    """Number of sub-goals, unless the task sets it; at most as many as the task has."""
    distractors: int = bounded(2, at_least=0, at_most=3)
    """Number of similar-looking distractors, unless the task sets it."""
    disturbances: Disturbances = field(default_factory=Disturbances)
    """Pop-ups, mirrored layouts and slow loading, drawn from the seed of each episode."""

    def validate(self) -> None:
        """Check the names of the tasks and the probabilities; raises UserError."""
        super().validate()
        unknown = [name for name in self.tasks if name not in TASKS]
        if unknown or not self.tasks:
            raise UserError(f"unknown task {(unknown or [''])[0]!r}; available: {', '.join(TASKS)}")
        check_fields(self.disturbances, "environment.disturbances")


class WebTaskEnv(PageEnv):
    """The built-in tasks.

    A task is {"name", "seed", "sub_goals", "distractors"}; missing entries come from the settings, and the seed of the
    case from the seed of the episode. Episodes of one task and several seeds differ by their disturbances only.
    """

    settings: WebTaskSettings

    def __init__(self, settings: WebTaskSettings | None = None, browser: Browser | None = None) -> None:
        super().__init__(settings or WebTaskSettings(), browser)
        self._name = ""
        self._case = Case("", {})
        self._report: dict[str, Any] = {}

    def expert_action(self) -> Action:
        """The next action of the task's expert, points in the agent's coordinate space."""
        elements = {element.key: element for element in self.elements() if element.key and element.visible}
        name, arguments = expert_move(self._name, self._case, View(elements, self._report))
        if name == "click":
            x, y = self.viewpoint.from_image((arguments["x"], arguments["y"]))
            arguments = {"x": x, "y": y}
        return Action(name, arguments)

    def make_task(self, options: Mapping[str, Any], seed: int) -> dict[str, Any]:
        unknown = [str(key) for key in options if key not in TASK_FIELDS]
        if unknown:
            raise UserError(f"a task has no entry {unknown[0]!r}; it may have {', '.join(TASK_FIELDS)}")
        name = options.get("name") or Random(f"task/{seed}").choice(self.settings.tasks)
        most = TASKS[name].most_goals if name in TASKS else self.settings.sub_goals
        task = {"seed": seed, "sub_goals": min(self.settings.sub_goals, most), "distractors": self.settings.distractors}
        return {**task, **options, "name": name}

    def begin(self, page: GuardedPage, task: Mapping[str, Any], seed: int) -> str:
        self._name, self._case = task["name"], make_case(**task)
        page.load_html(page_html(self._name, self._case, self.settings.disturbances.draw(seed)))
        self._report = page.evaluate("() => window.task.report()")
        return self._case.instruction

    def verdict(self, page: GuardedPage) -> PageVerdict:
        self._report = report = page.evaluate(TICK)
        share = report["progress"] if self.settings.partial_credit and report["unharmed"] else 0.0
        info = {name: report[name] for name in ("progress", "popup", "loading", "mirrored")}
        return PageVerdict(1.0 if report["success"] else share, report["success"], report["done"], info)


class WebTaskAgentEnv(WebAgentEnv):
    """The built-in tasks as an environment of agents, with an expert."""

    env: WebTaskEnv

    def expert(self) -> Action:
        """The next action of the task's expert."""
        return self.env.expert_action()


def web_tasks(**settings: Any) -> WebTaskAgentEnv:
    """The built-in tasks for agents: `environment.factory: mmrl.gui.toy.web_env:web_tasks`."""
    return WebTaskAgentEnv(WebTaskEnv(settings_from(WebTaskSettings, settings)))


def make_web(render_mode: str | None = None, **settings: Any) -> WebTaskEnv:
    """A `WebTaskEnv` for `gymnasium.make`; arguments are fields of `WebTaskSettings` as plain data."""
    return WebTaskEnv(settings_from(WebTaskSettings, settings, "gymnasium.make"))


ENVIRONMENT_IDS: dict[str, dict[str, Any]] = {
    "mmrl/WebTasks-v0": {},
    **{f"mmrl/Web{name.title()}-v0": {"tasks": [name]} for name in TASKS},
}
"""Id to keyword arguments of `make_web`."""

register_environments("mmrl.gui.toy.web_env:make_web", ENVIRONMENT_IDS)


class PointingAgentEnv(WebTaskAgentEnv):
    """Tasks that can be solved only by clicks, such as the home screen's; the first point of a response is clicked."""

    @property
    def actions(self) -> Mapping[str, str]:
        """The one action."""
        return {SAY: 'a JSON list of points such as [{"point_2d": [x, y]}]; the first one is clicked.'}

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, Mapping[str, Any]]:
        """Click; a response without a readable point is a click without arguments, which costs a step."""
        points = parse_answer(str(action.arguments.get("text", ""))).points
        return super().step(Action("click", {"point": list(points[0])} if points else {}))

    def expert(self) -> Action:
        """The next action of the task's expert, as an answer."""
        move = super().expert()
        if move.name == "wait":  # a click anywhere passes the time while a page loads
            return Action(SAY, {"text": answer_text([self.env.viewpoint.from_image((1, 1))], self.env.settings.space)})
        if move.name != "click":
            raise UserError(
                f"the expert's next action is {move.name}, but responses in this environment are points to click; for "
                "this task use mmrl.gui.toy.web_env:web_tasks"
            )
        point = (move.arguments["x"], move.arguments["y"])
        return Action(SAY, {"text": answer_text([point], self.env.settings.space, [self._name_of(point)])})

    def _name_of(self, point: tuple[float, float]) -> str:
        """The name of the clicked element, as in labelled answers of a grounding model."""
        names = {self.env.viewpoint.from_image(item.center): item for item in self.env.elements() if item.visible}
        return names[point].name if point in names else ""


def pointing_tasks(**settings: Any) -> PointingAgentEnv:
    """`web_tasks` with points as responses: `environment.factory: mmrl.gui.toy.web_env:pointing_tasks`."""
    return PointingAgentEnv(WebTaskEnv(settings_from(WebTaskSettings, settings)))
