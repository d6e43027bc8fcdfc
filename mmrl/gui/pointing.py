"""Browser tasks for agents that answer as grounding models do: only with the point to click.

An instruction that asks for one click is then a grounding question, so that a grounding model can act as it is. The
format of the actions is `text`; an answer is `[{"label": "Save", "point_2d": [x, y]}]`, in the space of the
environment; the label is optional.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmrl.agents.action_readers import SAY
from mmrl.agents.actions import Action
from mmrl.agents.environment import Observation
from mmrl.errors import UserError
from mmrl.gui.answers import answer_text, parse_answer
from mmrl.gui.plain_settings import settings_from
from mmrl.gui.web_env import WebTaskAgentEnv, WebTaskEnv, WebTaskSettings


class PointingAgentEnv(WebTaskAgentEnv):
    """Tasks that clicks alone solve, such as those of the home screen; the first point of an answer is clicked."""

    @property
    def actions(self) -> Mapping[str, str]:
        """The one action."""
        return {SAY: 'a JSON list of points such as [{"point_2d": [x, y]}]; the first one is clicked.'}

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, Mapping[str, Any]]:
        """Click; an answer without a readable point is a click without arguments, which costs a step."""
        points = parse_answer(str(action.arguments.get("text", ""))).points
        return super().step(Action("click", {"point": list(points[0])} if points else {}))

    def expert(self) -> Action:
        """The next action of the task's expert, as an answer."""
        move = super().expert()
        if move.name == "wait":  # a click anywhere passes the time while a page loads
            return Action(SAY, {"text": answer_text([self.env.viewpoint.from_image((1, 1))], self.env.settings.space)})
        if move.name != "click":
            raise UserError(
                f"the expert wants to {move.name}, and answers of this environment are points to click; for this task "
                "use mmrl.gui.web_env:web_tasks"
            )
        point = (move.arguments["x"], move.arguments["y"])
        return Action(SAY, {"text": answer_text([point], self.env.settings.space, [self._name_of(point)])})

    def _name_of(self, point: tuple[float, float]) -> str:
        """The name of the clicked element, as in labelled answers of a grounding model."""
        names = {self.env.viewpoint.from_image(item.center): item for item in self.env.elements() if item.visible}
        return names[point].name if point in names else ""


def pointing_tasks(**settings: Any) -> PointingAgentEnv:
    """`web_tasks` with answers that are points: `environment.factory: mmrl.gui.pointing:pointing_tasks`."""
    return PointingAgentEnv(WebTaskEnv(settings_from(WebTaskSettings, settings)))
