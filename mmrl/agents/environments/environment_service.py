"""The worker's side of `EnvPool`: one environment that starts episodes and executes actions on request."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mmrl.agents.environments.environment import (
    Action,
    Environment,
    Fields,
    MalformedError,
    StepOutcome,
    as_outcome,
    as_start,
    pack_outcome,
)
from mmrl.agents.environments.programs import PARAMETERS, ProgramEnvironment, is_program
from mmrl.errors import UserError
from mmrl.hub.foreign import seed_globals
from mmrl.workers.loading import LoadError, check_arguments, find_function
from mmrl.workers.wire import decode, encode

if TYPE_CHECKING:
    import numpy as np

METHODS = ("reset", "step", "close")


class EnvironmentService:
    """Answers requests of the kinds reset, step and expert.

    A malformed observation, reward or flag is reported, not raised: the process itself is fine.
    """

    def __init__(self, env: Environment) -> None:
        self._env = env

    def hello(self) -> dict[str, Any]:
        """Actions with descriptions, formats that fit, JSON schemas of tools, whether it has an expert."""
        actions = getattr(self._env, "actions", None) or {}
        if isinstance(actions, (list, tuple)):
            actions = dict.fromkeys(actions, "")
        if not isinstance(actions, Mapping):
            raise LoadError(
                f"`actions` of {type(self._env).__name__} is a {type(actions).__name__}; expected a mapping from "
                "action names to one-sentence descriptions"
            )
        has_expert = callable(getattr(self._env, "expert", None))
        described = {str(name): str(text) for name, text in actions.items()}
        found = {"actions": described, "expert": has_expert, "tools": self._tools()}
        found["chat"] = bool(getattr(self._env, "chat", False))
        fitting = getattr(self._env, "fitting_formats", None)
        return found | ({"formats": list(fitting())} if callable(fitting) else {})

    def _tools(self) -> list[dict[str, Any]]:
        """The environment's tools as plain data."""
        tools = getattr(self._env, "tools", None) or []
        problem = f"it is a {type(tools).__name__}"
        try:
            # plain data only: tools travel to the trainer, which may lack the environment's classes
            found = json.loads(json.dumps(tools, allow_nan=False))
            if isinstance(found, list):
                nameless = next((tool for tool in found if not _is_named(tool)), None)
                if nameless is None:
                    return found
                problem = f"{nameless!r:.100} has no function with a name"
        except (TypeError, ValueError, RecursionError) as error:
            problem = str(error)
        raise LoadError(
            f"`tools` of {type(self._env).__name__} is not a list of JSON schemas: {problem}; "
            "transformers.utils.get_json_schema creates the schema of a function"
        )

    def answer(self, fields: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Fields:
        """Start an episode, execute an action, or return the action of the environment's expert."""
        body = decode(fields["body"], arrays)
        try:
            if fields["kind"] == "step":
                # the environment's own time, without the way between processes
                began = time.perf_counter()
                found = self._env.step(Action(body["name"], body["arguments"], body["text"]))
                seconds = time.perf_counter() - began
                outcome, sent = pack_outcome(as_outcome(found))
                return {**outcome, "seconds": seconds}, sent
            try:
                if fields["kind"] == "expert":
                    move = self._env.expert()  # type: ignore[attr-defined]
                else:
                    # environments that draw from `random` or NumPy's global generator are repeatable too
                    seed_globals(body["seed"])
                    if hasattr(self._env, "show_images"):
                        self._env.show_images = body["show_images"]
                    start = self._env.reset(body["task"], body["seed"])
            except UserError as error:  # there is no such task or no expert, or the machine lacks something
                raise LoadError(str(error)) from error
            if fields["kind"] == "reset":
                observation, info = as_start(start)
                return pack_outcome(StepOutcome(observation, 0.0, False, False, info))
            if not isinstance(move, Action):
                raise MalformedError(f"expert returned a {type(move).__name__}; expected an Action")
            tree, arrays = encode({"name": move.name, "arguments": dict(move.arguments)})
            return {"move": tree}, arrays
        except MalformedError as error:
            return {"malformed": str(error)}, {}

    def close(self) -> None:
        """Close the environment."""
        self._env.close()


def _is_named(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def open_environment(factory: str, kwargs: Mapping[str, Any], adapter: Mapping[str, Any]) -> Environment:
    """Create an environment; a Gymnasium environment and an agent program are wrapped."""
    function = find_function(factory, what="environment.factory")
    if is_program(function):
        check_arguments(f"environment.kwargs for {factory}", function, {**dict.fromkeys(PARAMETERS), **kwargs})
        if adapter:
            raise LoadError(f"environment.adapter is only for Gymnasium environments; {factory} is an agent program")
        return ProgramEnvironment(function, kwargs)
    check_arguments(f"environment.kwargs for {factory}", function, kwargs)
    try:
        env = function(**kwargs)
        # a Gymnasium environment is recognised by its spaces
        if hasattr(env, "action_space") and hasattr(env, "observation_space"):
            from mmrl.agents.environments.gym import GymEnvironment

            check_arguments("environment.adapter", GymEnvironment, {"env": env, **adapter})
            return GymEnvironment(env, **adapter)
    except UserError as error:
        raise LoadError(str(error)) from error
    if adapter:
        raise LoadError(
            f"environment.adapter is only for Gymnasium environments; {factory} created a {type(env).__name__}"
        )
    missing = [name for name in METHODS if not callable(getattr(env, name, None))]
    if missing:
        raise LoadError(
            f"environment.factory: {factory} created a {type(env).__name__} without {', '.join(missing)}; an "
            f"environment needs the methods {', '.join(METHODS)}, or must be a gymnasium.Env"
        )
    return env


def make(factory: str, kwargs: Mapping[str, Any], adapter: Mapping[str, Any]) -> EnvironmentService:
    """Make the service of a worker; arguments as for `open_environment`."""
    return EnvironmentService(open_environment(factory, kwargs, adapter))
