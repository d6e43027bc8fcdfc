"""Options of `mmrl serve`, and the reading of observations from messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mmrl.errors import UserError
from mmrl.fields import bounded, choice
from robotics.policies.base.action_policy import PolicyInputs
from robotics.policies.base.inpainting import GUIDANCE
from robotics.serving.messages import BadMessageError, describe_value
from robotics.sim.interface import RobotInterface, as_rate

if TYPE_CHECKING:
    from numpy.typing import NDArray


UNITS = ("environment", "normalised")
RATE_KEY = "control_hz"
"""Entry with the robot's control rate (optional); the names of its state entries can be sent as `state_key` plus
`_names`."""
RUNNING_KEYS = ("running/actions", "running/delay")
"""Entries with the rest of the chunk that the robot executes (n, D), in the units of responses, and with the number of
its control steps that pass before the response arrives."""
STOPS = ("zero", "hold")
LONGEST_PROMPT = 10_000
"""Maximum number of characters of an instruction."""


@dataclass
class ServeConfig:
    """Options of `mmrl serve`."""

    temperature: float = bounded(0.0, at_least=0)
    """Sampling temperature of actions; 0 = most likely actions, as in `greedy` evaluation."""
    seed: int = 0
    """Random seed for stochastic policies."""
    max_batch: int = bounded(8, at_least=1)
    """Maximum number of waiting observations to process in one call; 1 = one at a time."""
    image_key: str = "observation/image"
    """Entry of a message with the camera image. Nested entries are joined with `/`."""
    view_keys: list[str] = field(default_factory=lambda: ["observation/wrist_image"])
    """Entries with the images of additional cameras, in the order expected by the policy; superfluous ones are
    ignored."""
    state_key: str = "observation/state"
    """Entry with the robot's state."""
    prompt_key: str = "prompt"
    """Entry with the instruction."""
    action_units: str = choice("environment", UNITS)
    """environment: actions are in the units of the training environment, within the bounds of its action space;
    normalised: in -1..1. The metadata contains the bounds."""
    prompt: str = ""
    """Default instruction; if empty, messages without an instruction are rejected."""
    log_every_s: float = bounded(60.0, above=0)
    """Seconds between log lines with latencies."""
    latency_budget_ms: float = bounded(0.0, at_least=0)
    """Milliseconds for a response, which the metadata passes on to robots; slower responses are counted as late. 0 =
    no budget."""
    stop: list[str] = field(default_factory=list)
    """Action that stops the robot, for its watchdog: zero (of motions) or hold (of positions), once or for each entry
    of an action. Empty: as the tabletop declares it; unknown for other robots, whose clients then have to say it."""
    guidance: float = bounded(GUIDANCE, above=0)
    """Maximum weight with which a flow policy is pulled towards the running chunk that a robot sends."""

    def validate(self) -> None:
        """Check that the entries have different names, and the words for stopping; raises ValueError."""
        if set(self.stop) - set(STOPS):
            raise ValueError(f"stop is {', '.join(self.stop)}; each entry must be one of {', '.join(STOPS)}")
        keys = (self.image_key, self.state_key, self.prompt_key, *self.view_keys)
        if len(set(keys)) < len(keys) or not all(keys):
            raise ValueError(
                f"image_key, state_key, prompt_key and view_keys are {', '.join(map(repr, keys))}; the names must "
                "differ"
            )


@dataclass(frozen=True)
class ObservationFormat:
    """Entries of a message that a policy reads."""

    image_size: tuple[int | None, int | None] | None  # (H, W), None in it for any; None without images
    state_size: int | None  # S; None without a state
    config: ServeConfig  # names of the entries, and the default instruction
    views: int = 0  # V; their entries are the first of `config.view_keys`
    past: int = 0  # P observations before the present one; a robot sends P + 1 of them, or one
    interface: RobotInterface = field(default_factory=RobotInterface)  # what the policy was trained with

    def __post_init__(self) -> None:
        if self.views > len(self.config.view_keys):
            raise UserError(
                f"the policy uses {self.views} cameras besides the first, but view_keys lists "
                f"{len(self.config.view_keys)}: {', '.join(self.config.view_keys) or 'none'}"
            )

    def read(self, message: Mapping[str, Any]) -> PolicyInputs:
        """Make the inputs of one row."""
        problems: list[str] = []
        image = self._image(message, self.config.image_key, problems)
        views = []
        for key in self._view_keys:
            view = self._image(message, key, problems)
            if view is not None and image is not None and view.shape[1:] != image.shape[1:]:
                problems.append(
                    f"{key} has the shape {view.shape[1:]}; expected {image.shape[1:]}, the shape of the image"
                )
            elif view is not None:
                views.append(view)
        state = self._state(message, problems)
        prompt = self._prompt(message, problems)
        problems += self._contradictions(message)
        counts = {len(part) for part in (image, state, *views) if part is not None}
        if len(counts) > 1:
            problems.append(
                f"some entries contain {self.past + 1} observations in a row and others only one; send the same "
                "number for all"
            )
        if problems:
            raise BadMessageError(f"{'; '.join(problems)}. The message has: {', '.join(message)[:500] or 'nothing'}")
        parts = {"images": image, "state": state, "views": np.stack(views, axis=1) if views else None}
        rows = {name: None if part is None else torch.tensor(part) for name, part in parts.items()}
        past = {f"past_{name}": _before(row) for name, row in rows.items()}
        present = {name: None if row is None else row[-1:] for name, row in rows.items()}
        return PolicyInputs(instructions=(prompt,), **present, **past)

    def unused(self, message: Mapping[str, Any]) -> list[str]:
        """Entries that are not read."""
        return sorted(set(message) - {*self.describe(), self._names_key, RATE_KEY, *RUNNING_KEYS})

    def describe(self) -> dict[str, Any]:
        """Entries that are read, with dtype and shape, None in it for any number, and the names of training.

        With `n_obs_steps`, as many may be stacked along an axis before those of the shape.
        """
        image = {}
        state = {}
        known = self.interface
        if self.image_size is not None:
            keys = (self.config.image_key, *self._view_keys)
            cameras = dict(zip(keys, known.cameras or (), strict=False))
            named = {key: {"camera": cameras[key]} if cameras.get(key) else {} for key in keys}
            image = {key: self._kind("uint8", *self.image_size, 3) | named[key] for key in keys}
        if self.state_size is not None:
            names = {"names": list(known.state)} if known.state else {}
            state = {self.config.state_key: self._kind("float32", self.state_size) | names}
        return {**image, **state, self.config.prompt_key: {"dtype": "text", "default": self.config.prompt or None}}

    def example(self) -> PolicyInputs:
        """Inputs of zeros with a past, and 64 pixels if any number will do."""
        image = np.zeros([pixels or 64 for pixels in self.image_size or (0, 0)] + [3], np.uint8)
        zeros = dict.fromkeys((self.config.image_key, *self._view_keys), image)
        zeros |= {self.config.state_key: np.zeros(self.state_size or 0, np.float32)}
        if self.past:
            zeros = {key: np.stack([part] * (self.past + 1)) for key, part in zeros.items()}
        return self.read({**zeros, self.config.prompt_key: self.config.prompt or "test"})

    @property
    def _names_key(self) -> str:
        return f"{self.config.state_key}_names"

    def _contradictions(self, message: Mapping[str, Any]) -> list[str]:
        """Differences between what a robot says of itself and what the policy was trained with."""
        names, rate = message.get(self._names_key), message.get(RATE_KEY)
        if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            return [f"{self._names_key} is {describe_value(names)}; expected a list of texts"]
        if rate is not None and as_rate(rate) is None:
            return [f"{RATE_KEY} is {describe_value(rate)}; expected control steps per second, above 0"]
        robot = RobotInterface(state=None if names is None else tuple(names), control_hz=as_rate(rate))
        found = self.interface.differences(robot)
        return [text.format("what the policy was trained with", "the robot") for text in found.values()]

    @property
    def _view_keys(self) -> list[str]:
        return self.config.view_keys[: self.views]

    def _image(self, message: Mapping[str, Any], key: str, problems: list[str]) -> NDArray[np.uint8] | None:
        """Images (n, H, W, 3) of a camera."""
        if self.image_size is None:
            return None
        height, width = self.image_size
        shape = ", ".join("any" if pixels is None else str(pixels) for pixels in self.image_size) + ", 3"

        def fits(rows: NDArray[Any]) -> bool:
            sides = height in (None, rows.shape[1]) and width in (None, rows.shape[2])
            return rows.dtype == np.uint8 and rows.shape[3] == 3 and min(rows.shape) > 0 and sides

        expected = f"uint8 ({shape}){self._or_stacked(shape)}, RGB"
        return self._rows(message, key, 3, fits, expected, problems)

    def _state(self, message: Mapping[str, Any], problems: list[str]) -> NDArray[np.float32] | None:
        if self.state_size is None:
            return None
        key, expected = self.config.state_key, f"float32 ({self.state_size},){self._or_stacked(str(self.state_size))}"

        def fits(rows: NDArray[Any]) -> bool:
            return rows.shape[1] == self.state_size and rows.dtype.kind in "iuf"

        rows = self._rows(message, key, 1, fits, expected, problems)
        if rows is None:
            return None
        with np.errstate(over="ignore"):
            state = rows.astype(np.float32)
        if not np.isfinite(state).all():
            entries = sorted({int(entry) for entry in np.argwhere(~np.isfinite(state))[:, 1]})
            problems.append(f"{key} is not finite in the entries {entries[:10]}; expected finite float32 numbers")
        return state

    def _prompt(self, message: Mapping[str, Any], problems: list[str]) -> str:
        key = self.config.prompt_key
        value = message.get(key, self.config.prompt or None)
        if value is None:
            problems.append(
                f"{key} is missing; expected the instruction as a text, unless the server has a default (prompt=)"
            )
        elif not isinstance(value, str):
            problems.append(f"{key} is {describe_value(value)}; expected a text")
        elif len(value) > LONGEST_PROMPT:
            problems.append(f"{key} has {len(value)} characters; at most {LONGEST_PROMPT} are allowed")
        return str(value)

    def _rows(
        self,
        message: Mapping[str, Any],
        key: str,
        axes: int,
        fits: Callable[[NDArray[Any]], bool],
        expected: str,
        problems: list[str],
    ) -> NDArray[Any] | None:
        """An entry of `axes` axes, alone or P + 1 of them, as (n, ...); None and a line in `problems` if it is not."""
        value = message.get(key)
        what = f"{key} is missing" if key not in message else f"{key} is {describe_value(value)}"
        if isinstance(value, np.ndarray):
            stacked = self.past and value.ndim == axes + 1 and len(value) == self.past + 1
            rows = value[None] if value.ndim == axes else value if stacked else None
            if rows is not None and fits(rows):
                return rows
        elif key in message:
            expected = f"an array {expected}"
        problems.append(f"{what}; expected {expected}")
        return None

    def _or_stacked(self, shape: str) -> str:
        return f" or ({self.past + 1}, {shape}), oldest first" if self.past else ""

    def _kind(self, dtype: str, *shape: int | None) -> dict[str, Any]:
        several = {"n_obs_steps": self.past + 1} if self.past else {}
        return {"dtype": dtype, "shape": list(shape), **several}


def _before(rows: torch.Tensor | None) -> torch.Tensor | None:
    """The past (1, P, ...) of stacked observations (n, ...); None without one."""
    return None if rows is None or len(rows) == 1 else rows[:-1][None]
