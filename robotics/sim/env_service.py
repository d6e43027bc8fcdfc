"""The worker's side of `SubprocessSim`: one environment that resets, acts, renders and queries its expert on request.

A factory returns a `RowEnv` or a gymnasium.Env, which `gym_adapter.py` then wraps. A worker loads this file,
`gym_adapter.py`, `recent.py`, `mmrl/workers/loading.py` and `mmrl/hub/foreign.py` by their paths in the environment's
own Python: they run on Python 3.8 and numpy, and import gymnasium only through an environment of it; see
`mmrl.workers.serve`.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np


def _load_file(path: str | Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, str(path))
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up while they are made.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


if TYPE_CHECKING:
    from mmrl.hub import foreign
    from mmrl.workers import loading
    from robotics.sim import gym_adapter, recent
else:
    MMRL = Path(__file__).resolve().parents[2] / "mmrl"
    loading = _load_file(MMRL / "workers" / "loading.py", "mmrl_loading")
    foreign = _load_file(MMRL / "hub" / "foreign.py", "mmrl_foreign")
    gym_adapter = _load_file(Path(__file__).resolve().with_name("gym_adapter.py"), "mmrl_gym_adapter")
    recent = _load_file(Path(__file__).resolve().with_name("recent.py"), "mmrl_recent")


class RowEnv(Protocol):
    """One environment as the worker drives it; a user's factory may return it.

    Optional: `expert()`, the action (A,) of the environment's expert; for several cameras `views`, the names of the
    additional ones, with `render_views()`, (V, H, W, 3) uint8 RGB in this order; `action_bounds`, two arrays (A,), the
    meaning of -1 and 1 in the environment's units, and `action_integer`, whether these are integers; `state_names` and
    `action_names`, the names of the entries in order; `camera`, the name of the camera of `render`; `control_hz`,
    control steps per second; `executed`, after a step, the action (A,) of a person inside the environment who acted
    instead of the policy, else None; `discarded`, whether this person asks for another try instead of the episode.
    """

    action_size: int
    """Entries of an action."""
    state_size: int
    """Entries of the state."""
    image_size: tuple[int, int] | None
    """(H, W) of `render`; None if it cannot render."""
    horizon: int
    """Control steps after which an episode is truncated."""

    def tasks(self) -> Mapping[str, str]:
        """Names of the tasks with their instructions."""
        ...

    def layouts(self) -> Mapping[str, int | None]:
        """Names of the splits with their numbers of layouts; None for any number."""
        ...

    def reset(self, task: str, layout: int, split: str, seed: int) -> None:
        """Begin an episode; equal arguments give bit-identical initial states.

        With domain randomisation it also takes `draw: int | None`, None for the nominal scene, and the environment
        reports the draw with `domain_draw()`, as JSON.
        """
        ...

    def step(self, action: np.ndarray) -> tuple[float, bool, bool, bool]:
        """Act for one control step with (A,) float64 in -1..1; returns reward, success, terminated and truncated."""
        ...

    def state(self) -> np.ndarray:
        """(S,) current state."""
        ...

    def render(self) -> np.ndarray:
        """(H, W, 3) uint8 RGB of the current state."""
        ...

    def describe(self) -> Mapping[str, Any]:
        """Everything that a result depends on; JSON."""
        ...

    def close(self) -> None:
        """Free resources."""
        ...


class EnvService:
    """Handles requests to one environment; counts control steps and truncates at the horizon."""

    def __init__(self, env: RowEnv, images: bool, end_at_success: bool) -> None:
        self._env = env
        self._images = images
        self._end_at_success = end_at_success
        self._elapsed = 0
        self._recent = recent.RecentObservations(0)
        self._views: Sequence[str] = tuple(getattr(env, "views", ())) if images else ()
        if images and env.image_size is None:
            others = "".join(
                f", and {name} is {space}, no image" for name, space in getattr(env, "left_out", {}).items()
            )
            raise gym_adapter.EnvError(
                getattr(env, "image_problem", "")
                or f"images were requested, but the environment renders none{others}; create it with "
                "render_mode='rgb_array', or request no images (sim.image_size=0)"
            )

    def hello(self) -> dict[str, Any]:
        """Sizes, tasks and versions."""
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
            # plain floats and strings throughout, since this is sent as JSON
            "action_bounds": [[float(value) for value in bound] for bound in getattr(env, "action_bounds", ())],
            "action_integer": bool(getattr(env, "action_integer", False)),
            "state_names": [str(name) for name in getattr(env, "state_names", None) or ()],
            "action_names": [str(name) for name in getattr(env, "action_names", None) or ()],
            "camera": str(getattr(env, "camera", "")),
            "control_hz": _number(getattr(env, "control_hz", None)),
            "views": [str(name) for name in self._views],
            "shadow_lights": int(getattr(env, "shadow_lights", 0)) if self._images else 0,
            "left_out": dict(getattr(env, "left_out", {})),
            "fitted_camera": dict(getattr(env, "fitted_camera", {})) if self._images else {},
            "draws": "draw" in inspect.signature(env.reset).parameters,
            "describe": dict(env.describe()),
        }

    def answer(
        self, fields: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
    ) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Handle a request of kind reset, step_chunk, expert or render."""
        if fields["kind"] == "reset":
            seen = self.reset(fields)
            return self._drawn(), seen
        if fields["kind"] == "step_chunk":
            return self.step_chunk(arrays["actions"], bool(fields["record"]), bool(fields.get("people")))
        return {}, self.expert() if fields["kind"] == "expert" else self.render()

    def close(self) -> None:
        """Close the environment."""
        self._env.close()

    def reset(self, fields: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Begin an episode and observe it; later replies include the `past` control steps before them."""
        self._elapsed = 0
        self._recent = recent.RecentObservations(int(fields.get("past", 0)))
        # environments without randomisation have no such argument
        draw = {"draw": fields["draw"]} if "draw" in fields else {}
        # for environments that draw from the global generators: equal arguments must start equal episodes
        foreign.seed_globals(int(fields["seed"]))
        self._env.reset(fields["task"], int(fields["layout"]), fields["split"], int(fields["seed"]), **draw)
        return self._with_past(self._observe())

    def _drawn(self) -> dict[str, Any]:
        """The episode's domain randomisation, if the environment reports one as JSON."""
        found = self._env.domain_draw() if hasattr(self._env, "domain_draw") else {}
        try:
            json.dumps(found, allow_nan=False)
        except (TypeError, ValueError):  # an info of the environment's own with the same name
            return {}
        return {"drawn": found} if found else {}

    def step_chunk(
        self, actions: np.ndarray, record: bool, people: bool = False
    ) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Act (K, A) until the chunk or the episode ends, or a number is not finite; `diverged` then reports it.

        Returns rewards (steps,), flags (3,) success, terminated and truncated, the last observation, the requested
        past while the episode continues, and frames (steps, H, W, 3) if recorded. With `people`, also the executed
        actions (steps, A) and whether a person inside the environment chose them (steps,); without, that is an error.
        """
        rewards, frames, executed, by_person = [], [], [], []
        success = terminated = truncated = False
        for step, action in enumerate(np.clip(actions, -1.0, 1.0), 1):
            reward, *flags = self._env.step(action)
            succeeded, ended, cut = map(foreign.as_flag, flags, ("success", "terminated", "truncated"))
            self._elapsed += 1
            rewards.append(float(reward))
            persons = getattr(self._env, "executed", None)
            if persons is not None and not people:
                raise gym_adapter.EnvError(
                    "info says that a person's action was executed instead of the policy's, as which it would count; "
                    "only overseer.kind=environment (robot_hg_dagger, robot_rlif) tells them apart, but not in "
                    "evaluations. Remove the wrapper, or do not act there"
                )
            if getattr(self._env, "discarded", False):
                return {"discarded": "a person inside the environment discarded the episode (rerecord_episode)"}, {}
            executed.append(action if persons is None else persons)
            by_person.append(persons is not None)
            # before anything is returned: a single NaN would spread over the whole batch
            diverged = self._look(rewards)
            if diverged:
                return {"diverged": diverged}, {}
            success = success or succeeded
            terminated = ended or (self._end_at_success and success)
            # a success in the last step is an end, not a cut
            truncated = not terminated and (cut or self._elapsed >= self._env.horizon)
            if record:
                frames.append(self._draw())
            if terminated or truncated:
                break
            # only steps that the next reply's past can reach; drawing the others would be wasted
            if 0 < len(actions) - step <= self._recent.past:
                self._recent.add(self._observe(frames[-1] if frames else None))

        result = {"rewards": np.array(rewards, np.float64), "flags": np.array([success, terminated, truncated])}
        if record:
            result["frames"] = np.stack(frames)
        if people:
            result["executed"], result["by_person"] = np.stack(executed), np.array(by_person)
        seen = self._observe(frames[-1] if frames else None)
        # nobody acts on the last observation of an episode, so it needs no past
        result.update(seen if terminated or truncated else self._with_past(seen))
        return {}, result

    def expert(self) -> dict[str, np.ndarray]:
        """(A,) action of the environment's own expert."""
        return {"action": np.asarray(self._env.expert(), np.float64)}  # type: ignore[attr-defined]

    def render(self) -> dict[str, np.ndarray]:
        """(H, W, 3) image of the current state."""
        return {"image": self._draw()}

    def _observe(self, drawn: np.ndarray | None = None) -> dict[str, np.ndarray]:
        state = np.asarray(self._env.state(), np.float32).reshape(-1)
        if not self._images:
            return {"state": state}
        # an image that was drawn for the recording is not drawn twice
        seen = {"state": state, "image": self._draw() if drawn is None else drawn}
        if self._views:
            views = self._env.render_views()  # type: ignore[attr-defined]
            seen["views"] = np.stack([foreign.as_image(view) for view in views])
        return seen

    def _with_past(self, seen: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Add the requested past, under names with `past_`."""
        if not self._recent.past:
            return seen
        self._recent.add(seen)
        return {**seen, **{f"past_{name}": part for name, part in self._recent.before().items()}}

    def _look(self, rewards: list[float]) -> str:
        """Description of the first value that is not finite after a control step; empty if all are finite."""
        place = f"at control step {len(rewards)} of the chunk, step {self._elapsed} of the episode"
        if not np.isfinite(rewards[-1]):
            return f"the reward is {rewards[-1]} {place}"
        state = np.asarray(self._env.state(), np.float64).reshape(-1)
        if len(state) != self._env.state_size:
            raise ValueError(f"the state has {len(state)} entries {place}; expected {self._env.state_size}")
        bad = np.flatnonzero(~np.isfinite(state))
        return f"entry {bad[0]} of the state is {state[bad[0]]} {place}" if len(bad) else ""

    def _draw(self) -> np.ndarray:
        image, size = foreign.as_image(self._env.render()), self._env.image_size
        if size is not None and image.shape != (size[0], size[1], 3):
            raise ValueError(
                f"the image has the shape {image.shape} at step {self._elapsed} of the episode; expected "
                f"{(size[0], size[1], 3)}"
            )
        return image


def _number(value: Any) -> float | None:
    """A finite number, which JSON can store; None for anything else, since metadata may contain anything."""
    try:
        found = float(value)
    except (TypeError, ValueError):
        return None
    return found if np.isfinite(found) else None


def make_env(factory: str, kwargs: Mapping[str, Any], adapter: Mapping[str, Any]) -> RowEnv:
    """Make the environment, and wrap it if it is a Gymnasium environment."""
    function = loading.find_function(factory, what="the factory")
    loading.check_arguments(f"options of {factory}", function, kwargs)
    env = function(**kwargs)
    if hasattr(env, "action_space") and hasattr(env, "observation_space"):
        loading.check_arguments("options of adapter", gym_adapter.GymRow, {"env": env, **adapter})
        if isinstance(adapter.get("expert"), str):
            adapter = {**adapter, "expert": loading.find_function(adapter["expert"], what="the expert")}
        return gym_adapter.GymRow(env, **adapter)
    return env


def make(
    factory: str,
    kwargs: Mapping[str, Any],
    adapter: Mapping[str, Any],
    images: bool = True,
    end_at_success: bool = True,
) -> EnvService:
    """Make the service of a worker; arguments as for `make_env` and `EnvService`."""
    return EnvService(make_env(factory, kwargs, adapter), images, end_at_success)
