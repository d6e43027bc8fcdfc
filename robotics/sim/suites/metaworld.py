"""Meta-World's 50 tasks as a worker drives them, with their scripted experts.

Loaded by path in a Python that has metaworld 3 (made for 3.1.1). A layout is the seed of the random vector that places
object and goal, drawn for each episode as `seeded_rand_vec` means it. The state is Meta-World's observation with
the goal visible, 39 numbers: hand and gripper (4), objects (14), the same 18 of the step before, goal (3).

Source: the benchmark of arXiv 1910.10897; Farama-Foundation/Metaworld metaworld/sawyer_xyz_env.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

LAYOUTS = 1 << 30
STATE_SIZE = 39
CONTROL_HZ = 80
SCENES = 4
"""Number of scenes that a worker keeps: building one takes as long as several hundred control steps."""
# Cameras that are mounted upside down; their images are turned by 180 degrees.
UPSIDE_DOWN = ("corner", "corner2", "corner3", "corner4")


class MetaWorldError(Exception):
    """An option that this suite does not support; the message is for the user."""

    for_user = True


def make(
    tasks: list[str] | None = None,
    camera: str = "corner2",
    size: int = 128,
    horizon: int = 500,
    shadows: bool = False,
    views: list[str] | None = None,
) -> MetaWorldRow:
    """Create the row of a worker, whose scenes are built with the first episode of their task.

    Args:
        tasks: names such as `reach`, without the version; None = all 50.
        camera: name of a camera of the scenes.
        size: width and height of the images in pixels.
        horizon: control steps of an episode, at most 500.
        shadows: whether images have shadows and smooth edges, which takes a software renderer many times as long.
        views: additional cameras, such as gripperPOV.
    """
    for name in tasks or ():
        if name not in INSTRUCTIONS:
            raise MetaWorldError(f"Meta-World has no task {name!r}; it has: {', '.join(INSTRUCTIONS)}")
    for name in (camera, *(views or ())):
        if name not in CAMERAS:
            raise MetaWorldError(f"Meta-World has no camera {name!r}; it has: {', '.join(CAMERAS)}")
    if not 1 <= horizon <= 500:
        raise MetaWorldError(f"horizon is {horizon}; Meta-World allows 1 to 500 control steps")
    return MetaWorldRow(tasks or list(INSTRUCTIONS), camera, size, horizon, shadows, tuple(views or ()))


class MetaWorldRow:
    """Meta-World scenes, one of them in use; arguments as for `make`."""

    action_size, state_size = 4, STATE_SIZE
    action_names = ("dx", "dy", "dz", "gripper")

    def __init__(
        self, tasks: list[str], camera: str, size: int, horizon: int, shadows: bool, views: tuple[str, ...] = ()
    ) -> None:
        self._tasks = tasks
        self._camera = camera
        self.image_size = (size, size)
        self.horizon = horizon
        self._shadows = shadows
        self.views = views
        self.state_names = STATE_NAMES
        # by task, the latest used last
        self._scenes: dict[str, tuple[Any, Any]] = {}
        self._env: Any = None
        self._expert: Any = None
        self._observation = np.zeros(STATE_SIZE)

    def tasks(self) -> Mapping[str, str]:
        """Names with instructions."""
        return {name: INSTRUCTIONS[name] for name in self._tasks}

    def layouts(self) -> Mapping[str, int | None]:
        """Any seed; the splits use different seeds."""
        return {"train": LAYOUTS, "held_out": LAYOUTS}

    def reset(self, task: str, layout: int, split: str, seed: int) -> None:
        """Place object and goal by the seed."""
        if task not in self._scenes and len(self._scenes) == SCENES:
            self._drop(next(iter(self._scenes)))
        scene = self._scenes.pop(task, None) or self._load(task)
        self._env, self._expert = self._scenes[task] = scene
        self._env.seed(seed)
        self._observation, _ = self._env.reset()

    def step(self, action: np.ndarray) -> tuple[float, bool, bool, bool]:
        """Act; Meta-World itself never ends an episode with success."""
        self._observation, reward, terminated, truncated, info = self._env.step(action.astype(np.float32))
        return float(reward), bool(info["success"]), bool(terminated), bool(truncated)

    def state(self) -> np.ndarray:
        """(39,) observation with the goal."""
        return np.asarray(self._observation, np.float32)

    def render(self) -> np.ndarray:
        """(size, size, 3) image."""
        return self._image(self._camera)

    def render_views(self) -> np.ndarray:
        """(V, size, size, 3) images of the additional cameras."""
        return np.stack([self._image(name) for name in self.views])

    def _image(self, camera: str) -> np.ndarray:
        renderer = self._env.mujoco_renderer
        if renderer.viewer is not None:  # gymnasium draws into the context of the scene that was built last
            renderer.viewer.make_context_current()
        if self.views:  # gymnasium's renderer looked its camera up when the environment was made
            renderer.camera_id = self._env.model.camera(camera).id
        image = np.asarray(self._env.render())
        return image[::-1, ::-1] if camera in UPSIDE_DOWN else image

    def expert(self) -> np.ndarray:
        """(4,) action of the task's scripted policy, clipped."""
        return np.clip(self._expert.get_action(np.asarray(self._observation, np.float64)), -1.0, 1.0)

    def describe(self) -> Mapping[str, Any]:
        """Versions, camera and control rate."""
        from importlib.metadata import version

        versions = {name: version(name) for name in ("metaworld", "mujoco")}
        drawing = {"camera": self._camera, "shadows": self._shadows}
        drawing |= {"views": list(self.views)} if self.views else {}
        return {"suite": "metaworld", "versions": versions, "control_hz": CONTROL_HZ, **drawing}

    def close(self) -> None:
        """Free the scenes."""
        while self._scenes:
            self._drop(next(iter(self._scenes)))
        self._env = None

    def _drop(self, task: str) -> None:
        """Free a scene."""
        env, _ = self._scenes.pop(task)
        viewer = env.mujoco_renderer.viewer
        if viewer is not None:  # the textures of the context that is current are freed, which may be another scene's
            viewer.make_context_current()
            viewer.con.free()
        env.close()

    def _load(self, task: str) -> tuple[Any, Any]:
        """Build a task's scene and its expert."""
        from metaworld.env_dict import ALL_V3_ENVIRONMENTS
        from metaworld.policies import ENV_POLICY_MAP

        height, width = self.image_size
        kind = ALL_V3_ENVIRONMENTS[task + "-v3"]
        env = kind(render_mode="rgb_array", camera_name=self._camera, width=width, height=height)
        # As in the class with the visible goal, which takes no image size.
        env._partially_observable = False
        env._freeze_rand_vec = False
        env.seeded_rand_vec = True
        # cached before the goal became visible
        env.__dict__.pop("sawyer_observation_space", None)
        env._set_task_called = True
        box = env.action_space
        if not (np.allclose(box.low, -1.0) and np.allclose(box.high, 1.0)):
            raise MetaWorldError(f"the actions of {task} are {box}; expected -1..1")
        if not self._shadows:
            env.model.light_castshadow[:] = False
            env.model.vis.quality.offsamples = 0
        if not np.isclose(env.dt * CONTROL_HZ, 1.0):
            raise MetaWorldError(f"{task} takes {env.dt:g} s per control step; expected {1 / CONTROL_HZ:g}")
        return env, ENV_POLICY_MAP[task + "-v3"]()


_SEEN = ("hand_x", "hand_y", "hand_z", "gripper", *(f"object_{entry}" for entry in range(14)))
STATE_NAMES = (*_SEEN, *(f"before_{name}" for name in _SEEN), "goal_x", "goal_y", "goal_z")
CAMERAS = ("corner", "corner2", "corner3", "corner4", "topview", "behindGripper", "gripperPOV")

INSTRUCTIONS = {
    "assembly": "put the ring over the peg",
    "basketball": "drop the ball through the hoop",
    "bin-picking": "move the cube from one bin into the other",
    "box-close": "put the lid on the box",
    "button-press": "press the button",
    "button-press-topdown": "press the button from above",
    "button-press-topdown-wall": "reach over the wall and press the button from above",
    "button-press-wall": "reach around the wall and press the button",
    "coffee-button": "press the button of the coffee machine",
    "coffee-pull": "pull the mug away from the coffee machine",
    "coffee-push": "push the mug under the coffee machine",
    "dial-turn": "turn the dial",
    "disassemble": "lift the ring off the peg",
    "door-close": "close the door",
    "door-lock": "lock the door",
    "door-open": "open the door",
    "door-unlock": "unlock the door",
    "drawer-close": "close the drawer",
    "drawer-open": "open the drawer",
    "faucet-close": "turn the faucet off",
    "faucet-open": "turn the faucet on",
    "hammer": "hammer the nail into the wall",
    "hand-insert": "put the hand into the hole",
    "handle-press": "press the handle down",
    "handle-press-side": "press the handle down from the side",
    "handle-pull": "pull the handle up",
    "handle-pull-side": "pull the handle up from the side",
    "lever-pull": "pull the lever up",
    "peg-insert-side": "push the peg into the hole at the side",
    "peg-unplug-side": "pull the peg out of the hole at the side",
    "pick-out-of-hole": "take the object out of the hole and bring it to the goal",
    "pick-place": "pick up the object and bring it to the goal",
    "pick-place-wall": "pick up the object and bring it over the wall to the goal",
    "plate-slide": "slide the plate into the net",
    "plate-slide-back": "slide the plate back out of the net",
    "plate-slide-back-side": "slide the plate out of the net to the side",
    "plate-slide-side": "slide the plate into the net at the side",
    "push": "push the object to the goal",
    "push-back": "pull the object back to the goal",
    "push-wall": "push the object around the wall to the goal",
    "reach": "reach the goal",
    "reach-wall": "reach the goal behind the wall",
    "shelf-place": "put the object on the shelf",
    "soccer": "push the ball into the goal",
    "stick-pull": "pull the container with the stick",
    "stick-push": "push the container with the stick",
    "sweep": "sweep the object off the table",
    "sweep-into": "sweep the object into the hole",
    "window-close": "close the window",
    "window-open": "open the window",
}
