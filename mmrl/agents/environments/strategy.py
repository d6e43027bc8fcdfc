"""Episodes in which the agent picks a strategy and a frozen actor carries it out: dialogue strategies (EPO).

    environment:
      factory: mmrl.agents.environments.strategy:StrategyEnvironment
      kwargs: {environment: "my_dialogue.py:Dialogue", actor: "my_actor.py:reply", judge: "my_judge.py:is_critical"}
    actions: {format: text}
    objective: {preset: explicit_strategy}

In each turn the policy writes a strategy, the actor turns it into an action of the environment, and the judge may
reward it: the process reward of critical turns. The environment's own reward, usually at the end, comes on top. Actor
and judge are functions of yours, which may ask models behind an endpoint (`mmrl.hub.chat_endpoint.ask_chat`), also as
the partner of the dialogue in self-play.

Source: EPO, arXiv 2502.12486; lxqpku/EPO. There a judge reads whole dialogues afterwards and marks the turns that were
critical; here it is asked in each turn, about what was seen, said and answered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmrl.agents.environments.action_formats import SAY
from mmrl.agents.environments.environment import Action, as_outcome, as_start
from mmrl.rewards.reward_loading import load_function


class StrategyEnvironment:
    """An environment whose actions are strategies.

    Args:
        environment: `module:function` or class that makes the environment in which the actor acts.
        actor: `module:function` (text of the observation, strategy) that returns the action: a text, or an `Action`.
        judge: `module:function` (text before, strategy, text after) that returns the process reward of a turn; none
            without.
        options: keyword arguments of the environment.

    Raises:
        UserError: one of them cannot be loaded.
    """

    def __init__(
        self, environment: str, actor: str, judge: str | None = None, options: Mapping[str, Any] | None = None
    ) -> None:
        self._env = load_function(environment, what="environment")(**(options or {}))
        self._actor = load_function(actor, what="actor")
        self._judge = None if judge is None else load_function(judge, what="judge")
        self._seen = ""

    def reset(self, task: Mapping[str, Any], seed: int) -> Any:
        """Start an episode."""
        observation, info = as_start(self._env.reset(task, seed))
        self._seen = observation.text
        return observation, info

    def step(self, action: Action) -> Any:
        """Have the actor follow a strategy."""
        strategy = str(action.arguments.get("text", action.name))
        chosen = self._actor(self._seen, strategy)
        own = chosen if isinstance(chosen, Action) else Action(SAY, {"text": str(chosen)}, str(chosen))
        found = as_outcome(self._env.step(own))
        earned = 0.0 if self._judge is None else float(self._judge(self._seen, strategy, found.observation.text))
        self._seen = found.observation.text
        return found.observation, found.reward + earned, found.terminated, found.truncated, found.info

    def close(self) -> None:
        """Close the environment."""
        self._env.close()
