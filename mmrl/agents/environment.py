"""What an agent sees, and the three methods of an environment.

A class of one's own needs `reset`, `step` and `close`. What they return may be an `Observation`, a dict with `image`,
`images` and `text`, an array, an image of PIL or a text; `as_observation` and `as_outcome` bring all of these into one
form, and say what is wrong with anything else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mmrl.agents.actions import Action
from mmrl.agents.pictures import MalformedError, as_picture

if TYPE_CHECKING:
    from numpy.typing import NDArray

ACTION_ERROR = "action_error"
KEYS = ("image", "images", "text")
"""Of an observation that is a dict."""
MAX_TEXT_CHARS = 200_000
MAX_IMAGES = 64


@dataclass(frozen=True)
class Observation:
    """What the agent sees in one turn."""

    text: str = ""
    images: tuple[NDArray[np.uint8], ...] = ()
    """(H, W, 3) RGB each."""


@dataclass(frozen=True)
class Outcome:
    """What a step led to."""

    observation: Observation
    reward: float
    terminated: bool
    """Whether the episode has come to an end of its own."""
    truncated: bool
    """Whether a time limit of the environment cut it."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Whatever the environment adds; `action_error`, where it is there, says why an action was not executed."""


class Environment(Protocol):
    """The methods that an environment of one's own needs; it lives in a process of its own and serves many episodes.

    It may also have `actions`, a mapping from the names of its actions to a sentence each, for prompts.

    An action that cannot be executed (unknown name, wrong arguments, out of bounds) is the agent's mistake: the
    environment says so in the observation's text and in `info["action_error"]`, and the turn is spent. An exception is
    the environment's own failure: the episode then has no result.
    """

    def reset(self, task: Mapping[str, Any], seed: int) -> Any:
        """Begin an episode."""
        ...

    def step(self, action: Action) -> Any:
        """Execute an action."""
        ...

    def close(self) -> None:
        """Free resources."""
        ...


def as_observation(value: Any) -> Observation:
    """Bring what an environment shows into one form.

    Args:
        value: `Observation`; a dict with `image`, `images` and `text`, each optional; a text; an array (H, W, 3), (H,
            W, 4) over white, (H, W, 1) or (H, W) uint8; an image of PIL; or a list of pictures.
    """
    if isinstance(value, Observation):
        return _observation(value.text, list(value.images))
    if isinstance(value, str):
        return _observation(value, [])
    if isinstance(value, Mapping):
        unknown = [str(key) for key in value if key not in KEYS]
        if unknown or not value:
            raise MalformedError(
                f"the observation is a dict with {', '.join(unknown[:10]) or 'no entries'}; its entries may be "
                f"{', '.join(KEYS)}; put anything else into the information that reset and step may return as well"
            )
        images = _listed(value.get("images"))
        return _observation(value.get("text", ""), [value["image"], *images] if "image" in value else images)
    if isinstance(value, list):
        return _observation("", value)
    return _observation("", [value])


def as_start(value: Any) -> tuple[Observation, Mapping[str, Any]]:
    """Bring what `reset` returned into one form."""
    if isinstance(value, tuple):
        if len(value) != 2 or not isinstance(value[1], Mapping):
            raise MalformedError(
                f"reset returned a tuple of {_kinds(value)}; expected an observation, or a pair of it and a dict"
            )
        return as_observation(value[0]), value[1]
    return as_observation(value), {}


def as_outcome(value: Any) -> Outcome:
    """Bring what `step` returned into one form.

    Raises:
        MalformedError: it is none of these, the reward is not finite, or a flag is no bool.
    """
    if isinstance(value, Outcome):
        value = (value.observation, value.reward, value.terminated, value.truncated, value.info)
    if not isinstance(value, tuple) or not 3 <= len(value) <= 5:
        what = f"a tuple of {_kinds(value)}" if isinstance(value, tuple) else f"a {type(value).__name__}"
        raise MalformedError(
            f"step returned {what}; expected (observation, reward, ended), or Gymnasium's (observation, reward, "
            "terminated, truncated, information)"
        )
    observation, reward, terminated = value[:3]
    truncated = value[3] if len(value) == 5 else False
    info = value[-1] if len(value) > 3 else {}
    if not isinstance(info, Mapping):
        raise MalformedError(f"step returned {_kinds(value)}; the last of {len(value)} values must be a dict")
    if info.get(ACTION_ERROR, "") is None:  # said in every turn by some, None where all was well
        info = {key: entry for key, entry in info.items() if key != ACTION_ERROR}
    return Outcome(
        as_observation(observation), _reward(reward), _flag("ended", terminated), _flag("truncated", truncated), info
    )


def _observation(text: Any, images: list[Any]) -> Observation:
    if not isinstance(text, str):
        raise MalformedError(f"the observation's text is a {type(text).__name__}; expected a str")
    if len(text) > MAX_TEXT_CHARS:
        raise MalformedError(f"the observation's text has {len(text)} characters; at most {MAX_TEXT_CHARS} are allowed")
    if len(images) > MAX_IMAGES:
        raise MalformedError(f"the observation has {len(images)} pictures; at most {MAX_IMAGES} are allowed")
    return Observation(text, tuple(as_picture(image) for image in images))


def _listed(images: Any) -> list[Any]:
    if images is None:
        return []
    if isinstance(images, (list, tuple)) or (isinstance(images, np.ndarray) and images.ndim == 4):
        return list(images)
    raise MalformedError(f"images is a {type(images).__name__}; expected a list of pictures, or (T, H, W, 3) uint8")


def _reward(value: Any) -> float:
    try:
        number = float(np.asarray(value, np.float64).item())
    except (TypeError, ValueError, OverflowError):
        raise MalformedError(f"the reward is {value!r:.80}; expected a number") from None
    if not math.isfinite(number):
        raise MalformedError(f"the reward is {number}; expected a finite number")
    return number


def _flag(name: str, value: Any) -> bool:
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise MalformedError(f"{name} is {value!r:.80}; expected True or False as the third value of step")


def _kinds(values: tuple[Any, ...]) -> str:
    return ", ".join(type(value).__name__ for value in values[:8]) or "nothing"
