"""Scenes as environments, batches and videos see them, whatever their tasks.

`TabletopScene` is a task of the suite's own, `MjcfScene` one of yours (`robotics.scenes.mjcf_task.MjcfTask`).
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

from mmrl.errors import UserError
from robotics.scenes.looks import add_blank_textures
from robotics.scenes.tabletop import compile_scene
from robotics.scenes.variant import SceneParts, SceneVariant, draw_variant
from robotics.sim.randomization import RandomizationConfig

if TYPE_CHECKING:
    import mujoco
    from numpy.typing import ArrayLike, NDArray

    from robotics.scenes.arms import ArmModel
    from robotics.scenes.control import ControlPlan, ControlSettings
    from robotics.sim.episodes import EpisodeSpec
    from robotics.sim.interface import SceneSteps

SPLITS = ("train", "held_out")
REWARDS = ("sparse", "dense")


class Controller(Protocol):
    """Turns actions in -1..1 into controls, and keeps the commands of R rows."""

    def reset(self, rows: int) -> None:
        """Begin with all rows at home."""

    def restart(self, rows: ArrayLike) -> None:
        """Move the given rows back home."""

    def commands(self, rows: ArrayLike) -> NDArray[np.float64]:
        """(L, C) current commands of the given rows."""

    def plan(self, rows: ArrayLike, actions: ArrayLike) -> ControlPlan:
        """Controls and commands of a chunk of actions (L, K, A)."""


class Sensors(Protocol):
    """Reads the sensor values of a scene."""

    def read(self, sensordata: NDArray[np.float64]) -> Any:
        """Name sensor values with any leading shape, for success and rewards."""

    def state(self, sensordata: NDArray[np.float64], commands: NDArray[np.float64]) -> NDArray[np.float32]:
        """(R, S) full state from sensor values (R, nsensordata) and commands (R, C); the robot's own entries lead."""


class Task(Protocol):
    """Name, instruction and scores of a task."""

    @property
    def name(self) -> str:
        """Name in results."""

    @property
    def instruction(self) -> str:
        """Language instruction."""

    @property
    def horizon(self) -> int:
        """Control steps of an episode."""

    def success(self, seen: Any) -> NDArray[np.bool_]:
        """Whether readings with any leading shape solve the task."""

    def dense_reward(self, seen: Any) -> NDArray[np.float64]:
        """Reward of readings: 1 at success, else at most 0.95."""


class Scene(ABC):
    """A task in a scene: the model, initial states, controls, observations and scores.

    Args:
        task: name, instruction and scores.
        spec: the scene, not compiled yet.
        split: train or held_out.
        reward: sparse or dense.
        randomization: what differs from episode to episode.
    """

    arm: ArmModel | None
    sensors: Sensors
    parts: SceneParts
    state_names: tuple[str, ...]
    proprio_size: int
    """Number of leading entries of the state that are the robot's own."""
    action_names: tuple[str, ...]
    control_hz: float
    substeps: int
    """Physics steps in a control step."""
    ring_rises = 1.0
    """Height of the ring in videos, as a fraction of the target's; 0 = on the table's top."""

    def __init__(
        self, task: Task, spec: Any, split: str, reward: str, randomization: RandomizationConfig | None
    ) -> None:
        check_choice("split", split, SPLITS)
        check_choice("reward", reward, REWARDS)
        self.task = task
        self.split = split
        self.reward = reward
        self.randomization = randomization or RandomizationConfig()
        # a part that is off must not change the model
        if "textures" in self.randomization.active():
            add_blank_textures(spec, self.surfaces(spec))
        self.model: mujoco.MjModel = compile_scene(spec)

    @property
    def camera(self) -> str:
        """Camera of images unless another one is named: `front`, else the first one; empty if there is none."""
        names = [self.model.camera(number).name for number in range(self.model.ncam)]
        return "front" if "front" in names else next(iter(names), "")

    def for_split(self, split: str) -> Self:
        """The same scene and model, with layouts of a split."""
        check_choice("split", split, SPLITS)
        other = copy.copy(self)
        other.split = split
        return self if split == self.split else other

    def variant(self, episode: EpisodeSpec) -> SceneVariant | None:
        """Draw an episode's variant, with a copy of the model; None for the nominal scene."""
        if not self.randomization.active() or episode.draw is None:
            return None
        # a copy, because other rows share the scene's model
        return draw_variant(copy.copy(self.model), self.parts, self.randomization, episode)

    def score(self, steps: SceneSteps) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Reward and success of each control step."""
        seen = self.sensors.read(steps.sensordata)
        done = np.asarray(self.task.success(seen))
        return (self.task.dense_reward(seen) if self.reward == "dense" else done.astype(np.float64)), done

    def controls(self, planned: NDArray[np.float64]) -> NDArray[np.float64]:
        """(..., nu) controls of all actuators, from those of a controller; the others stay at rest."""
        columns = self._columns
        if columns is None:
            return planned
        found = np.tile(np.zeros(self.model.nu), (*planned.shape[:-1], 1))
        found[..., columns] = planned
        return found

    @cached_property
    def _columns(self) -> list[int] | None:
        """Actuators of a controller's controls; None if these are all, in their order."""
        columns = list(range(self.model.nu)) if self.arm is None else self.arm.actuators(self.model)
        return None if columns == list(range(self.model.nu)) else columns

    def describe(self) -> dict[str, Any]:
        """What a measurement depends on that the names of arm and task do not say: their own files."""
        from robotics.scenes.arms import ASSETS

        known = self.arm is not None and self.arm.path.parent == ASSETS
        return {} if known else {"model": model_digest(self.model)}

    @abstractmethod
    def surfaces(self, spec: Any) -> tuple[str, ...]:
        """Materials that take the patterns of a randomisation."""

    @abstractmethod
    def reset(self, model: mujoco.MjModel, data: mujoco.MjData, rng: np.random.Generator) -> None:
        """Write the state at the start of an episode."""

    @abstractmethod
    def controller(self, settings: ControlSettings | None = None) -> Controller:
        """Make a controller; None for the task's own settings."""

    @abstractmethod
    def expert(self, sensordata: NDArray[np.float64], commands: NDArray[np.float64]) -> NDArray[np.float32]:
        """(R, A) actions of the task's expert; raises UserError if it has none."""

    @abstractmethod
    def object_poses(self, qpos: NDArray[np.float64], sensordata: NDArray[np.float64]) -> NDArray[np.float64]:
        """(R, 4, 4) T_world_object of the object that the task acts on; NaN without one."""

    @abstractmethod
    def film_spec(self) -> tuple[Any, str]:
        """The scene in its look for videos, not compiled yet, and the site or body to mark at the end, if any."""


def model_digest(model: mujoco.MjModel) -> str:
    """Digest of everything in a compiled model."""
    import mujoco

    from mmrl.runs.records import short_digest

    content = np.zeros(mujoco.mj_sizeModel(model), np.uint8)
    mujoco.mj_saveModel(model, None, content)
    return short_digest(content.tobytes())


def check_choice(name: str, value: str, known: tuple[str, ...]) -> None:
    """Raise UserError unless a value is one of those known."""
    if value not in known:
        raise UserError(f"{name} is {value!r}; must be {' or '.join(known)}")


def rotations(quaternions: NDArray[np.float64]) -> NDArray[np.float64]:
    """(R, 3, 3) of quaternions (R, 4), w first."""
    w, x, y, z = np.moveaxis(quaternions / np.linalg.norm(quaternions, axis=-1, keepdims=True), -1, 0)
    rows = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
        [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
        [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
    ]
    return np.moveaxis(np.array(rows), -1, 0)
