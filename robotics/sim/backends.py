"""Choice of the OpenGL renderer: each is tried in a separate process, because a broken driver may crash it.

MuJoCo reads `MUJOCO_GL` when it is imported and uses a window library if it is unset, which fails on a machine without
a screen. Here contexts are opened directly, so the choice can also be made after the import. Processes that load other
environments guess, see `mmrl.workers.loading.choose_renderer`.
"""

from __future__ import annotations

import functools
import importlib
import os
import platform
import signal
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from mmrl.errors import UserError
from mmrl.workers.loading import GUESSED
from mmrl.workers.memory import device_variables

PROBE_SECONDS = 60.0
OFF = ("disable", "disabled", "off", "false", "0")
DEBIAN_PACKAGES = {"egl": "libegl1", "osmesa": "libosmesa6"}


@dataclass(frozen=True)
class Backend:
    """A renderer that works in this environment."""

    name: str
    """egl, osmesa, glfw or cgl: its value of `MUJOCO_GL`."""
    device: str
    """Device as described by OpenGL, such as `llvmpipe (LLVM 15.0.6, 256 bits), 4.5 ... Mesa 22.3.6`."""

    @property
    def on_cpu(self) -> bool:
        """Whether it renders on the CPU."""
        return self.name == "osmesa" or any(word in self.device.lower() for word in SOFTWARE)


SOFTWARE = ("llvmpipe", "softpipe", "swrast", "software")
"""Words in the device of renderers that draw on the CPU."""


def find_backend(preferred: str | None = None) -> Backend | None:
    """Choose a renderer and set `MUJOCO_GL` to it, for child processes and for mujoco's own renderer.

    Args:
        preferred: the only one to try; None = that of `MUJOCO_GL`, or all of this system, EGL before OSMesa.

    Returns:
        The first that rendered an image in a separate process; None if none did or `MUJOCO_GL` is off.
    """
    for name in _candidates(preferred):
        backend, _ = probe_backend(name)
        if backend is not None:
            os.environ["MUJOCO_GL"] = backend.name
            os.environ.pop(GUESSED, None)
            return backend
    return None


def require_backend(preferred: str | None = None) -> Backend:
    """Choose a renderer as `find_backend` does; raises UserError with each attempt and the packages that help."""
    backend = find_backend(preferred)
    if backend is not None:
        return backend
    tried = [f"  {name}: {probe_backend(name)[1]}" for name in _candidates(preferred)]
    asked = f"MUJOCO_GL={os.environ['MUJOCO_GL']}" if "MUJOCO_GL" in os.environ else "MUJOCO_GL is not set"
    packages = " ".join(DEBIAN_PACKAGES.values())
    lines = [
        f"no OpenGL renderer works on this machine without a screen ({asked})" + ("; tried:" if tried else ""),
        *tried,
        f"on Debian or Ubuntu: sudo apt-get install {packages}; states without images need no renderer",
    ]
    raise UserError("\n".join(lines))


PROBED = "MMRL_PROBED_RENDERER"
"""Environment variable with a parent process's result, as name|device."""


@functools.cache
def probe_backend(name: str) -> tuple[Backend | None, str]:
    """Render a small image in a separate process, once for each name; children take the result from `PROBED`."""
    probed, _, device = os.environ.get(PROBED, "").partition("|")
    if probed == name:
        return Backend(name, device), ""
    # PyOpenGL would keep the platform that this process has chosen
    environment = {key: value for key, value in os.environ.items() if key != "PYOPENGL_PLATFORM"}
    environment["MUJOCO_GL"] = name
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROBE],
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PROBE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None, f"hung for {PROBE_SECONDS:.0f} s"
    found = [line.removeprefix("device: ") for line in done.stdout.splitlines() if line.startswith("device: ")]
    # A driver that rendered but dies when its process ends would take a training run's exit code with it.
    if done.returncode == 0 and found:
        return Backend(name, found[0]), ""
    return None, _why(done.returncode, done.stderr)


def open_context(name: str, width: int, height: int) -> Any:
    """Open an off-screen OpenGL context of a probed renderer, in pixels; it belongs to the calling thread."""
    _check_name(name)
    for variable, device in device_variables().items():
        if variable == "MUJOCO_EGL_DEVICE_ID":
            os.environ.setdefault(variable, device)
    return importlib.import_module(CONTEXT_MODULES[name]).GLContext(width, height)


def _candidates(preferred: str | None) -> tuple[str, ...]:
    if preferred is not None:
        _check_name(preferred)
        return (preferred,)
    asked = os.environ.get("MUJOCO_GL", "").lower().strip()
    # a guess of an earlier process is no wish of the user
    asked = "" if asked == os.environ.get(GUESSED) else asked
    if asked in OFF:
        return ()
    # PyOpenGL binds to one platform for the life of a process; what is loaded already leaves no choice.
    for fixed in (asked, os.environ.get("PYOPENGL_PLATFORM", "")):
        if fixed in CONTEXT_MODULES:
            return (fixed,)
    system = platform.system()
    if system == "Linux":
        return ("egl", "osmesa", "glfw") if os.environ.get("DISPLAY") else ("egl", "osmesa")
    return ("cgl", "glfw") if system == "Darwin" else ("glfw",)


def _check_name(name: str) -> None:
    if name not in CONTEXT_MODULES:
        raise UserError(f"unknown renderer {name!r}; available: {', '.join(CONTEXT_MODULES)}")


def _why(code: int, errors: str) -> str:
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    if code < 0:
        return f"crashed with {signal.Signals(-code).name}"
    return lines[-1][:300] if lines else f"exited with code {code} without an image"


CONTEXT_MODULES = {"egl": "mujoco.egl", "osmesa": "mujoco.osmesa", "glfw": "mujoco.glfw", "cgl": "mujoco.cgl"}

PROBE = """
import mujoco
scene = '<mujoco><worldbody><light pos="0 0 3"/><geom size="0.5" rgba="1 0 0 1"/></worldbody></mujoco>'
model = mujoco.MjModel.from_xml_string(scene)
data = mujoco.MjData(model)
mujoco.mj_forward(model, data)
with mujoco.Renderer(model, 32, 32) as renderer:
    renderer.update_scene(data)
    image = renderer.render()
    try:
        from OpenGL import GL
        texts = [GL.glGetString(name).decode() for name in (GL.GL_RENDERER, GL.GL_VERSION)]
    except Exception:
        texts = ["unknown device"]
assert image.max() > 0, "the image is black"
print("device: " + ", ".join(texts))
"""
