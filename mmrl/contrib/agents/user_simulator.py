"""A dialogue with a simulated user, a function that may ask a model behind an endpoint.

    environment:
      factory: mmrl.contrib.agents.user_simulator:UserSimulator
      kwargs: {user: "my_user.py:answer", reward: "my_judge.py:score", turns: 5}
    actions: {format: text}

Both functions get `messages`, the turns so far as {"role": "user" or "assistant", "content": text}, `task`, the entries
of the task, and `seed`. `user` returns the next message, or None to end the dialogue, and is asked for the first one
unless the task has a `question`. `reward` returns the score of the dialogue so far, such as that of a reward model; a
turn earns what it adds to the score, so that the rewards of a dialogue add up to its last score.

Recipes that repeat dialogues, such as `refuel`, need a user that says the same to the same messages, task and seed:
pass the seed on to the endpoint, or sample greedily.

Source: the protocol of REFUEL, arXiv 2410.04612, setting one (Llama-3.1-70B-it as the user, 5 turns, ArmoRM);
ZhaolinGao/REFUEL setting_one/{generate,rank}.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmrl.agents.environments.environment import Action
from mmrl.errors import UserError
from mmrl.rewards.reward_loading import load_function


class UserSimulator:
    """One dialogue per episode.

    Args:
        user: `module:function` that returns the user's next message, or None at the end.
        reward: `module:function` that returns the score of a dialogue.
        turns: answers of the agent after which the dialogue ends.

    Raises:
        UserError: a function cannot be loaded, or turns is below 1.
    """

    def __init__(self, user: str, reward: str, turns: int = 5) -> None:
        if turns < 1:
            raise UserError(f"turns is {turns}; a dialogue needs at least 1")
        self._user = load_function(user, what="user")
        self._reward = load_function(reward, what="reward")
        self._turns = turns

    def reset(self, task: Mapping[str, Any], seed: int) -> str:
        """Start with the task's question, or with the user's first message."""
        self._about: dict[str, Any] = {"task": dict(task), "seed": seed}
        self._messages: list[dict[str, str]] = []
        self._score = 0.0
        first = task.get("question") or self._user(messages=[], **self._about)
        if not isinstance(first, str):
            raise UserError("user: the first message is None; a dialogue must start with a text")
        self._messages.append({"role": "user", "content": first})
        return first

    def step(self, action: Action) -> tuple[str, float, bool]:
        """Say something to the user."""
        said = str(action.arguments.get("text", action.name))
        self._messages.append({"role": "assistant", "content": said})
        score = float(self._reward(messages=list(self._messages), **self._about))
        earned, self._score = score - self._score, score
        over = len(self._messages) >= 2 * self._turns
        found = None if over else self._user(messages=list(self._messages), **self._about)
        if found is None:
            return "", earned, True
        self._messages.append({"role": "user", "content": str(found)})
        return str(found), earned, False

    def close(self) -> None:
        """Do nothing: there is nothing to free."""
