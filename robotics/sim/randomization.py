"""Domain randomisation of the tabletop: what may differ from episode to episode, and by how much.

    config = RandomizationConfig(camera=CameraRanges(position_m=0.03), friction=[0.6, 1.4], action_delay=[0, 2])
    settings = BatchSettings(randomization=config)

Everything is off by default, and a part that is off changes nothing. An episode's draw only depends on the seed here
and on the episode's task, split, layout and `draw`, not on the order of episodes, threads, processes or the other
parts. `EpisodeSpec.draw = None` requests the nominal scene.

Ranges follow robosuite's `DomainRandomizationWrapper` (ARISE-Initiative/robosuite, robosuite/wrappers/
domain_randomization_wrapper.py: lights, cameras and colours around their nominal values, textures) and Isaac Lab's
events (isaac-sim/IsaacLab, isaaclab/envs/mdp/events.py: masses with their inertias, friction, actuator gains; delays as
whole control steps). Those draw from a running generator, so a repeated episode differs.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.errors import UserError
from mmrl.fields import bounded, check_config, choice, rare

if TYPE_CHECKING:
    from robotics.sim.episodes import EpisodeSpec

SHARING = ("group", "episode")
PATTERNS = ("checker", "stripes", "gradient", "noise")
LARGEST_DELAY = 20
SAME = [1.0, 1.0]
NO_DELAY = [0, 0]


@dataclass(frozen=True)
class LightRanges:
    """Lamps of the scene and the light at the camera."""

    position_m: float = bounded(0.0, at_least=0, unit="m")
    """Maximum shift of each lamp along each axis."""
    direction_rad: float = bounded(0.0, at_least=0, at_most=1.0, unit="rad")
    """Maximum rotation of each lamp about each axis."""
    brightness: list[float] = bounded(SAME, at_least=0, length=2, unit="fractions of the nominal")
    """Minimum and maximum factor of all light."""
    colour: float = bounded(0.0, at_least=0, at_most=1, unit="fractions of the nominal")
    """Maximum change of each colour channel of each light."""


@dataclass(frozen=True)
class CameraRanges:
    """Ranges of the cameras, drawn separately for each; one on the hand moves with the hand."""

    position_m: float = bounded(0.0, at_least=0, unit="m")
    """Maximum shift along each axis of the body that the camera is fixed to."""
    rotation_rad: float = bounded(0.0, at_least=0, at_most=1.0, unit="rad")
    """Maximum rotation about each axis of the camera."""
    fovy_deg: float = bounded(0.0, at_least=0, at_most=30, unit="degrees")
    """Maximum change of the vertical field of view."""


@dataclass(frozen=True)
class ColourRanges:
    """Maximum change of each channel (red, green, blue in 0..1), drawn separately for each thing."""

    pieces: float = bounded(0.0, at_least=0, at_most=1, unit="fractions of full brightness")
    """Cubes, target places and the cabinet; instructions refer to colours, so keep it small."""
    robot: float = bounded(0.0, at_least=0, at_most=1, unit="fractions of full brightness")
    """The whole arm."""
    surroundings: float = bounded(0.0, at_least=0, at_most=1, unit="fractions of full brightness")
    """Table and floor, each separately."""


@dataclass(frozen=True)
class TextureRanges:
    """Patterns on table and floor, which multiply their colours."""

    patterns: list[str] = choice([], PATTERNS)
    """Patterns to choose from; empty = none."""
    contrast: float = bounded(0.5, above=0, at_most=1, unit="fractions of full brightness")
    """Maximum darkening of a pattern's darkest point; drawn up to this value."""


@dataclass(frozen=True)
class NoiseLevels:
    """Standard deviations of Gaussian noise, drawn at each control step."""

    position_m: float = bounded(0.0, at_least=0, unit="m")
    """Measured x, y, z of the grip."""
    yaw_rad: float = bounded(0.0, at_least=0, unit="rad")
    """Measured rotation of the grip."""
    opening_m: float = bounded(0.0, at_least=0, unit="m")
    """Measured opening of the gripper."""
    pieces_m: float = rare(bounded(0.0, at_least=0, unit="m"))
    """Measured positions of the pieces and travel of the drawer, if the full state is observed."""
    pieces_rad: float = rare(bounded(0.0, at_least=0, unit="rad"))
    """Measured rotations of the pieces."""
    image: float = bounded(0.0, at_least=0, at_most=255, unit="grey levels of 255")
    """Each channel of each pixel of observed images."""


@dataclass(frozen=True)
class RandomizationConfig:
    """Ranges of the domain randomisation, drawn for each episode; everything is off by default."""

    seed: int = bounded(0, at_least=0)
    """Seed of all draws, in addition to the episode's own task, split, layout and draw."""
    per: str = rare(choice("group", SHARING))
    """Draws in training. group: the samples of an initial state share a draw, so that only their actions differ;
    episode: each episode has its own."""
    lights: LightRanges = field(default_factory=LightRanges)
    """Position, direction, brightness and colour of the light."""
    camera: CameraRanges = field(default_factory=CameraRanges)
    """Position, direction and field of view of the cameras."""
    colours: ColourRanges = field(default_factory=ColourRanges)
    """Colours of things."""
    textures: TextureRanges = field(default_factory=TextureRanges)
    """Patterns on table and floor."""
    friction: list[float] = bounded(SAME, above=0, length=2, unit="fractions of the nominal")
    """Minimum and maximum factor of all friction coefficients. All coefficients share one factor, because a contact
    uses the larger coefficients of its two sides."""
    mass: list[float] = bounded(SAME, above=0, length=2, unit="fractions of the nominal")
    """Minimum and maximum factor of the mass and inertia of each piece."""
    servo_gain: list[float] = bounded(SAME, above=0, length=2, unit="fractions of the nominal")
    """Minimum and maximum factor of the stiffness and damping of each joint's servo; the gripper is not changed."""
    action_delay: list[int] = bounded(NO_DELAY, at_least=0, at_most=LARGEST_DELAY, length=2, unit="control steps")
    """Minimum and maximum delay of actions in control steps; until the first one arrives the arm holds still, with the
    gripper open."""
    observation_delay: list[int] = rare(
        bounded(NO_DELAY, at_least=0, at_most=LARGEST_DELAY, length=2, unit="control steps")
    )
    """Minimum and maximum delay of measured state and images in control steps. Commands are known without delay."""
    sensor_noise: NoiseLevels = field(default_factory=NoiseLevels)
    """Noise on measured state and images."""

    def validate(self) -> None:
        """Reject ranges whose ends are swapped; raises UserError."""
        ranges = {name: getattr(self, name) for name in RANGES}
        ranges["lights.brightness"] = self.lights.brightness
        for name, (low, high) in ranges.items():
            if low > high:
                raise UserError(
                    f"randomization.{name} is [{low}, {high}]; the first number must be the smaller one, so swap them"
                )

    def active(self) -> list[str]:
        """Names of the parts that are on."""
        return [name for name in PARTS if is_on(getattr(self, name))]


class Stream:
    """Generators of one episode: one for each part and thing, so that none depends on what else is drawn."""

    def __init__(self, seed: int, episode: EpisodeSpec) -> None:
        if not isinstance(episode.draw, Integral) or episode.draw < 0:
            raise UserError(
                f"draw is {episode.draw!r}; it must be a whole number of at least 0, or None for the nominal scene"
            )
        # everything that an episode's draw depends on, and nothing else
        self._key: str = f"{seed}|{episode.task}|{episode.split}|{episode.layout}|{episode.draw}"

    def __call__(self, *names: str | int) -> np.random.Generator:
        """Generator of a thing, such as ("camera", "front"); equal names give equal numbers."""
        text = "|".join([self._key, *map(str, names)])
        # hashed, so that streams of similar names and numbers are unrelated; str hashes differ between processes
        return np.random.default_rng(int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "little"))


def is_on(part: Any) -> bool:
    """Whether a part of the configuration changes anything."""
    if isinstance(part, TextureRanges):
        return bool(part.patterns)
    if dataclasses.is_dataclass(part):
        return any(is_on(getattr(part, item.name)) for item in dataclasses.fields(part))
    return list(part) not in (SAME, NO_DELAY) if isinstance(part, (list, tuple)) else bool(part)


def draw_delays(config: RandomizationConfig, stream: Stream) -> dict[str, int]:
    """Delays of an episode in control steps by name, without those that are off."""
    found = {}
    for name in ("action_delay", "observation_delay"):
        low, high = getattr(config, name)
        if high:
            # each delay has its own stream: switching one on does not change the other
            found[name] = int(stream(name).integers(low, high + 1))
    return found


def read_randomization(given: RandomizationConfig | Mapping[str, Any] | None) -> RandomizationConfig:
    """Make a configuration from a user's value, and check it."""
    if isinstance(given, RandomizationConfig):
        config = given
    elif not given:  # a robot's own program makes environments without OmegaConf
        config = RandomizationConfig()
    else:
        from mmrl.config import from_values

        config = from_values(RandomizationConfig, dict(given), "randomization")
    check_config(config, "randomization")
    return config


RANGES = ("friction", "mass", "servo_gain", "action_delay", "observation_delay")
PARTS = ("lights", "camera", "colours", "textures", *RANGES, "sensor_noise")
