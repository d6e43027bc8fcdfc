"""A robosuite environment for the generic adapter, with the seeds, ends and success that robosuite's own wrapper lacks.

Loaded by path in a Python that has robosuite (made for 1.5.2). robosuite's GymWrapper seeds only numpy's global
generator, which its placements do not use, and reports the horizon as termination; both are corrected here. The state
is the objects' (with `state: full`) and each robot's proprioception.

Source: ARISE-Initiative/robosuite robosuite/wrappers/gym_wrapper.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mujoco
import numpy as np
import robosuite
from robosuite.wrappers import GymWrapper


class RobosuiteError(Exception):
    """An option that this suite does not support; the message is for the user."""

    for_user = True


def make(
    tasks: list[str] | None = None,
    robots: str = "Panda",
    camera: str = "agentview",
    size: int = 128,
    horizon: int = 500,
    state: str = "full",
    shadows: bool = False,
    options: dict[str, Any] | None = None,
    views: list[str] | None = None,
) -> RobosuiteEnv:
    """Create the environment of a worker.

    Args:
        tasks: a single environment, because sizes of states differ; None = Lift.
        robots: name of the arm, or several separated by commas for tasks of two arms.
        camera: camera of the images.
        size: width and height of the images in pixels.
        horizon: control steps of an episode.
        state: full, with the poses of the objects, or proprio.
        shadows: whether images have shadows and smooth edges, which takes a software renderer many times as long.
        options: further arguments of `robosuite.make`, such as reward_shaping or controller_configs.
        views: additional cameras, such as robot0_eye_in_hand.
    """
    names = tasks or ["Lift"]
    if len(names) != 1:
        raise RobosuiteError(f"sim.tasks has {len(names)} robosuite environments; a simulator can only run one of them")
    if names[0] not in robosuite.ALL_ENVIRONMENTS:
        known = ", ".join(sorted(robosuite.ALL_ENVIRONMENTS))
        raise RobosuiteError(f"robosuite has no environment {names[0]!r}; it has: {known}")
    arms = [name.strip() for name in robots.split(",")]
    for arm in arms:
        if arm not in robosuite.ALL_ROBOTS:
            raise RobosuiteError(f"robosuite has no robot {arm!r}; it has: {', '.join(sorted(robosuite.ALL_ROBOTS))}")
    if state not in STATES:
        raise RobosuiteError(f"state is {state!r}; allowed: {', '.join(STATES)}")
    env = robosuite.make(
        names[0],
        robots=arms,
        has_renderer=False,
        has_offscreen_renderer=False,
        use_camera_obs=False,
        horizon=horizon,
        **(options or {}),
    )
    cameras = env.sim.model.camera_names
    for name in (camera, *(views or ())):
        if name not in cameras:
            raise RobosuiteError(f"{names[0]} has no camera {name!r}; it has: {', '.join(cameras)}")
    keys = [f"robot{number}_proprio-state" for number in range(len(arms))]
    keys = [*(["object-state"] if state == "full" else []), *keys]
    return RobosuiteEnv(env, keys, camera, size, shadows, views or [])


class RobosuiteEnv(GymWrapper):
    """An environment whose episodes repeat; arguments as for `make`."""

    render_mode = "rgb_array"

    def __init__(self, env: Any, keys: list[str], camera: str, size: int, shadows: bool, views: list[str]) -> None:
        super().__init__(env, keys=keys, flatten_obs=False)
        name = type(self.env).__name__
        instruction = INSTRUCTIONS.get(name, name)
        self.metadata = {"render_fps": env.control_freq, "instruction": instruction, "image_size": (size, size)}
        self.metadata.update(views=views, suite="robosuite", camera=camera)
        self.spec = SimpleNamespace(id=name, max_episode_steps=env.horizon)
        self._camera = camera
        self._size = size
        self._shadows = shadows
        self._drawn: Any = None
        self._renderer: Any = None

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode; equal seeds give bit-identical initial states."""
        if seed is not None:
            # The placements hold on to this generator, so it keeps its identity and gets another state.
            self.env.rng.bit_generator.state = np.random.default_rng(seed).bit_generator.state
        return super().reset(seed=seed, options=options)

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Act for one control step; only the horizon ends an episode, which truncates it."""
        observation, reward, done, _, info = super().step(action)
        return observation, float(reward), False, bool(done), {**info, "success": bool(self.env._check_success())}

    def render(self) -> np.ndarray:
        """(size, size, 3) uint8 of the current state."""
        return self.policy_image()

    def policy_image(self, camera: str | None = None) -> np.ndarray:
        """(size, size, 3) uint8 of the current state, from an additional camera if one is named."""
        model, data = self.env.sim.model._model, self.env.sim.data._data
        if self._drawn is not model:  # a reset rebuilds the scene
            self._free()
            if not self._shadows:
                model.light_castshadow[:] = False
                model.vis.quality.offsamples = 0
            self._renderer = mujoco.Renderer(model, self._size, self._size)
            self._drawn = model
        self._renderer.update_scene(data, camera or self._camera, VISUAL)
        return np.asarray(self._renderer.render())

    def close(self) -> None:
        """Free scene and renderer."""
        self._free()
        super().close()

    def _free(self) -> None:
        if self._renderer is not None:
            self._renderer.close()
        self._renderer = self._drawn = None


def _visual_only() -> mujoco.MjvOption:
    """Without collision geoms, group 0 in robosuite."""
    option = mujoco.MjvOption()
    option.geomgroup[0] = 0
    return option


STATES = ("full", "proprio")
VISUAL = _visual_only()

INSTRUCTIONS = {
    "Lift": "lift the red cube",
    "Stack": "put the red cube on the green cube",
    "NutAssembly": "put both nuts on their pegs",
    "NutAssemblySingle": "put the nut on its peg",
    "NutAssemblySquare": "put the square nut on the square peg",
    "NutAssemblyRound": "put the round nut on the round peg",
    "PickPlace": "put every object into its bin",
    "PickPlaceSingle": "put the object into its bin",
    "PickPlaceMilk": "put the milk into its bin",
    "PickPlaceBread": "put the bread into its bin",
    "PickPlaceCereal": "put the cereal into its bin",
    "PickPlaceCan": "put the can into its bin",
    "Door": "open the door",
    "Wipe": "wipe the table clean",
    "ToolHang": "hang the tool on the frame",
    "TwoArmLift": "lift the pot with both arms",
    "TwoArmPegInHole": "put the peg into the hole",
    "TwoArmHandover": "hand the hammer over",
    "TwoArmTransport": "bring the hammer into the target bin",
}
