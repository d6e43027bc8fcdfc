"""A saved policy as an actor of `mmrl sim play`: it observes, chooses a chunk of actions, and executes it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mmrl.errors import UserError
from mmrl.training.processes import make_generator
from robotics.policies.base.action_policy import PolicyInputs
from robotics.scenes.envs import state_sizes
from robotics.scenes.mjcf_task import open_scene
from robotics.serving.observations import ServeConfig
from robotics.serving.opening import open_served_policy
from robotics.serving.queue import choose_chunks
from robotics.sim.interface import RobotInterface
from robotics.sim.recent import RecentObservations

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from robotics.scenes.envs import TabletopEnv

ANY_SIDE = 64
"""Image size in pixels for a policy that accepts any size and whose run is unknown."""


class PolicyActor:
    """A policy that acts in a task's scene as in the evaluations of its run."""

    def __init__(
        self,
        folder: Path,
        temperature: float = 0.0,
        seed: int = 0,
        step: int | None = None,
        allow: Sequence[str] = (),
        task: str = "reach",
    ) -> None:
        self._served = open_served_policy(folder, ServeConfig(temperature=temperature, seed=seed), step, allow)
        self._seed = seed
        policy, run = self._served.policy, self._served.about.get("sim", {})
        if run.get("kind", "tabletop") != "tabletop":
            raise UserError(f"{folder} was trained in the simulator {run['kind']}; only tabletop tasks can be played")
        scene = open_scene(task, run.get("arm", "panda"))
        if policy.action_size != len(scene.action_names):
            raise UserError(
                f"the actions of {folder} have {policy.action_size} entries, but those of {task} have "
                f"{len(scene.action_names)}"
            )
        views = self._served.format.views
        if views != len(run.get("views", ())):
            raise UserError(
                f"{folder} uses {views + 1} cameras, but there is no run next to it that lists them; pass the run "
                "folder instead"
            )
        self._n_action_steps = int(self._served.about.get("n_action_steps", policy.chunk))
        size, state_size = self._served.format.image_size, self._served.format.state_size
        states = {entries: name for name, entries in state_sizes(scene).items()}
        if state_size not in (None, *states):
            known = ", ".join(f"{name} with {entries}" for entries, name in states.items())
            raise UserError(f"{folder} reads a state of {state_size} entries, but {task} has {known}")
        self._state = states[state_size] if state_size is not None else ""
        names = scene.state_names[: state_size or 0] or None
        table = RobotInterface(names, scene.action_names, None, scene.control_hz)
        differences = self._served.format.interface.differences(table)
        if differences:
            raise UserError("; ".join(text.format(str(folder), f"the task {task}") for text in differences.values()))
        kinds = [*([self._state] if self._state else []), *(["rgb"] if size else [])]
        self.options: dict[str, Any] = {
            "observation": kinds or ["proprio"],
            "image_size": tuple(side or ANY_SIDE for side in size or (None, None)),
            "camera": run.get("camera", ""),
            "views": tuple(run.get("views", ())),
            "arm": run.get("arm", "panda"),
        }
        """Arguments of `TabletopEnv`."""

    def reset(self, episode: int) -> None:
        """Begin an episode."""
        self._generator = make_generator(self._seed, "play", episode)
        self._chunk: list[NDArray[Any]] = []
        self._recent = RecentObservations(self._served.policy.past)

    def act(self, env: TabletopEnv, observation: dict[str, Any]) -> NDArray[Any]:
        """Choose an action (A,): the next one of the chunk, or the first of a new chunk."""
        names = {"images": "rgb", "state": self._state, "views": "views"}
        seen = {name: observation[key] for name, key in names.items() if key in observation}
        self._recent.add(seen)
        if not self._chunk:
            past = self._recent.before() if self._recent.past else {}
            parts = seen | {f"past_{name}": part for name, part in past.items()}
            given: dict[str, Any] = {"images": None, "state": None}
            given |= {name: torch.from_numpy(part)[None] for name, part in parts.items()}
            inputs = PolicyInputs(instructions=(env.instruction,), **given)
            chunk = choose_chunks(self._served, inputs, self._generator)[0]
            self._chunk = list(chunk.actions[: self._n_action_steps])
        return self._chunk.pop(0)
