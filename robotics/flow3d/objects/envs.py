"""The flow scenes as Gymnasium environments, for policies that act by joints.

    env = gymnasium.make("robotics.flow3d.objects.envs:mmrl/Flow3DPour-v0", arm="ur5e")
    observation, info = env.reset(seed=0, options={"layout": 3})

An action is the change of each joint's target, as a fraction of the joint's range in a control step of 0.1 s, and last
the gripper: above 0 closed, else open. It works for every arm, and for tasks that tilt things, which dx, dy, dz, dyaw
of `TabletopEnv` cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from gymnasium import spaces

from mmrl.errors import UserError
from robotics.flow3d.objects.scene import SceneConfig
from robotics.flow3d.objects.tabletop import FlowTabletop
from robotics.scenes.registration import register
from robotics.scenes.tabletop_tasks import LAYOUTS
from robotics.sim.rendering import update_poses

if TYPE_CHECKING:
    from numpy.typing import NDArray

TICKS = 5
"""Ticks of 20 ms in a control step."""
CONTROL_HZ = 10
OBSERVATIONS = ("joints", "object", "rgb", "depth", "mask")


class FlowTabletopEnv(gymnasium.Env[dict[str, Any], np.ndarray]):
    """One task with one arm.

    Observations are a dictionary with the chosen kinds: `joints` (J + 1,) float32 angles and whether something is held;
    `object` (7,) float32 true position and quaternion of the object; `rgb` (H, W, 3) uint8; `depth` (H, W) float32
    metres; `mask` (H, W) uint8, 1 on the object. `info` has success, failed, the names of the unmet criteria,
    instruction and layout.

    Args:
        task: key in `FLOW_TASKS`.
        arm: key in `FLOW_ARMS`.
        observation: kinds, see above.
        shape: shape of the object; empty = the first one of the training data.
        split: split of the layouts.
        looks: split of colours and background.
        image_size: width and height of the images in pixels.
        horizon: control steps until truncation.
        render_mode: rgb_array or None.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": CONTROL_HZ}  # noqa: RUF012 - as in the base

    def __init__(
        self,
        task: str = "place_red",
        arm: str = "panda",
        observation: Sequence[str] = ("joints", "rgb"),
        shape: str = "",
        split: str = "train",
        looks: str = "train",
        image_size: int = 128,
        horizon: int = 300,
        render_mode: str | None = None,
    ) -> None:
        self.kinds = (observation,) if isinstance(observation, str) else tuple(observation)
        unknown = [kind for kind in self.kinds if kind not in OBSERVATIONS]
        if unknown or not self.kinds:
            raise UserError(f"observation is {self.kinds}; expected at least one of {', '.join(OBSERVATIONS)}")
        if horizon < 1:
            raise UserError(f"horizon is {horizon}; must be at least 1")
        if render_mode not in (None, "rgb_array"):
            raise UserError(f"render_mode is {render_mode!r}; must be rgb_array or None")
        self.render_mode = render_mode
        self.horizon = horizon
        self.scene = FlowTabletop(SceneConfig(task, arm, shape, split, looks, looks, image_size, image_size))
        joints = len(self.scene.arm.joints)
        self._layout = -1
        self._elapsed = 0
        self._over = True
        self.action_space = spaces.Box(-1.0, 1.0, (joints + 1,), np.float32)
        every: dict[str, spaces.Space[Any]] = {
            "joints": spaces.Box(-np.inf, np.inf, (joints + 1,), np.float32),
            "object": spaces.Box(-np.inf, np.inf, (7,), np.float32),
            "rgb": spaces.Box(0, 255, (image_size, image_size, 3), np.uint8),
            "depth": spaces.Box(0.0, np.inf, (image_size, image_size), np.float32),
            "mask": spaces.Box(0, 1, (image_size, image_size), np.uint8),
        }
        self.observation_space = spaces.Dict({kind: every[kind] for kind in self.kinds})

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed)
        chosen = dict(options or {})
        layout = chosen.pop("layout", None)
        if chosen:
            raise UserError(f"unknown options of reset: {', '.join(map(str, chosen))}; the only option is layout")
        self._layout = int(self.np_random.integers(LAYOUTS)) if layout is None else int(layout)
        self._elapsed = 0
        self._over = False
        self.scene.reset(self._layout)
        return self._observe(), self._info()

    def step(self, action: NDArray[np.floating]) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Move for a tenth of a second.

        Args:
            action: (J + 1,) fractions of the joints' ranges and the gripper; clipped to -1..1.

        Raises:
            UserError: the action has another shape or is not finite, or no episode runs.
            RunError: the simulation diverged; call reset to continue.
        """
        given = np.asarray(action, dtype=np.float64)
        if given.shape != self.action_space.shape or not np.isfinite(given).all():
            raise UserError(f"an action is {given}; expected {self.action_space.shape} finite numbers")
        if self._over:
            raise UserError("no episode is running; call reset first")
        self._over = True  # until the step has succeeded
        scene, moves = self.scene, np.clip(given, -1.0, 1.0)
        scene.drive(scene.target_rad() + moves[:-1] * scene.speeds / CONTROL_HZ, bool(moves[-1] > 0), TICKS)
        self._elapsed += 1
        info = self._info()
        success = bool(info["success"])
        truncated = not success and self._elapsed >= self.horizon
        self._over = success or truncated
        return self._observe(), float(success), success, truncated, info

    def render(self) -> NDArray[np.uint8] | None:
        """The camera's image (H, W, 3); None without a render mode."""
        if self.render_mode is None:
            return None
        update_poses(self.scene.model, self.scene.data)
        return self.scene.renderer.rgb(self.scene.data).copy()

    def close(self) -> None:
        """Free the renderer."""
        self.scene.close()

    def _info(self) -> dict[str, Any]:
        outcome = self.scene.success()
        return {
            "success": outcome.success,
            "failed": outcome.failed,
            "instruction": self.scene.instruction,
            "layout": self._layout,
        }

    def _observe(self) -> dict[str, Any]:
        scene = self.scene
        update_poses(scene.model, scene.data)
        return {kind: KINDS[kind](scene) for kind in self.kinds}


KINDS: dict[str, Callable[[FlowTabletop], NDArray[Any]]] = {
    "joints": lambda scene: np.append(scene.joint_rad(), float(scene.holds())).astype(np.float32),
    "object": lambda scene: np.concatenate(
        [scene.data.body(scene.task.moved).xpos, scene.data.body(scene.task.moved).xquat]
    ).astype(np.float32),
    "rgb": lambda scene: scene.renderer.rgb(scene.data).copy(),
    "depth": lambda scene: scene.true_depth().copy(),
    "mask": lambda scene: scene.object_mask().astype(np.uint8),
}
FLOW_ENVIRONMENT_IDS: dict[str, str] = {
    "mmrl/Flow3DPlaceRed-v0": "place_red",
    "mmrl/Flow3DPlaceGreen-v0": "place_green",
    "mmrl/Flow3DPour-v0": "pour",
    "mmrl/Flow3DInsertBlue-v0": "insert_blue",
    "mmrl/Flow3DInsertYellow-v0": "insert_yellow",
    "mmrl/Flow3DOpenRed-v0": "open_red",
    "mmrl/Flow3DOpenBlue-v0": "open_blue",
}

register("robotics.flow3d.objects.envs:FlowTabletopEnv", FLOW_ENVIRONMENT_IDS)
