"""One episode's variant of a scene: its own model, delays of actions and observations, and sensor noise.

Write the draws of a domain randomisation into a scene's model.

Each part is one function that draws, writes and returns its draws. Nothing else of the model changes, except what
MuJoCo derives from masses (`mj_setConst`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from robotics.scenes.looks import draw_pattern, write_texture
from robotics.sim.randomization import NoiseLevels, RandomizationConfig, Stream, draw_delays, is_on

if TYPE_CHECKING:
    import mujoco
    from numpy.typing import NDArray

    from robotics.sim.episodes import EpisodeSpec


Draws = dict[str, Any]
"""Draws by name, such as camera.front.position_m: numbers, lists of numbers and texts, as JSON holds them."""
UNSET_RGBA = (0.5, 0.5, 0.5, 1.0)
"""Colour of a geom that takes its material's."""
LOWEST_FOVY_DEG, HIGHEST_FOVY_DEG = 5.0, 150.0


@dataclass(frozen=True)
class SceneParts:
    """What a randomisation changes in a scene."""

    pieces: Mapping[str, str]  # body by name
    servos: Mapping[str, int]  # id of the actuator by joint or name, from the base to the hand
    robot: tuple[int, ...]  # ids of the robot's root bodies
    surfaces: tuple[str, ...]  # materials that take patterns
    noise: tuple[str, ...]  # field of `NoiseLevels` of each entry of the full state; "" = exact
    hold: NDArray[np.float64]  # (A,) action that moves nothing


@dataclass(frozen=True)
class Layer:
    """A model to write to, and what is needed to write."""

    model: mujoco.MjModel
    parts: SceneParts
    stream: Stream

    def bodies_of(self, piece: str) -> NDArray[np.int64]:
        """Ids of the bodies of a piece."""
        root = int(self.model.body(self.parts.pieces[piece]).id)
        return np.flatnonzero(self.model.body_rootid == root)

    def geoms_of(self, bodies: NDArray[np.int64]) -> NDArray[np.int64]:
        """Ids of the geoms of the given bodies."""
        return np.flatnonzero(np.isin(self.model.geom_bodyid, bodies))

    @property
    def arm_bodies(self) -> NDArray[np.int64]:
        """Ids of the bodies of the arm."""
        return np.flatnonzero(np.isin(self.model.body_rootid, self.parts.robot))


def vary_model(model: mujoco.MjModel, config: RandomizationConfig, parts: SceneParts, stream: Stream) -> Draws:
    """Draw and write everything that belongs to a model."""
    layer, found = Layer(model, parts, stream), Draws()
    for name, vary in VARY.items():
        part = getattr(config, name)
        if is_on(part):
            found |= vary(layer, part)
    return found


def _vary_lights(layer: Layer, ranges: Any) -> Draws:
    """Draw factors of brightness and colour, for ambient and diffuse light of lamps and headlight alike."""
    model, found = layer.model, Draws()
    # one factor for all lights, so that brightness and colour can be varied separately
    factor = float(layer.stream("lights", "brightness").uniform(*ranges.brightness))
    found["lights.brightness"] = factor
    for number in range(model.nlight):
        name = model.light(number).name or str(number)
        rng = layer.stream("lights", name)
        shift, turn, tint = (rng.uniform(-1, 1, 3) for _ in range(3))
        model.light_pos[number] += ranges.position_m * shift
        model.light_dir[number] = _turned(ranges.direction_rad * turn, model.light_dir[number])
        channels = factor * (1 + ranges.colour * tint)
        model.light_diffuse[number] *= channels
        model.light_ambient[number] *= channels
        found[f"lights.{name}.position_m"] = _listed(ranges.position_m * shift)
        found[f"lights.{name}.direction_rad"] = _listed(ranges.direction_rad * turn)
        found[f"lights.{name}.colour"] = _listed(1 + ranges.colour * tint)
    tint = layer.stream("lights", "headlight").uniform(-1, 1, 3)
    model.vis.headlight.diffuse[:] *= factor * (1 + ranges.colour * tint)
    model.vis.headlight.ambient[:] *= factor * (1 + ranges.colour * tint)
    found["lights.headlight.colour"] = _listed(1 + ranges.colour * tint)
    return found


def _vary_camera(layer: Layer, ranges: Any) -> Draws:
    import mujoco

    model, found = layer.model, Draws()
    for number in range(model.ncam):
        name = model.camera(number).name or str(number)
        rng = layer.stream("camera", name)
        shift = ranges.position_m * rng.uniform(-1, 1, 3)
        turn = rng.uniform(-1, 1, 3)
        zoom = rng.uniform(-1, 1)
        model.cam_pos[number] += shift
        # without it not even a multiplication: a part that is off must not change the last bit
        if ranges.rotation_rad:
            turned = np.empty(4)
            mujoco.mju_mulQuat(turned, model.cam_quat[number], _quaternion(ranges.rotation_rad * turn))
            model.cam_quat[number] = turned
        if ranges.fovy_deg:
            nominal = model.cam_fovy[number]
            fovy = np.clip(nominal + ranges.fovy_deg * zoom, LOWEST_FOVY_DEG, HIGHEST_FOVY_DEG)
            model.cam_fovy[number] = fovy
            if model.cam_sensorsize[number, 1]:  # such a camera is drawn with its focal lengths alone
                model.cam_intrinsic[number, :2] *= np.tan(np.radians(nominal) / 2) / np.tan(np.radians(fovy) / 2)
        found[f"camera.{name}.position_m"] = _listed(shift)
        found[f"camera.{name}.rotation_rad"] = _listed(ranges.rotation_rad * turn)
        found[f"camera.{name}.fovy_deg"] = float(model.cam_fovy[number])
    return found


def _vary_colours(layer: Layer, ranges: Any) -> Draws:
    model, found = layer.model, Draws()
    things = [(name, layer.geoms_of(layer.bodies_of(name)), ranges.pieces) for name in layer.parts.pieces]
    things.append(("robot", layer.geoms_of(layer.arm_bodies), ranges.robot))
    taken = np.concatenate([geoms for _, geoms, _ in things])
    rest = np.setdiff1d(np.arange(model.ngeom), taken)
    things += [(model.geom(number).name or str(number), np.array([number]), ranges.surroundings) for number in rest]
    for name, geoms, size in things:
        if size:
            shift = size * layer.stream("colours", name).uniform(-1, 1, 3)
            _shift_colours(model, geoms, shift)
            found[f"colours.{name}"] = _listed(shift)
    return found


def _shift_colours(model: mujoco.MjModel, geoms: NDArray[np.int64], shift: NDArray[np.float64]) -> None:
    """Shift the colour channels of geoms, or of the materials from which they take their colours."""
    has_material = (model.geom_matid[geoms] >= 0) & (model.geom_rgba[geoms] == UNSET_RGBA).all(axis=1)
    # geoms may share a material, which must be shifted once
    own, materials = geoms[~has_material], np.unique(model.geom_matid[geoms[has_material]])
    model.geom_rgba[own, :3] = np.clip(model.geom_rgba[own, :3] + shift, 0, 1)
    model.mat_rgba[materials, :3] = np.clip(model.mat_rgba[materials, :3] + shift, 0, 1)


def _vary_textures(layer: Layer, ranges: Any) -> Draws:
    found = Draws()
    for surface in layer.parts.surfaces:
        rng = layer.stream("textures", surface)
        kind, contrast = str(rng.choice(ranges.patterns)), float(ranges.contrast * rng.uniform())
        write_texture(layer.model, surface, draw_pattern(kind, contrast, rng))
        found |= {f"textures.{surface}.pattern": kind, f"textures.{surface}.contrast": contrast}
    return found


def _vary_friction(layer: Layer, ends: Any) -> Draws:
    factor = float(layer.stream("friction").uniform(*ends))
    layer.model.geom_friction[:] *= factor
    # contacts that the MJCF lists as pairs have their own
    layer.model.pair_friction[:] *= factor
    return {"friction": factor}


def _vary_mass(layer: Layer, ends: Any) -> Draws:
    """Scale masses, and inertias in proportion; `mj_setConst` updates what MuJoCo derives from both."""
    import mujoco

    model, found = layer.model, Draws()
    for name in layer.parts.pieces:
        bodies = layer.bodies_of(name)
        # a piece that does not move has no mass to vary
        if model.body_mass[bodies].any() and model.body_dofnum[bodies].any():
            factor = found[f"mass.{name}"] = float(layer.stream("mass", name).uniform(*ends))
            model.body_mass[bodies] *= factor
            model.body_inertia[bodies] *= factor
    mujoco.mj_setConst(model, mujoco.MjData(model))
    return found


def _vary_servo_gain(layer: Layer, ends: Any) -> Draws:
    """Force = kp (target - angle) - kv velocity, both scaled alike; the force limit stays."""
    model, found = layer.model, Draws()
    for name, number in layer.parts.servos.items():
        factor = found[f"servo_gain.{name}"] = float(layer.stream("servo_gain", name).uniform(*ends))
        # kp in the gain, -kp and -kv in the bias
        model.actuator_gainprm[number, 0] *= factor
        model.actuator_biasprm[number, :3] *= factor
    return found


def _quaternion(turn_rad: NDArray[np.float64]) -> NDArray[np.float64]:
    """(4,) of a rotation vector (3,)."""
    import mujoco

    angle, quaternion = float(np.linalg.norm(turn_rad)), np.empty(4)
    mujoco.mju_axisAngle2Quat(quaternion, turn_rad / max(angle, 1e-12), angle)
    return quaternion


def _turned(turn_rad: NDArray[np.float64], vector: NDArray[np.float64]) -> NDArray[np.float64]:
    import mujoco

    if not turn_rad.any():
        return vector
    turned = np.empty(3)
    mujoco.mju_rotVecQuat(turned, np.array(vector), _quaternion(turn_rad))
    return turned


def _listed(values: NDArray[np.float64]) -> list[float]:
    return [float(value) for value in values]


VARY: dict[str, Callable[[Layer, Any], Draws]] = {
    "lights": _vary_lights,
    "camera": _vary_camera,
    "colours": _vary_colours,
    "textures": _vary_textures,
    "friction": _vary_friction,
    "mass": _vary_mass,
    "servo_gain": _vary_servo_gain,
}
"""Functions by part of `RandomizationConfig`."""


@dataclass(frozen=True)
class SceneVariant:
    """One episode's draw of the domain randomisation."""

    model: mujoco.MjModel
    drawn: Draws  # by name; JSON
    action_delay: int  # control steps
    observation_delay: int  # control steps
    noise: NoiseLevels
    stream: Stream
    scale: NDArray[np.float64]  # (S,) standard deviation of the noise on each entry of the full state

    def noisy_state(self, state: NDArray[np.float32], step: int) -> NDArray[np.float32]:
        """Measured state, full or its leading part, with the noise of a control step of the episode."""
        if not self.scale.any():
            return state
        # always for the full state: a policy that sees less of it gets the same noise on what it sees
        noise = self.stream("state_noise", step).standard_normal(len(self.scale)) * self.scale
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
    model: mujoco.MjModel, parts: SceneParts, config: RandomizationConfig, episode: EpisodeSpec
) -> SceneVariant:
    """Draw an episode's variant and write it into a model."""
    stream = Stream(config.seed, episode)
    drawn = vary_model(model, config, parts, stream)
    delays, noise = draw_delays(config, stream), config.sensor_noise
    levels = {f"sensor_noise.{name}": value for name, value in vars(noise).items() if is_on(value)}
    late = delays.get("action_delay", 0), delays.get("observation_delay", 0)
    drawn |= delays
    drawn |= levels
    scale = np.array([getattr(noise, kind) if kind else 0.0 for kind in parts.noise])
    return SceneVariant(model, drawn, *late, noise, stream, scale)


class ActionDelay:
    """Executes each action a number of control steps after it was given."""

    def __init__(self, steps: int, hold: NDArray[np.float64]) -> None:
        self._steps = steps
        # before the first action arrives: no motion, gripper open
        self._waiting: NDArray[np.float64] = np.tile(hold, (steps, 1))

    def __call__(self, actions: NDArray[np.float64]) -> NDArray[np.float64]:
        """Take a chunk of actions (K, A) and return the K that are executed now."""
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
