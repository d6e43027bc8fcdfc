"""LIBERO's suites as a worker drives them: stored initial states, settling steps, success checks.

Loaded by path in a Python that has hf-libero 0.1.4. The environments' own random layouts are not used: an episode
starts from one of the 50 stored states of its task, after 10 control steps in which objects settle. A scene is built
once for each task and only its state is set after that; the seed before each reset puts the fixtures, whose places are
not part of a stored state, where they belong.

State (8,): position of the gripper m (3), its axis-angle rad (3), finger positions m (2). Actions (7,): position (3),
axis-angle (3), gripper (-1 opens, 1 closes). Images are turned by 180 degrees, as those that policies were trained
on are.

Environment variables: LIBERO_ASSETS, the folder `libero/libero/assets` of the public repository, which the package
lacks; LIBERO_CONFIG_PATH, a folder with LIBERO's own config.yaml, written here if missing.

Source: arXiv 2306.03310; Lifelong-Robot-Learning/LIBERO libero/libero/envs, benchmark; the settling steps and horizons
are those of openvla/openvla experiments/robot/libero/run_libero_eval.py.
"""

from __future__ import annotations

import codecs
import importlib
import importlib.util
import json
import math
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

SETTLING_STEPS = 10
SETTLING_ACTION = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0)
STORED_STATES = 50
REPOSITORY = "Lifelong-Robot-Learning/LIBERO"


class LiberoError(Exception):
    """An option that this suite does not support; the message is for the user."""

    for_user = True


def make(
    suite: str = "libero_spatial",
    tasks: list[str] | None = None,
    size: int = 256,
    horizon: int | None = None,
    held_out_states: int = 10,
    shadows: bool = True,
    camera: str = "agentview",
    views: list[str] | None = None,
) -> LiberoRow:
    """Create the row of a worker, whose scene is built with the first episode of a task.

    Args:
        suite: libero_spatial, libero_object, libero_goal, libero_10 or libero_90.
        tasks: names of some of its tasks; None = all.
        size: width and height of the images in pixels.
        horizon: control steps of an episode after the settling; None = the suite's usual number.
        held_out_states: number of stored states, the last of the 50, in the split held_out; the others are the split
            train, and the split all has all of them in order, as in published numbers.
        shadows: whether images have shadows, as published demonstrations do; without them drawing is faster.
        camera: agentview, frontview, birdview, sideview or robot0_eye_in_hand.
        views: additional cameras, such as robot0_eye_in_hand.
    """
    if suite not in HORIZONS:
        raise LiberoError(f"LIBERO has no suite {suite!r}; it has: {', '.join(HORIZONS)}")
    steps = HORIZONS[suite] if horizon is None else horizon
    if steps < 1 or not 0 <= held_out_states < STORED_STATES:
        raise LiberoError(f"horizon is {steps} (at least 1), held_out_states {held_out_states} (0 to 49)")
    package = package_folder()
    # before the first import, which would otherwise ask on the console
    prepare_config(package, _assets_path(package))
    # Before the assets, so that a missing package is reported first.
    importlib.import_module("libero.libero.envs")
    import libero.libero

    # Where its own folder `assets` is missing, the package would look this up and then download.
    libero.libero._assets_path_cache = str(find_assets(package))
    return LiberoRow(suite, tasks, size, steps, held_out_states, shadows, camera, tuple(views or ()))


class LiberoRow:
    """One LIBERO scene at a time; arguments as for `make`."""

    action_size, state_size = 7, 8
    state_names = (
        *("grip_x", "grip_y", "grip_z", "grip_turn_x", "grip_turn_y", "grip_turn_z"),
        *("finger_0", "finger_1"),
    )
    action_names = ("dx", "dy", "dz", "turn_x", "turn_y", "turn_z", "gripper")

    def __init__(
        self,
        suite: str,
        tasks: list[str] | None,
        size: int,
        horizon: int,
        held_out_states: int,
        shadows: bool,
        camera: str,
        views: tuple[str, ...] = (),
    ) -> None:
        from libero.libero import benchmark

        self._benchmark = benchmark.get_benchmark(suite)()
        numbers = {task.name: number for number, task in enumerate(self._benchmark.tasks)}
        for name in tasks or ():
            if name not in numbers:
                raise LiberoError(f"{suite} has no task {name!r}; it has: {', '.join(numbers)}")
        self._numbers = {name: numbers[name] for name in tasks or numbers}
        self._suite = suite
        self._held_out = held_out_states
        self._shadows = shadows
        self._camera = camera
        self.image_size = (size, size)
        self.horizon = horizon
        self.views = views
        self._env: Any = None
        self._task = ""
        self._starts = np.zeros((0, 0))
        self._observation: Mapping[str, np.ndarray] = {}

    def tasks(self) -> Mapping[str, str]:
        """Names with instructions, in the order of the suite."""
        return {task.name: task.language for task in self._benchmark.tasks if task.name in self._numbers}

    def layouts(self) -> Mapping[str, int | None]:
        """Numbers of stored states."""
        held_out = {"held_out": self._held_out} if self._held_out else {}
        return {"train": STORED_STATES - self._held_out, **held_out, "all": STORED_STATES}

    def reset(self, task: str, layout: int, split: str, seed: int) -> None:
        """Set a stored state and let the objects settle."""
        # a scene takes seconds to build, so it stays until another task is asked for
        if task != self._task:
            self._load(task)
        number = layout + (STORED_STATES - self._held_out if split == "held_out" else 0)
        # Not the episode's seed: it places the fixtures, which must be where they were when the states were stored.
        self._env.seed(0)
        self._env.reset()
        for robot in self._env.robots:
            # A soft reset leaves the command that the fingers are moving to where the last episode had it.
            robot.gripper.current_action = np.zeros(robot.gripper.dof)
        # the stored state replaces the layout that the reset has drawn
        self._observation = self._env.set_init_state(self._starts[number])
        for _ in range(SETTLING_STEPS):
            self._observation, *_ = self._env.step(list(SETTLING_ACTION))

    def step(self, action: np.ndarray) -> tuple[float, bool, bool, bool]:
        """Act; success ends an episode."""
        self._observation, reward, _, _ = self._env.step(action)
        success = bool(self._env.check_success())
        return float(reward), success, success, False

    def state(self) -> np.ndarray:
        """(8,) position, axis-angle and fingers of the gripper."""
        seen = self._observation
        turn = axis_angle(seen["robot0_eef_quat"])
        return np.concatenate([seen["robot0_eef_pos"], turn, seen["robot0_gripper_qpos"]]).astype(np.float32)

    def render(self) -> np.ndarray:
        """(size, size, 3) image, turned by 180 degrees."""
        return self._image(self._camera)

    def render_views(self) -> np.ndarray:
        """(V, size, size, 3) images of the additional cameras, turned by 180 degrees too."""
        return np.stack([self._image(name) for name in self.views])

    def _image(self, camera: str) -> np.ndarray:
        height, width = self.image_size
        image = self._env.sim.render(camera_name=camera, height=height, width=width, depth=False)
        # LIBERO's images are upside down and mirrored relative to published demonstrations
        return np.asarray(image)[::-1, ::-1]

    def describe(self) -> Mapping[str, Any]:
        """Versions, camera, control rate and what the suite leaves open."""
        from importlib.metadata import version

        return {
            "suite": self._suite,
            "versions": {name: version(name) for name in ("hf-libero", "robosuite", "mujoco", "bddl")},
            "assets": os.environ.get("LIBERO_ASSETS", "those of the package"),
            "camera": self._camera,
            **({"views": list(self.views)} if self.views else {}),
            "shadows": self._shadows,
            "control_hz": 20,
            "settling_steps": SETTLING_STEPS,
            "held_out_states": self._held_out,
        }

    def close(self) -> None:
        """Free the scene."""
        if self._env is not None:
            self._env.close()
            self._env = None

    def _load(self, task: str) -> None:
        """Build a task's scene, which takes seconds."""
        from libero.libero import get_libero_path
        from libero.libero.envs import OffScreenRenderEnv

        self.close()
        number = self._numbers[task]
        info = self._benchmark.get_task(number)
        height, width = self.image_size
        try:
            self._env = OffScreenRenderEnv(
                bddl_file_name=self._benchmark.get_task_bddl_file_path(number),
                camera_names=[self._camera],
                camera_heights=height,
                camera_widths=width,
                # Images are rendered on demand, not at every step.
                use_camera_obs=False,
                # a hard reset rebuilds the scene (about 1 s), a soft one restores its state (0.1 s)
                hard_reset=False,
                # robosuite must not end the episode itself: the worker counts the horizon without settling
                horizon=self.horizon + SETTLING_STEPS + 1,
                ignore_done=True,
            )
        except (FileNotFoundError, ValueError) as error:
            raise _explain(task, error) from error
        known = tuple(self._env.sim.model.camera_names)
        for name in (self._camera, *self.views):
            if name not in known:
                raise LiberoError(f"the scene of {task} has no camera {name!r}; it has: {', '.join(known)}")
        low, high = getattr(getattr(self._env, "env", None), "action_spec", (-1.0, 1.0))
        if not (np.allclose(low, -1.0) and np.allclose(high, 1.0)):
            raise LiberoError(f"the actions of {task} have the bounds {low} to {high}; expected -1..1")
        if not self._shadows:
            self._env.sim.model.light_castshadow[:] = False
        self._starts = load_states(Path(get_libero_path("init_states")) / info.problem_folder / info.init_states_file)
        self._task = task


def package_folder() -> Path:
    """Folder with bddl_files and init_files, found without an import, which may ask questions on the console."""
    try:
        found = importlib.util.find_spec("libero.libero")
    except ModuleNotFoundError:
        found = None
    if found is None or not found.submodule_search_locations:
        raise LiberoError(
            "LIBERO is not installed in this Python environment; it needs hf-libero 0.1.4 with its pinned dependencies"
        )
    return Path(next(iter(found.submodule_search_locations)))


def find_assets(package: Path) -> Path:
    """Folder of the scenes' meshes and textures."""
    named, folder = os.environ.get("LIBERO_ASSETS", ""), _assets_path(package)
    if (folder / "scenes").is_dir():
        return folder.resolve()
    what = f"LIBERO_ASSETS is {named!r}, which has no folder `scenes`" if named else "LIBERO_ASSETS is not set"
    raise LiberoError(
        f"LIBERO's scene assets are missing ({what}): the package does not include them. Set LIBERO_ASSETS to the "
        f"folder libero/libero/assets of a copy of the repository {REPOSITORY}"
    )


def prepare_config(package: Path, assets: Path) -> Path:
    """Write the config.yaml that LIBERO would ask for on its first import, by default into this environment."""
    named = os.environ.get("LIBERO_CONFIG_PATH")
    if named and (Path(named) / "config.yaml").is_file():
        return Path(named) / "config.yaml"
    target = Path(named or Path(sys.prefix) / "libero-config") / "config.yaml"
    target.parent.mkdir(parents=True, exist_ok=True)
    paths = {
        "benchmark_root": package,
        "bddl_files": package / "bddl_files",
        "init_states": package / "init_files",
        "datasets": package.parent / "datasets",
        "assets": assets,
    }
    # JSON is YAML too. Several workers may write at once; each puts a whole file there.
    descriptor, draft = tempfile.mkstemp(dir=target.parent)
    with os.fdopen(descriptor, "w") as file:
        json.dump({name: str(path) for name, path in paths.items()}, file)
    os.replace(draft, target)
    os.environ["LIBERO_CONFIG_PATH"] = str(target.parent)
    return target


def load_states(path: Path) -> np.ndarray:
    """Read a task's stored initial states (50, D) float64: time, positions and velocities.

    The files are pickles of arrays in torch's older format; only what an array is made of is allowed in them, so a file
    cannot run code.
    """
    import torch

    multiarray = importlib.import_module("numpy._core.multiarray" if hasattr(np, "_core") else "numpy.core.multiarray")
    allowed: list[Any] = [
        (multiarray._reconstruct, "numpy.core.multiarray._reconstruct"),
        (multiarray._reconstruct, "numpy._core.multiarray._reconstruct"),
        # NumPy's pickles of protocol 2 encode bytes through it
        codecs.encode,
        np.ndarray,
        np.dtype,
        type(np.dtype(np.float64)),
    ]
    with torch.serialization.safe_globals(allowed):
        return np.asarray(torch.load(path, weights_only=True), np.float64)


def axis_angle(quaternion: np.ndarray) -> np.ndarray:
    """(3,) axis times angle (0..2 pi) of a unit quaternion (4,) x, y, z, w; zeros without a rotation."""
    # rounding may leave a unit quaternion just outside the domain of the arc cosine
    w = min(1.0, max(-1.0, float(quaternion[3])))
    sine = math.sqrt(1.0 - w * w)
    if math.isclose(sine, 0.0, abs_tol=1e-9):
        return np.zeros(3)
    return np.asarray(quaternion[:3], np.float64) * (2.0 * math.acos(w) / sine)


def _assets_path(package: Path) -> Path:
    named = os.environ.get("LIBERO_ASSETS", "")
    return Path(named).expanduser() if named else package / "assets"


def _explain(task: str, error: Exception) -> Exception:
    text = " ".join(str(error).split())
    lacking = isinstance(error, FileNotFoundError) or "Error opening file" in text or "resource" in text
    if not lacking:
        return error
    return LiberoError(
        f"the scene of {task} cannot be built: {text}. The folder in LIBERO_ASSETS seems to lack files that this "
        f"task needs; the full set is libero/libero/assets of {REPOSITORY}"
    )


HORIZONS = {
    "libero_spatial": 220,
    "libero_object": 280,
    "libero_goal": 300,
    "libero_10": 520,
    "libero_90": 400,
}
