"""A window onto a tabletop scene: MuJoCo's passive viewer on the presented scene.

The mouse turns the view. The viewer can also push things with it, which only changes the display.
"""

from __future__ import annotations

import os
import platform
import time
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.errors import UserError
from robotics.scenes.looks import CAMERA_FOVY, CAMERA_POS, CAMERA_TARGET
from robotics.scenes.presentation import PresentedScene
from robotics.scenes.videos import Caption

if TYPE_CHECKING:
    import mujoco

    from robotics.scenes.scene import Scene


class SceneViewer:
    """A window that shows a scene in real time."""

    def __init__(self, scene: Scene) -> None:
        check_display()
        import mujoco.viewer

        self._presented = PresentedScene(scene)
        self._presented.model.vis.global_.fovy = CAMERA_FOVY
        try:
            self._handle: Any = mujoco.viewer.launch_passive(
                self._presented.model, self._presented.data, show_left_ui=False, show_right_ui=False
            )
        except RuntimeError as error:  # on macOS outside of mjpython
            raise UserError(f"the viewer cannot be opened: {error}. {WITHOUT_WINDOW}") from error
        self._lib = mujoco
        self._due_s = self._drawn_s = time.monotonic()
        with self._handle.lock():
            camera, back = self._handle.cam, CAMERA_POS - CAMERA_TARGET
            camera.type, camera.lookat[:] = mujoco.mjtCamera.mjCAMERA_FREE, CAMERA_TARGET
            camera.distance = distance = float(np.linalg.norm(back))
            camera.azimuth = float(np.degrees(np.arctan2(-back[1], -back[0])))
            camera.elevation = -float(np.degrees(np.arcsin(back[2] / distance)))

    @property
    def is_open(self) -> bool:
        """Whether the user has not closed the window."""
        return bool(self._handle.is_running())

    def show(self, data: mujoco.MjData, caption: Caption, wait_s: float = 0.0) -> None:
        """Show a state, unless the window is closed or drawing is too slow for the simulated time."""
        if not self.is_open or self._skips(caption, wait_s):
            return
        with self._handle.lock():
            self._presented.show(data, caption.outcome)
        place = self._lib.mjtGridPos.mjGRID_TOPLEFT
        if hasattr(self._handle, "set_texts"):
            self._handle.set_texts((None, place, caption.text, caption.ending))
        self._handle.sync()
        self._drawn_s = time.monotonic()
        time.sleep(max(0.0, self._due_s - self._drawn_s))

    def close(self) -> None:
        """Close the window."""
        self._handle.close()

    def _skips(self, caption: Caption, wait_s: float) -> bool:
        """Whether the state is late and a newer one will follow soon; starts and ends are always shown."""
        now = time.monotonic()
        begins = caption.seconds == 0.0
        self._due_s = now if begins else max(self._due_s + wait_s, now - MOST_LATE_S)
        late = now > self._due_s + wait_s
        return late and not (begins or caption.outcome) and now < self._drawn_s + LONGEST_STILL_S


def check_display() -> None:
    """Raise UserError with advice if no window can be opened."""
    if platform.system() == "Linux" and not any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY")):
        raise UserError(f"no display available: neither DISPLAY nor WAYLAND_DISPLAY is set. {WITHOUT_WINDOW}")
    try:
        import glfw
    except ImportError as error:
        raise UserError(
            f"a window needs the package glfw, which comes with mujoco: {error}. {WITHOUT_WINDOW}"
        ) from error
    # The viewer's own thread would wait forever for a window that never opens.
    with warnings.catch_warnings(record=True) as reasons:
        warnings.simplefilter("always")
        if not glfw.init():
            why = ", ".join(str(reason.message) for reason in reasons) or "GLFW gives no reason"
            raise UserError(f"no window can be opened on the display: {why}. {WITHOUT_WINDOW}")


MOST_LATE_S = 0.5
"""Delay beyond which the clock is reset instead of skipping states to catch up."""
LONGEST_STILL_S = 0.1
"""Maximum time between two images, however late they are."""
WITHOUT_WINDOW = (
    "Write a video instead, render_mode='rgb_array' or `mmrl sim play TASK --video film.mp4`, or provide a display: "
    "ssh -X, or xvfb-run for a virtual one"
)
