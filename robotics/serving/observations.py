"""From a robot's message to the inputs of a policy, and what such a message has to hold.

Shapes: H x W pixels, S state entries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mmrl.errors import UserError
from robotics.serving.messages import BadMessageError, describe_value
from robotics.vla.policy import PolicyInputs

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from robotics.serving.settings import ServeConfig

__all__ = ["ObservationFormat"]


@dataclass(frozen=True)
class ObservationFormat:
    """What a policy reads of a message."""

    image_size: tuple[int | None, int | None] | None
    """(H, W) of the image, None for any number of pixels; None for a policy that gets no image."""
    state_size: int | None
    """S; None for a policy that gets no state."""
    config: ServeConfig
    """Names of the entries and the usual instruction."""
    views: int = 0
    """V, further cameras; their entries are the first of `config.view_keys`."""

    def __post_init__(self) -> None:
        if self.views > len(self.config.view_keys):
            raise UserError(
                f"the policy sees {self.views} cameras beside the first, but view_keys names "
                f"{len(self.config.view_keys)}: {', '.join(self.config.view_keys) or 'none'}"
            )

    def read(self, message: Mapping[str, Any]) -> PolicyInputs:
        """Make the inputs of one row.

        Args:
            message: entries as `robotics.serving.messages.unpack` returns them.

        Returns:
            The inputs, on the CPU.

        Raises:
            BadMessageError: entries are missing or of another kind; all of them are named.
        """
        problems: list[str] = []
        image = self._image(message, self.config.image_key, problems)
        views = self._views(message, image, problems)
        state = self._state(message, problems)
        prompt = self._prompt(message, problems)
        if problems:
            raise BadMessageError(f"{'; '.join(problems)}. The message has: {', '.join(message)[:500] or 'nothing'}")
        return PolicyInputs(
            images=None if image is None else torch.from_numpy(image.copy())[None],
            state=None if state is None else torch.from_numpy(state)[None],
            instructions=(prompt,),
            views=torch.from_numpy(np.stack(views))[None] if views else None,
        )

    def unused(self, message: Mapping[str, Any]) -> list[str]:
        """Entries that the policy does not read."""
        return sorted(set(message) - set(self.describe()))

    def describe(self) -> dict[str, Any]:
        """Entries that are read, with dtype and shape; None in a shape stands for any number."""
        image = {} if self.image_size is None else {self.config.image_key: _kind("uint8", (*self.image_size, 3))}
        image |= {} if self.image_size is None else dict.fromkeys(self._view_keys, image[self.config.image_key])
        state = {} if self.state_size is None else {self.config.state_key: _kind("float32", (self.state_size,))}
        return {**image, **state, self.config.prompt_key: {"dtype": "text", "default": self.config.prompt or None}}

    def example(self) -> PolicyInputs:
        """Inputs of zeros, with 64 pixels where any number will do."""
        size = None if self.image_size is None else [pixels or 64 for pixels in self.image_size]
        return PolicyInputs(
            images=None if size is None else torch.zeros((1, *size, 3), dtype=torch.uint8),
            state=None if self.state_size is None else torch.zeros(1, self.state_size),
            instructions=(self.config.prompt or "test",),
            views=torch.zeros((1, self.views, *size, 3), dtype=torch.uint8) if size and self.views else None,
        )

    @property
    def _view_keys(self) -> list[str]:
        return self.config.view_keys[: self.views]

    def _image(self, message: Mapping[str, Any], key: str, problems: list[str]) -> NDArray[np.uint8] | None:
        if self.image_size is None:
            return None
        shape = ", ".join("any" if pixels is None else str(pixels) for pixels in self.image_size)
        value = self._entry(message, key, f"uint8 ({shape}, 3), rows of RGB pixels", problems)
        if value is None:
            return None
        fits = value.dtype == np.uint8 and value.ndim == 3 and value.shape[2] == 3 and min(value.shape) > 0
        if fits and all(want in (None, have) for want, have in zip(self.image_size, value.shape, strict=False)):
            return value
        problems.append(f"{key} is {describe_value(value)}; expected uint8 ({shape}, 3), RGB")
        return None

    def _views(
        self, message: Mapping[str, Any], image: NDArray[np.uint8] | None, problems: list[str]
    ) -> list[NDArray[np.uint8]]:
        """Images of the further cameras; they have the image's size."""
        found = []
        for key in self._view_keys:
            view = self._image(message, key, problems)
            if view is not None and image is not None and view.shape != image.shape:
                problems.append(f"{key} has the shape {view.shape}; expected {image.shape}, that of the image")
            elif view is not None:
                found.append(view)
        return found

    def _state(self, message: Mapping[str, Any], problems: list[str]) -> NDArray[np.float32] | None:
        if self.state_size is None:
            return None
        key, expected = self.config.state_key, f"float32 ({self.state_size},)"
        value = self._entry(message, key, expected, problems)
        if value is None:
            return None
        if value.shape != (self.state_size,) or value.dtype.kind not in "iuf":
            problems.append(f"{key} is {describe_value(value)}; expected {expected}")
            return None
        with np.errstate(over="ignore"):
            state = value.astype(np.float32)
        if not np.isfinite(state).all():
            places = np.flatnonzero(~np.isfinite(state)).tolist()
            problems.append(f"{key} is not finite in the entries {places[:10]}; expected finite float32 numbers")
        return state

    def _prompt(self, message: Mapping[str, Any], problems: list[str]) -> str:
        key = self.config.prompt_key
        value = message.get(key, self.config.prompt or None)
        if value is None:
            problems.append(
                f"there is no {key}; expected a text, the instruction, unless the server has its own (prompt=)"
            )
        elif not isinstance(value, str):
            problems.append(f"{key} is {describe_value(value)}; expected a text")
        return str(value)

    @staticmethod
    def _entry(message: Mapping[str, Any], key: str, expected: str, problems: list[str]) -> NDArray[Any] | None:
        """The array of an entry; None and a line in `problems` where there is none."""
        if key not in message:
            problems.append(f"there is no {key}; expected {expected}")
        elif not isinstance(message[key], np.ndarray):
            problems.append(f"{key} is {describe_value(message[key])}; expected an array {expected}")
        else:
            array: NDArray[Any] = message[key]
            return array
        return None


def _kind(dtype: str, shape: tuple[int | None, ...]) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape)}
