"""Keyboard and gamepad on events of pygame, and a SpaceMouse whose reports wait in a queue."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from mmrl.errors import RunError, UserError
from robotics.interventions import devices
from robotics.interventions.devices import (
    DEAD_ZONE,
    FAILURE,
    GRIPPER,
    QUIT,
    SUCCESS,
    TAKE_OVER,
    GamepadDevice,
    KeyboardDevice,
    SpaceMouseDevice,
)
from robotics.interventions.overseers import OverseerConfig, open_overseer
from tests.robotics.interventions.scripted import FakeDevice, pressed


@pytest.fixture
def pygame(monkeypatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    monkeypatch.setenv("SDL_AUDIODRIVER", "dummy")
    return pytest.importorskip("pygame", reason="needs pip install 'mmrl-suite[teleop]'")


@pytest.fixture
def device(pygame):
    found = KeyboardDevice((64, 64))
    pygame.event.clear()
    yield found
    found.close()


def key(device, kind, name, **about):
    pygame = device.pygame
    pygame.event.post(pygame.event.Event(getattr(pygame, kind), key=pygame.key.key_code(name), **about))


def test_a_held_key_moves_until_it_is_released(device):
    key(device, "KEYDOWN", "w")
    key(device, "KEYDOWN", "q")
    assert device.poll().axes | {} == {"x": 1.0, "y": 0.0, "z": 0.0, "roll": 0.0, "pitch": 0.0, "yaw": 1.0}
    key(device, "KEYUP", "w")
    assert device.poll().axes["x"] == 0.0
    assert device.poll().axes["yaw"] == 1.0
    key(device, "KEYDOWN", "e")
    # opposite keys cancel
    assert device.poll().axes["yaw"] == 0.0


def test_a_press_counts_once_however_long_it_is_held(device):
    key(device, "KEYDOWN", "space")
    key(device, "KEYUP", "space")
    # shorter than a control step, and still a press
    assert device.poll().presses == (TAKE_OVER,)
    key(device, "KEYDOWN", "g")
    key(device, "KEYDOWN", "g", repeat=True)
    assert device.poll().presses == (GRIPPER,)
    assert device.poll().presses == ()


def test_every_key_of_the_table_exists(device):
    for name in (*sum(devices.MOTION_KEYS.values(), ()), *devices.PRESS_KEYS):
        assert device.pygame.key.name(device.pygame.key.key_code(name)) == name


def test_leaving_the_window_releases_all_keys_and_closing_it_quits(device):
    key(device, "KEYDOWN", "w")
    assert device.poll().axes["x"] == 1.0
    device.pygame.event.post(device.pygame.event.Event(device.pygame.WINDOWFOCUSLOST))
    assert device.poll().axes["x"] == 0.0
    device.pygame.event.post(device.pygame.event.Event(device.pygame.QUIT))
    assert device.poll().presses == (QUIT,)


def test_the_window_shows_the_image_and_the_text(device):
    image = np.zeros((8, 8, 3), np.uint8)
    image[:, 4:, 0] = 255
    device.show(image, "step 3: YOU")
    shown = device.pygame.surfarray.array3d(device.pygame.display.get_surface())
    assert shown[48, 32].tolist() == [255, 0, 0]
    assert shown[16, 32].tolist() == [0, 0, 0]
    assert shown[:, 64:].max() > 200


class Pads:
    """`pygame._sdl2.controller` with one gamepad."""

    def __init__(self, known=True):
        self.known = known

    def init(self):
        pass

    def is_controller(self, index):
        return self.known

    def Controller(self, index):  # noqa: N802 - pygame's name
        return self


@pytest.fixture
def pads(pygame, monkeypatch):
    found = Pads()
    monkeypatch.setitem(sys.modules, "pygame._sdl2.controller", found)
    monkeypatch.setattr(pygame.joystick, "get_count", lambda: 1)
    monkeypatch.setattr(pygame.joystick, "Joystick", lambda index: SimpleNamespace(get_name=lambda: "Odd Pad"))
    return found


def test_sticks_and_buttons_of_a_gamepad(pygame, pads):
    device = GamepadDevice((64, 64))
    pygame.event.clear()

    def post(kind, **about):
        pygame.event.post(pygame.event.Event(getattr(pygame, kind), **about))

    post("CONTROLLERAXISMOTION", axis=pygame.CONTROLLER_AXIS_LEFTY, value=-32768)
    post("CONTROLLERAXISMOTION", axis=pygame.CONTROLLER_AXIS_RIGHTX, value=int(0.9 * DEAD_ZONE * 32768))
    post("CONTROLLERBUTTONDOWN", button=pygame.CONTROLLER_BUTTON_A)
    post("CONTROLLERBUTTONDOWN", button=pygame.CONTROLLER_BUTTON_Y)
    post("CONTROLLERBUTTONDOWN", button=pygame.CONTROLLER_BUTTON_X)
    read = device.poll()
    # pushed away from the person is forward; within the dead zone is nothing
    assert (read.axes["x"], read.axes["yaw"]) == (1.0, 0.0)
    assert read.presses == (TAKE_OVER, SUCCESS, FAILURE)
    # a stick stays where it is until it moves
    assert device.poll() == type(read)(read.axes, ())
    post("CONTROLLERDEVICEREMOVED", instance_id=0)
    with pytest.raises(RunError, match="gamepad was disconnected"):
        device.poll()
    device.close()


def test_missing_and_unknown_gamepads_are_refused(pygame, pads, monkeypatch):
    pads.known = False
    with pytest.raises(UserError, match=r"no mapping of buttons for Odd Pad; .*SDL_GAMECONTROLLERCONFIG"):
        GamepadDevice((64, 64))
    monkeypatch.setattr(pygame.joystick, "get_count", lambda: 0)
    with pytest.raises(UserError, match="no gamepad was found; connect one"):
        GamepadDevice((64, 64))
    # the window of a device that is missing is closed
    assert not pygame.display.get_init()


class Mouse:
    """A SpaceMouse: each read takes one report from its queue, or returns the last state."""

    connected = True

    def __init__(self):
        self.queue = []
        self.state = SimpleNamespace(t=0.0, x=0.0, y=0.0, z=0.0, roll=0.0, pitch=0.0, yaw=0.0, buttons=[0, 0])
        self.closed = False

    def send(self, **about):
        self.queue.append(about)

    def read(self):
        if self.queue:
            vars(self.state).update(self.queue.pop(0), t=self.state.t + 0.01)
        return self.state

    def close(self):
        self.closed = True


def test_a_spacemouse_gives_its_newest_position_and_every_press_between():
    mouse = Mouse()
    keys = FakeDevice([pressed(SUCCESS), pressed()])
    device = SpaceMouseDevice(mouse, keys)
    mouse.send(x=0.2)
    mouse.send(buttons=[1, 0])
    mouse.send(buttons=[0, 0], x=1.0, yaw=-1.0, z=0.5 * DEAD_ZONE)
    read = device.poll()
    assert (read.axes["x"], read.axes["yaw"], read.axes["z"]) == (1.0, -1.0, 0.0)
    assert read.presses == (TAKE_OVER, SUCCESS)
    assert not mouse.queue
    mouse.send(buttons=[0, 1])
    mouse.send(buttons=[0, 1])
    assert device.poll().presses == (GRIPPER,)
    device.show(None, "hello")
    device.close()
    assert (mouse.closed, keys.closed, keys.shown) == (True, True, ["hello"])


def test_a_spacemouse_that_is_gone_ends_the_session():
    mouse = Mouse()
    device = SpaceMouseDevice(mouse)
    mouse.connected = False
    with pytest.raises(RunError, match="SpaceMouse was disconnected"):
        device.poll()


def test_missing_packages_and_devices_are_named(monkeypatch):
    monkeypatch.setattr("mmrl.errors.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs pygame, .*mmrl-suite\[teleop\]"):
        open_overseer(OverseerConfig(kind="keyboard"))
    with pytest.raises(UserError, match=r"needs pyspacemouse, .*mmrl-suite\[spacemouse\]"):
        open_overseer(OverseerConfig(kind="spacemouse"))
    with pytest.raises(UserError, match="kind is joystick; a scripted overseer is one of distance, random"):
        open_overseer(OverseerConfig(kind="joystick"))


def test_a_machine_without_a_spacemouse_is_told_so(monkeypatch):
    monkeypatch.setattr(devices, "require_packages", lambda *names: None)

    def nothing(**options):
        raise RuntimeError("No connected devices found")

    library = SimpleNamespace(open=nothing, AxisConvention=SimpleNamespace(ROS="ros"))
    monkeypatch.setitem(sys.modules, "pyspacemouse", library)
    with pytest.raises(UserError, match=r"no SpaceMouse was found .No connected devices found.*udev"):
        open_overseer(OverseerConfig(kind="spacemouse"))
