"""Keyboard, gamepad and SpaceMouse: motions, and presses of a person who watches a robot.

A device is polled once per control step. It reports where its axes stand and which presses have begun since the last
poll, so a press that is shorter than a control step counts, and a key that is held counts once. pygame and
pyspacemouse are imported when a device is opened.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mmrl.errors import RunError, UserError, require_packages

if TYPE_CHECKING:
    from numpy.typing import NDArray

AXES = ("x", "y", "z", "roll", "pitch", "yaw")
"""Axes of a device, each in -1..1, in the robot's base frame: x forward, y left, z up."""
TAKE_OVER, GRIPPER, SUCCESS, FAILURE, REDO, QUIT = "take_over", "gripper", "success", "failure", "redo", "quit"
"""take_over: take control, or hand it back; gripper: close it, or open it; success, failure: end the episode so;
redo: discard the episode and run it again; quit: stop before this control step, to be continued later."""
DEAD_ZONE = 0.12
"""Positions of a stick or a SpaceMouse within this distance of its centre are 0."""
REPORTS = 256
"""Maximum number of reports of a SpaceMouse read in one poll."""


@dataclass(frozen=True)
class DeviceInput:
    """What a person did since the last control step."""

    axes: Mapping[str, float] = field(default_factory=dict)
    """Position of each of `AXES` in -1..1; 0 where missing."""
    presses: tuple[str, ...] = ()
    """Presses that began, in their order, such as `TAKE_OVER`."""


class Device(Protocol):
    """An input device."""

    def poll(self) -> DeviceInput:
        """Read the device without waiting; raises RunError if it is gone."""
        ...

    def show(self, image: NDArray[np.uint8] | None, text: str) -> None:
        """Show the scene (H, W, 3) and a line of text, if the device has a window."""
        ...

    def close(self) -> None:
        """Release the device."""
        ...


class WindowDevice:
    """A pygame window with the scene and a line of text, which must have the focus; it takes the events of a device.

    Args:
        size: (width, height) in pixels of the scene.

    Raises:
        UserError: pygame is missing, or there is no display.
    """

    def __init__(self, size: tuple[int, int] = (512, 512)) -> None:
        require_packages("an intervention by keyboard or gamepad", ["pygame"], "teleop")
        self.pygame: Any = importlib.import_module("pygame")
        self.pygame.init()
        try:
            self._surface = self.pygame.display.set_mode((size[0], size[1] + TEXT_HEIGHT))
        except self.pygame.error as error:
            self.close()
            raise UserError(
                f"no window can be opened ({error}); run this on a machine with a display, or use a SpaceMouse or a "
                "scripted overseer"
            ) from None
        self.pygame.display.set_caption("mmrl robot intervene")
        self._font = self.pygame.font.Font(None, 20)
        self._size = size
        self._axes = dict.fromkeys(AXES, 0.0)

    def poll(self) -> DeviceInput:
        """Read the events; closing the window means quit."""
        presses = []
        for event in self.pygame.event.get():
            press = QUIT if event.type == self.pygame.QUIT else self._read(event)
            presses += [press] if press else []
        return DeviceInput(dict(self._axes), tuple(presses))

    def _read(self, event: Any) -> str | None:
        """Follow the axes, and return the press that an event is."""
        raise NotImplementedError

    def show(self, image: NDArray[np.uint8] | None, text: str) -> None:
        """Draw an image (H, W, 3), scaled to the window, and a line of text below it."""
        pygame = self.pygame
        self._surface.fill((24, 24, 24))
        if image is not None:
            # pygame's arrays are (width, height, 3)
            drawn = pygame.surfarray.make_surface(np.ascontiguousarray(image.transpose(1, 0, 2)))
            self._surface.blit(pygame.transform.scale(drawn, self._size), (0, 0))
        self._surface.blit(self._font.render(text, True, (240, 240, 240)), (6, self._size[1] + 6))
        pygame.display.flip()

    def close(self) -> None:
        """Close the window."""
        self.pygame.quit()


class KeyboardDevice(WindowDevice):
    """Keys of a window; `MOTION_KEYS` and `PRESS_KEYS` list them."""

    def __init__(self, size: tuple[int, int] = (512, 512)) -> None:
        super().__init__(size)
        self._held: set[str] = set()

    def _read(self, event: Any) -> str | None:
        pygame, press = self.pygame, None
        if event.type == pygame.KEYDOWN:
            name = pygame.key.name(event.key)
            self._held.add(name)
            # a held key may send KEYDOWN again where the system repeats keys
            press = None if getattr(event, "repeat", False) else PRESS_KEYS.get(name)
        elif event.type == pygame.KEYUP:
            self._held.discard(pygame.key.name(event.key))
        elif event.type == pygame.WINDOWFOCUSLOST:
            # the window does not see these keys going up
            self._held.clear()
        self._axes = {
            axis: float((up in self._held) - (down in self._held)) for axis, (up, down) in MOTION_KEYS.items()
        }
        return press


class GamepadDevice(WindowDevice):
    """A gamepad that SDL knows, whose buttons therefore have the same places on every make; `BUTTONS` lists them.

    Raises:
        UserError: there is no gamepad, or SDL has no mapping for it.
    """

    def __init__(self, size: tuple[int, int] = (512, 512)) -> None:
        super().__init__(size)
        # `pygame.joystick` numbers the buttons of each make differently
        controllers = importlib.import_module("pygame._sdl2.controller")
        controllers.init()
        joystick = self.pygame.joystick
        found = range(joystick.get_count())
        known = [index for index in found if controllers.is_controller(index)]
        if not known:
            names = ", ".join(joystick.Joystick(index).get_name() for index in found)
            self.close()
            raise UserError(
                f"SDL has no mapping of buttons for {names}; give it one in the environment variable "
                "SDL_GAMECONTROLLERCONFIG"
                if names
                else "no gamepad was found; connect one, or use the keyboard"
            )
        # kept, because SDL closes a gamepad that nobody holds
        self._pad: Any = controllers.Controller(known[0])
        self._sticks = {getattr(self.pygame, f"CONTROLLER_AXIS_{key}"): about for key, about in STICKS.items()}
        self._buttons = {getattr(self.pygame, f"CONTROLLER_BUTTON_{key}"): press for key, press in BUTTONS.items()}

    def _read(self, event: Any) -> str | None:
        pygame = self.pygame
        if event.type == pygame.CONTROLLERAXISMOTION and event.axis in self._sticks:
            axis, side = self._sticks[event.axis]
            self._axes[axis] = side * _beyond(event.value / STICK_RANGE)
        elif event.type == pygame.CONTROLLERBUTTONDOWN:
            return self._buttons.get(event.button)
        elif event.type == pygame.CONTROLLERDEVICEREMOVED:
            raise RunError("the gamepad was disconnected; connect it and run the command again to continue")
        return None


class SpaceMouseDevice:
    """A 3Dconnexion SpaceMouse: all six axes; its first button takes over, its second one moves the gripper.

    Args:
        device: an opened device of pyspacemouse; the first one found when None.
        keys: shows the scene and gives the presses for which a SpaceMouse has no button; when both are None, a window
            if one can be opened.

    Raises:
        UserError: pyspacemouse or the library hidapi is missing, or there is no SpaceMouse.
    """

    def __init__(self, device: Any = None, keys: Device | None = None) -> None:
        self._device, self._keys = device, keys
        if device is None:
            self._device = _open_spacemouse()
            # without pygame or a display, as next to a real robot, its buttons have to do
            with contextlib.suppress(UserError):
                self._keys = keys or KeyboardDevice()
        self._down = [False] * len(SPACEMOUSE_BUTTONS)

    def poll(self) -> DeviceInput:
        """Read all reports since the last poll: they wait in a queue, and the newest one has the position."""
        presses: list[str] = []
        state = self._device.read()
        for _ in range(REPORTS):
            down = [bool(one) for one in list(state.buttons)[: len(SPACEMOUSE_BUTTONS)]]
            begun = zip(SPACEMOUSE_BUTTONS, down, self._down, strict=False)
            presses += [press for press, now, before in begun if now and not before]
            self._down, time = down, state.t
            state = self._device.read()
            # the time of a state is that of its last report
            if state.t == time:
                break
        if not self._device.connected:
            raise RunError("the SpaceMouse was disconnected; connect it and run the command again to continue")
        presses += [] if self._keys is None else self._keys.poll().presses
        return DeviceInput({name: _beyond(getattr(state, name)) for name in AXES}, tuple(presses))

    def show(self, image: NDArray[np.uint8] | None, text: str) -> None:
        """Show the scene, if there is a window."""
        if self._keys is not None:
            self._keys.show(image, text)

    def close(self) -> None:
        """Release the device."""
        self._device.close()
        if self._keys is not None:
            self._keys.close()


def _open_spacemouse() -> Any:
    require_packages("an intervention by SpaceMouse", ["pyspacemouse"], "spacemouse")
    try:
        library = importlib.import_module("pyspacemouse")
    except (ImportError, OSError) as error:
        raise UserError(
            f"pyspacemouse cannot be used: {error}; it needs the system's library hidapi (Debian: libhidapi-hidraw0)"
        ) from None
    try:
        # x forward, y left, z up, as robots have it
        return library.open(axis_convention=library.AxisConvention.ROS)
    except (RuntimeError, ValueError, OSError) as error:
        raise UserError(
            f"no SpaceMouse was found ({error}); connect one, and check that you may read it (udev rules on Linux)"
        ) from None


def _beyond(value: float) -> float:
    """A position without its dead zone, stretched so that the end stays 1."""
    return float(np.sign(value) * max(min(abs(value), 1.0) - DEAD_ZONE, 0.0) / (1.0 - DEAD_ZONE))


TEXT_HEIGHT = 28
STICK_RANGE = 32768.0
MOTION_KEYS = {
    "x": ("w", "s"),
    "y": ("a", "d"),
    "z": ("r", "f"),
    "roll": ("right", "left"),
    "pitch": ("up", "down"),
    "yaw": ("q", "e"),
}
"""Keys for both directions of each axis, the positive one first."""
PRESS_KEYS = {"space": TAKE_OVER, "g": GRIPPER, "return": SUCCESS, "backspace": FAILURE, "n": REDO, "escape": QUIT}
STICKS = {"LEFTY": ("x", -1.0), "LEFTX": ("y", -1.0), "RIGHTY": ("z", -1.0), "RIGHTX": ("yaw", -1.0)}
BUTTONS = {"A": TAKE_OVER, "B": GRIPPER, "Y": SUCCESS, "X": FAILURE, "BACK": REDO, "START": QUIT}
SPACEMOUSE_BUTTONS = (TAKE_OVER, GRIPPER)
DEVICES = {"keyboard": KeyboardDevice, "gamepad": GamepadDevice, "spacemouse": SpaceMouseDevice}
