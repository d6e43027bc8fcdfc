"""One episode's variant of a scene: its own model, delays of actions and observations, and noise on what is seen."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from robotics.sim.control import ACTION_SIZE, OPEN
from robotics.sim.randomization import NoiseLevels, RandomizationConfig, Stream, draw_delays, is_on
from robotics.sim.tabletop import PROPRIO_SIZE, STATE_SIZE
from robotics.sim.variations import Draws, vary_model

if TYPE_CHECKING:
    import mujoco
    from numpy.typing import NDArray

    from robotics.sim.arms import ArmModel
    from robotics.sim.episodes import EpisodeSpec

HOLD = np.array([*(ACTION_SIZE - 1) * [0.0], OPEN])
"""The action of an arm that has been told nothing: no motion, the gripper open."""


@dataclass(frozen=True)
class SceneVariant:
    """What was drawn for one episode."""

    model: mujoco.MjModel
    """The scene's model with what was drawn."""
    drawn: Draws
    """What was drawn, by name; JSON."""
    action_delay: int
    """Control steps by which actions come late."""
    observation_delay: int
    """Control steps by which measured state and images come late."""
    noise: NoiseLevels
    """Noise on measured state and images."""
    stream: Stream
    """Generators of the episode."""

    def noisy_state(self, state: NDArray[np.float32], step: int) -> NDArray[np.float32]:
        """Add noise to a measured state.

        Args:
            state: (22,) or (10,), see `SceneSensors.state`.
            step: control steps since the beginning of the episode.
        """
        scale = noise_scale(self.noise)
        if not scale.any():
            return state
        noise = self.stream("state_noise", step).standard_normal(STATE_SIZE) * scale
        return (state + noise[: len(state)]).astype(np.float32)

    def noisy_image(self, image: NDArray[np.uint8], step: int, view: str = "") -> NDArray[np.uint8]:
        """Add noise to an image of a control step.

        Args:
            image: (H, W, 3).
            step: control steps since the beginning of the episode.
            view: name of the camera where it is a further one, which has noise of its own.

        Returns:
            (H, W, 3), rounded, and clipped to 0..255.
        """
        if not self.noise.image:
            return image
        stream = self.stream("image_noise", step, *([view] if view else []))
        noise = self.noise.image * stream.standard_normal(image.shape, np.float32)
        return np.rint(np.clip(image + noise, 0, 255)).astype(np.uint8)


class SceneVariants:
    """Makes the variants of one scene."""

    def __init__(
        self, model: mujoco.MjModel, arm: ArmModel, pieces: Sequence[str], config: RandomizationConfig
    ) -> None:
        self.config = config
        self._model, self._arm, self._pieces = model, arm, tuple(pieces)
        self._on = bool(config.active())

    def of(self, episode: EpisodeSpec, model: mujoco.MjModel | None = None) -> SceneVariant | None:
        """Draw an episode's variant."""
        if not self._on or episode.draw is None:
            return None
        model = copy.copy(self._model) if model is None else model
        stream = Stream(self.config.seed, episode)
        drawn = vary_model(model, self.config, self._arm, self._pieces, stream)
        delays = draw_delays(self.config, stream)
        return SceneVariant(
            model=model,
            drawn=drawn | delays | _levels(self.config.sensor_noise),
            action_delay=delays.get("action_delay", 0),
            observation_delay=delays.get("observation_delay", 0),
            noise=self.config.sensor_noise,
            stream=stream,
        )


class ActionDelay:
    """Carries out each action some control steps after it was given."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._waiting: NDArray[np.float64] = np.tile(HOLD, (steps, 1))

    def __call__(self, actions: NDArray[np.float64]) -> NDArray[np.float64]:
        """Take a chunk of actions (K, 5) and return the K that are carried out now."""
        if not self._steps:
            return actions
        queue = np.concatenate([self._waiting, actions])
        self._waiting = queue[len(actions) :]
        return queue[: len(actions)]


def noise_scale(noise: NoiseLevels) -> NDArray[np.float64]:
    """(22,) standard deviation of each entry of the full state; 0 for what the robot was commanded."""
    measured = [*3 * [noise.position_m], noise.yaw_rad, noise.opening_m]
    commanded = (PROPRIO_SIZE - len(measured)) * [0.0]
    piece = [*3 * [noise.pieces_m], noise.pieces_rad]
    goal_and_drawer = 4 * [noise.pieces_m]
    return np.array([*measured, *commanded, *piece, *piece, *goal_and_drawer])


def _levels(noise: NoiseLevels) -> dict[str, Any]:
    """Noise as it is recorded."""
    return {f"sensor_noise.{name}": value for name, value in vars(noise).items() if is_on(value)}
