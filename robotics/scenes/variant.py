"""One episode's variant of a scene: its own model, delays of actions and observations, and sensor noise."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from robotics.scenes.control import ACTION_SIZE, OPEN
from robotics.scenes.tabletop import PROPRIO_SIZE, STATE_SIZE
from robotics.scenes.variations import Draws, vary_model
from robotics.sim.randomization import NoiseLevels, RandomizationConfig, Stream, draw_delays, is_on

if TYPE_CHECKING:
    import mujoco
    from numpy.typing import NDArray

    from robotics.scenes.arms import ArmModel
    from robotics.sim.episodes import EpisodeSpec

HOLD = np.array([*(ACTION_SIZE - 1) * [0.0], OPEN])
"""The action before the first one arrives: no motion, gripper open."""


@dataclass(frozen=True)
class SceneVariant:
    """One episode's draw of the domain randomisation."""

    model: mujoco.MjModel
    drawn: Draws  # by name; JSON
    action_delay: int  # control steps
    observation_delay: int  # control steps
    noise: NoiseLevels
    stream: Stream

    def noisy_state(self, state: NDArray[np.float32], step: int) -> NDArray[np.float32]:
        """Measured state (22,) or (10,) with the noise of a control step of the episode."""
        scale = noise_scale(self.noise)
        if not scale.any():
            return state
        # always for the full state: a policy that sees less of it gets the same noise on what it sees
        noise = self.stream("state_noise", step).standard_normal(STATE_SIZE) * scale
        return (state + noise[: len(state)]).astype(np.float32)

    def noisy_image(self, image: NDArray[np.uint8], step: int, view: str = "") -> NDArray[np.uint8]:
        """Image (H, W, 3) with the noise of a control step, rounded and clipped; further cameras are named in view."""
        if not self.noise.image:
            return image
        # the first camera keeps the stream that it has without further ones
        stream = self.stream("image_noise", step, *([view] if view else []))
        noise = self.noise.image * stream.standard_normal(image.shape, np.float32)
        return np.rint(np.clip(image + noise, 0, 255)).astype(np.uint8)


def draw_variant(
    model: mujoco.MjModel, arm: ArmModel, pieces: tuple[str, ...], config: RandomizationConfig, episode: EpisodeSpec
) -> SceneVariant:
    """Draw an episode's variant and write it into a model."""
    stream = Stream(config.seed, episode)
    drawn = vary_model(model, config, arm, pieces, stream)
    delays, noise = draw_delays(config, stream), config.sensor_noise
    levels = {f"sensor_noise.{name}": value for name, value in vars(noise).items() if is_on(value)}
    late = delays.get("action_delay", 0), delays.get("observation_delay", 0)
    drawn |= delays
    drawn |= levels
    return SceneVariant(model, drawn, *late, noise, stream)


class ActionDelay:
    """Executes each action a number of control steps after it was given."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._waiting: NDArray[np.float64] = np.tile(HOLD, (steps, 1))

    def __call__(self, actions: NDArray[np.float64]) -> NDArray[np.float64]:
        """Take a chunk of actions (K, 5) and return the K that are executed now."""
        if not self._steps:
            return actions
        queue = np.concatenate([self._waiting, actions])
        # a chunk may be shorter than the delay
        self._waiting = queue[len(actions) :]
        return queue[: len(actions)]


class ObservationDelay:
    """Remembers the last states of one scene's episode and shows the oldest of them."""

    def __init__(self, model: mujoco.MjModel, data: mujoco.MjData, steps: int) -> None:
        import mujoco

        self._lib = mujoco
        self._model = model
        self._steps = steps
        self._state = int(mujoco.mjtState.mjSTATE_INTEGRATION)
        self._now = data
        self._size = mujoco.mj_stateSize(model, self._state)
        self._past: deque[tuple[NDArray[np.float64], NDArray[np.float64]]] = deque(maxlen=steps + 1)
        self.data: mujoco.MjData = mujoco.MjData(model) if steps else data
        """The delayed state; its poses are as old as `mj_setState` leaves them (see `update_poses`)."""
        self.add(data)

    @property
    def sensordata(self) -> NDArray[np.float64]:
        """(nsensordata,) delayed sensor values."""
        return self._past[0][1] if self._steps else self._now.sensordata

    def add(self, data: mujoco.MjData) -> None:
        """Add the state after another control step."""
        if not self._steps:
            return
        state = np.empty(self._size)
        self._lib.mj_getState(self._model, data, state, self._state)
        # copied: data goes on changing
        self._past.append((state, np.array(data.sensordata)))
        self._lib.mj_setState(self._model, self.data, self._past[0][0], self._state)


def noise_scale(noise: NoiseLevels) -> NDArray[np.float64]:
    """(22,) standard deviation of each entry of the full state; 0 for what the robot was commanded."""
    measured = [*3 * [noise.position_m], noise.yaw_rad, noise.opening_m]
    commanded = (PROPRIO_SIZE - len(measured)) * [0.0]
    piece = [*3 * [noise.pieces_m], noise.pieces_rad]
    goal_and_drawer = 4 * [noise.pieces_m]
    return np.array([*measured, *commanded, *piece, *piece, *goal_and_drawer])
