"""The worker's side of `PoolVectorEnv`: a few environments whose actions and observations are in shared memory.

An empty request is a step of all of them; its answer is empty too unless an environment has something in `info`. A
worker loads this file and those that it names by their paths, on Python 3.8 and numpy; gymnasium comes with the
environments.
"""

from __future__ import annotations

import copy
import importlib.util
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import ModuleType

    from mmrl.workers import loading, wire
    from mmrl.workers.vector import board


def _load_file(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, str(path))
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


if not TYPE_CHECKING:
    HERE = Path(__file__).resolve().parent
    loading = _load_file(HERE.parent / "loading.py", "mmrl_loading")
    # One module for both: an exception of a second copy would be another class.
    wire = sys.modules.get("mmrl_wire") or _load_file(HERE.parent / "wire.py", "mmrl_wire")  # a worker has it
    board = _load_file(HERE / "board.py", "mmrl_board")


class InfoError(Exception):
    """Something in `info` that cannot be sent; the message identifies it."""

    for_user = True


class VectorService:
    """Environments in some rows of a board; requests are describe, reset, render, call, set, or empty for a step."""

    def __init__(self) -> None:
        self._envs: list[Any] = []
        self._over = np.zeros(0, bool)
        self._first = 0
        self._mode = ""
        self._board: Any = None
        self._observation: dict[str, Any] = {}
        self._action: dict[str, Any] = {}

    def hello(self) -> dict[str, Any]:
        """Start empty: the first request defines the environments."""
        return {}

    def answer(
        self, fields: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
    ) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Process a request; its content and the reply are encoded with `mmrl.workers.wire`."""
        # The actions are in the shared memory already.
        if not fields:
            return self._report([self._step(place) for place in range(len(self._envs))])
        content = wire.decode(fields["content"], arrays)
        # Every request but a step says how to make them: this process may have taken the place of another.
        if not self._envs:
            self._make(content["make"])
        kind = fields["kind"]
        if kind == "reset":
            return self._report(self._reset(content))
        found = {"describe": self._describe, "render": self._render, "call": self._call, "set": self._set}[kind](
            content
        )
        tree, parts = wire.encode(found)
        return {"content": tree}, parts

    def close(self) -> None:
        """Close the environments."""
        for env in self._envs:
            env.close()

    def _make(self, made: Mapping[str, Any]) -> None:
        function = loading.find_function(made["factory"], what="the factory")
        # Made once for the life of the process; a reset begins a new episode in them.
        for kwargs in made["kwargs"]:
            loading.check_arguments(f"options of {made['factory']}", function, kwargs)
            self._envs.append(function(**kwargs))
        self._first = int(made["first"])
        self._mode = made["mode"]
        self._over = np.zeros(len(self._envs), bool)
        first = self._envs[0]
        self._observation = board.describe(first.observation_space, "observation")
        self._action = board.describe(first.action_space, "action")

    def _describe(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Spaces of every environment here, and the metadata of the first one."""
        first = self._envs[0]
        # Only what can be sent: metadata may hold functions or classes.
        metadata = {key: value for key, value in dict(first.metadata or {}).items() if _can_be_sent(value)}
        return {
            "observation": [board.describe(env.observation_space, "observation") for env in self._envs],
            "action": [board.describe(env.action_space, "action") for env in self._envs],
            "metadata": metadata,
            "render_mode": getattr(first, "render_mode", None),
            "id": getattr(getattr(first, "spec", None), "id", None),
        }

    def _reset(self, content: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Start episodes; `places` has the indices of the environments here, `seeds` a seed for each."""
        # Known with the first reset: its size follows from the spaces that `describe` reported.
        if self._board is None:
            self._board = board.Board.open(content["path"], content["layout"])
        infos: list[dict[str, Any]] = [{} for _ in self._envs]
        for place, seed in zip(content["places"], content["seeds"]):  # noqa: B905 - Python 3.8
            # As the caller gave it: None draws new randomness, as in Gymnasium.
            observation, infos[place] = self._envs[place].reset(seed=seed, options=content["options"])
            self._show("observation", place, observation)
            self._over[place] = False
        return infos

    def _step(self, place: int) -> dict[str, Any]:
        """Step one environment, or begin its next episode; returns its info."""
        arrays, row, env = self._board.arrays, self._first + place, self._envs[place]
        arrays["failed"][row] = False
        # Gymnasium: the action of this step is ignored.
        if self._over[place] and self._mode == "NextStep":
            observation, info = env.reset()
            # Gymnasium: a step that begins an episode has the reward 0.
            reward, terminated, truncated = 0.0, False, False
        else:
            observation, reward, terminated, truncated, info = env.step(self._action_of(row))
        self._show("observation", place, observation)
        # The environment itself still works, so that its process stays and only the episode has failed.
        problem = f"the reward is {reward}" if not math.isfinite(reward) else ""
        problem = problem or board.problem_in(self._observation, arrays, "observation", row)
        if problem:
            arrays["failed"][row], terminated, truncated = True, False, True
            info = {**info, "failed": True, "failure": f"diverged: {problem}"}
        arrays["reward"][row], arrays["terminated"][row], arrays["truncated"][row] = reward, terminated, truncated
        self._over[place] = terminated or truncated
        if self._over[place] and self._mode == "SameStep":
            self._show("final", place, observation)
            last = copy.deepcopy(info)  # some environments keep one dictionary, which reset fills again
            observation, after = env.reset()
            self._show("observation", place, observation)
            info = {"final_info": last, **after}
        return info

    def _action_of(self, row: int) -> Any:
        return board.read(self._action, self._board.arrays, "action", row)

    def _show(self, name: str, place: int, observation: Any) -> None:
        board.write(self._observation, self._board.arrays, name, self._first + place, observation)

    def _render(self, content: Mapping[str, Any]) -> list[Any]:
        return [env.render() for env in self._envs]

    def _call(self, content: Mapping[str, Any]) -> list[Any]:
        found = []
        for env in self._envs:
            # Through the wrappers: the attribute may be the innermost environment's.
            attribute = env.get_wrapper_attr(content["name"])
            found.append(attribute(*content["args"], **content["kwargs"]) if callable(attribute) else attribute)
        return found

    def _set(self, content: Mapping[str, Any]) -> None:
        for env, value in zip(self._envs, content["values"]):  # noqa: B905 - Python 3.8
            env.set_wrapper_attr(content["name"], value)

    def _report(self, infos: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        if not any(infos):
            return {}, {}
        plain = [_with_plain_numbers(info) for info in infos]
        try:
            tree, arrays = wire.encode(plain)
        except TypeError as error:
            raise InfoError(_what_cannot_be_sent(plain) or str(error)) from None
        return {"content": tree}, arrays


def _with_plain_numbers(info: Mapping[str, Any]) -> dict[str, Any]:
    """NumPy's doubles as Python's, which make the same arrays on the other side and are written faster."""
    return {
        key: float(value) if type(value) is np.float64 else _with_plain_numbers(value) if type(value) is dict else value
        for key, value in info.items()
    }


def _can_be_sent(value: Any) -> bool:
    try:
        wire.encode(value)
    except TypeError:
        return False
    return True


def _what_cannot_be_sent(infos: Sequence[Mapping[str, Any]]) -> str:
    for info in infos:
        for key, value in info.items():
            if not _can_be_sent(value):
                return (
                    f"info[{key!r}] of the environment is a {type(value).__name__} that cannot be sent between "
                    "processes; remove it with a wrapper. Text, numbers, lists, dicts and arrays can be sent"
                )
    return ""


def make() -> VectorService:
    """Create the service of a worker."""
    return VectorService()
