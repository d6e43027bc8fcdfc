"""One environment behind two pipes, run by its path in whatever Python the environment needs.

    python env_worker.py --factory module:function --options '{"kwargs": {"id": "CartPole-v1"}}'

The other side sends a command a message and gets one answer each: reset, step_chunk, expert, render, close. While a
command runs, a thread sends heartbeats, so that a process that computes differs from one that is stuck. What the
environment prints goes to standard error. The process ends when its standard input closes.

A factory returns a `RowEnv` or a gymnasium.Env, which `gym_adapter.py` then wraps. This file and those it loads ask for
Python 3.8, numpy, and gymnasium only where the environment is one of it.
"""

from __future__ import annotations

import sys

# The script's own folder leads sys.path; its files must not hide the environment's modules of the same name.
if __name__ == "__main__":
    del sys.path[0]

import argparse
import faulthandler
import importlib
import importlib.util
import inspect
import json
import os
import platform
import select
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from robotics.sim import gym_adapter, wire
else:

    def _sibling(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location("mmrl_" + name, Path(__file__).resolve().parent / (name + ".py"))
        module = importlib.util.module_from_spec(spec)
        # Dataclasses look their module up while they are made.
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module

    wire, gym_adapter = _sibling("wire"), _sibling("gym_adapter")

BEAT_SECONDS = 0.5
PARTING_SECONDS = 5.0
"""For closing the environment; the other side waits less."""


class RowEnv(Protocol):
    """One environment as the worker drives it; what a factory of one's own may return. `expert` is optional."""

    action_size: int
    """Entries of an action."""
    state_size: int
    """Entries of the state."""
    image_size: tuple[int, int] | None
    """(H, W) of `render`; None where it cannot draw."""
    horizon: int
    """Control steps after which an episode is truncated."""

    def tasks(self) -> Mapping[str, str]:
        """Names of the tasks with their instructions."""
        ...

    def layouts(self) -> Mapping[str, int | None]:
        """Names of the splits with their numbers of layouts; None for any number."""
        ...

    def reset(self, task: str, layout: int, split: str, seed: int) -> None:
        """Begin an episode; equal arguments start from the same bits."""
        ...

    def step(self, action: np.ndarray) -> tuple[float, bool, bool, bool]:
        """Act for one control step with (A,) float64 in -1..1; returns reward, success, terminated and truncated."""
        ...

    def state(self) -> np.ndarray:
        """(S,) of this moment."""
        ...

    def render(self) -> np.ndarray:
        """(H, W, 3) uint8 RGB of this moment."""
        ...

    def describe(self) -> Mapping[str, Any]:
        """What a result depends on, as JSON."""
        ...

    def close(self) -> None:
        """Free what is held."""
        ...


class Episode:
    """Runs the commands of one environment; counts control steps and truncates at the horizon.

    Args:
        env: the environment.
        images: whether answers carry a picture.
        end_at_success: whether the control step that succeeds ends the episode.
    """

    def __init__(self, env: RowEnv, images: bool, end_at_success: bool) -> None:
        self._env, self._images, self._end_at_success = env, images, end_at_success
        self._elapsed = 0
        if images and env.image_size is None:
            raise gym_adapter.EnvError(
                "pictures were asked for, but the environment draws none; make it with render_mode='rgb_array', or ask "
                "for none (sim.image_size=0)"
            )

    def hello(self) -> dict[str, Any]:
        """Sizes, tasks and versions, for the first message."""
        env = self._env
        return {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "action_size": int(env.action_size),
            "state_size": int(env.state_size),
            "image_size": list(env.image_size) if env.image_size is not None else None,
            "horizon": int(env.horizon),
            "tasks": dict(env.tasks()),
            "layouts": dict(env.layouts()),
            "expert": hasattr(env, "expert"),
            "describe": dict(env.describe()),
        }

    def reset(self, fields: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Begin an episode and look at it."""
        self._elapsed = 0
        self._env.reset(fields["task"], int(fields["layout"]), fields["split"], int(fields["seed"]))
        return self._observe()

    def step_chunk(self, actions: np.ndarray, record: bool) -> dict[str, np.ndarray]:
        """Act until the chunk or the episode ends.

        Args:
            actions: (K, A).
            record: whether to draw every control step.

        Returns:
            rewards (steps,), flags (3,) success, terminated and truncated, what the end looks like, and frames
            (steps, H, W, 3) where recorded.
        """
        rewards, frames = [], []
        success = terminated = truncated = False
        for action in np.clip(actions, -1.0, 1.0):
            reward, succeeded, ended, cut = self._env.step(action)
            self._elapsed += 1
            rewards.append(float(reward))
            success = success or bool(succeeded)
            terminated = bool(ended) or (self._end_at_success and success)
            truncated = not terminated and (bool(cut) or self._elapsed >= self._env.horizon)
            if record:
                frames.append(np.asarray(self._env.render(), np.uint8))
            if terminated or truncated:
                break
        result = {"rewards": np.array(rewards, np.float64), "flags": np.array([success, terminated, truncated])}
        if record:
            result["frames"] = np.stack(frames)
        result.update(self._observe(frames[-1] if frames else None))
        return result

    def expert(self) -> dict[str, np.ndarray]:
        """(A,) what the environment's own expert would do now."""
        return {"action": np.asarray(self._env.expert(), np.float64)}  # type: ignore[attr-defined]

    def render(self) -> dict[str, np.ndarray]:
        """(H, W, 3) picture of this moment."""
        return {"image": np.asarray(self._env.render(), np.uint8)}

    def _observe(self, drawn: np.ndarray | None = None) -> dict[str, np.ndarray]:
        state = np.asarray(self._env.state(), np.float32).reshape(-1)
        if not self._images:
            return {"state": state}
        return {"state": state, "image": np.asarray(self._env.render() if drawn is None else drawn, np.uint8)}


class _Line:
    """Both directions of the pipe pair; the main thread reads, it and the heartbeat write."""

    def __init__(self, watchdog_s: float) -> None:
        # The environment keeps descriptors 0 and 1, which from here on lead to nothing and to standard error.
        self._input, self._output = os.fdopen(os.dup(0), "rb"), os.dup(1)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)
        self._lock, self._busy, self._watchdog_s = threading.Lock(), True, watchdog_s
        threading.Thread(target=self._beat, daemon=True).start()

    def receive(self) -> wire.Message | None:
        """Wait for a command; None where it is to end."""
        message = wire.read(self._input)
        if message is None or message.fields["kind"] == "close":
            return None
        self._busy = True
        return message

    def send(self, fields: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None = None) -> None:
        """Answer; the other side waits no longer, so heartbeats stop."""
        self._busy = False
        self._write(wire.pack(fields, arrays))

    def _write(self, data: bytes) -> None:
        try:
            with self._lock:
                view = memoryview(data)
                while view:
                    view = view[os.write(self._output, view) :]
        except OSError:
            os._exit(0)

    def _beat(self) -> None:
        beat, hangup = wire.pack({"kind": "beat"}), select.poll()
        hangup.register(self._input, 0)
        while True:
            # Code that keeps Python's lock stops this loop; a timer outside Python then ends an orphan as well.
            faulthandler.dump_traceback_later(self._watchdog_s, exit=True)
            if hangup.poll(int(1000 * BEAT_SECONDS)):
                # The other side is gone, and the main thread may be deep in a step that nobody waits for.
                time.sleep(0.0 if self._busy else PARTING_SECONDS)
                os._exit(0)
            if self._busy:
                self._write(beat)


def load_factory(name: str) -> Any:
    """Find what makes the environment.

    Args:
        name: `module:function`, or `path/to/file.py:function`; `gymnasium:make` takes any registered id.

    Returns:
        The function.

    Raises:
        EnvError: there is no such module, file or function.
    """
    place, _, function = name.rpartition(":")
    if not place:
        raise gym_adapter.EnvError(f"the factory {name!r} must be module:function or file.py:function")
    try:
        module = _load_file(place) if place.endswith(".py") else importlib.import_module(place)
    except ModuleNotFoundError as error:
        raise gym_adapter.EnvError(f"the factory {name!r}: {error}") from error
    if not hasattr(module, function):
        raise gym_adapter.EnvError(f"the factory {name!r}: there is no {function!r} in {place}")
    return getattr(module, function)


def make_env(factory: str, options: Mapping[str, Any]) -> RowEnv:
    """Make the environment and wrap it where it is one of Gymnasium's.

    Args:
        factory: as for `load_factory`.
        options: `kwargs` go to the factory, `adapter` to `gym_adapter.GymRow`.

    Returns:
        What the worker drives.
    """
    kwargs, adapter = options.get("kwargs", {}), options.get("adapter", {})
    function = load_factory(factory)
    _check_names(factory, function, kwargs)
    env = function(**kwargs)
    if hasattr(env, "action_space") and hasattr(env, "observation_space"):
        _check_names("adapter", gym_adapter.GymRow, {"env": env, **adapter})
        return gym_adapter.GymRow(env, **adapter)
    return env


def _check_names(place: str, function: Any, kwargs: Mapping[str, Any]) -> None:
    """Refuse arguments that a function does not take, or lacks, before it runs."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(**kwargs)
    except TypeError as error:
        raise gym_adapter.EnvError(f"options of {place}: {error}; it takes {', '.join(signature.parameters)}") from None


def main() -> None:
    """Serve commands until the input closes or `close` comes."""
    parser = argparse.ArgumentParser(description="One environment behind two pipes; started by robotics.sim.workers.")
    parser.add_argument("--factory", required=True, help="module:function or file.py:function")
    parser.add_argument("--options", default="{}", help="JSON with kwargs, adapter, paths, images, end_at_success")
    arguments = parser.parse_args()
    options = json.loads(arguments.options)
    line = _Line(float(options.get("watchdog_s", 120.0)))
    sys.path[:0] = [path for path in options.get("paths", [os.getcwd()]) if path not in sys.path]
    try:
        env = make_env(arguments.factory, options)
        episode = Episode(env, bool(options.get("images", True)), bool(options.get("end_at_success", True)))
        greeting = episode.hello()
    except Exception as error:
        line.send({"kind": "error", "id": 0, **_describe_error(error)})
        return
    line.send({"kind": "hello", "id": 0, **greeting})
    while _serve(line, episode):
        pass
    env.close()


def _serve(line: _Line, episode: Episode) -> bool:
    command = line.receive()
    if command is None:
        return False
    fields, arrays = command
    try:
        if fields["kind"] == "reset":
            answer = episode.reset(fields)
        elif fields["kind"] == "step_chunk":
            answer = episode.step_chunk(arrays["actions"], bool(fields["record"]))
        elif fields["kind"] == "expert":
            answer = episode.expert()
        else:
            answer = episode.render()
    except Exception as error:
        line.send({"kind": "error", "id": fields["id"], **_describe_error(error)})
    else:
        line.send({"kind": "result", "id": fields["id"]}, answer)
    return True


def _describe_error(error: Exception) -> dict[str, Any]:
    return {
        "type": type(error).__name__,
        "message": str(error),
        "traceback": traceback.format_exc(),
        "for_user": bool(getattr(error, "for_user", False)),
    }


def _load_file(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("mmrl_factory_" + Path(path).stem, path)
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise gym_adapter.EnvError(f"there is no file {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
