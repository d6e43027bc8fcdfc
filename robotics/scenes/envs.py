"""The tabletop tasks, and your own tasks, as Gymnasium environments.

    env = TabletopEnv(task="pick_place", arm="ur5e", observation=("state", "rgb"))
    observation, info = env.reset(seed=0, options={"layout": 3, "split": "held_out"})

An action of an arm is dx, dy, dz, dyaw and gripper in -1..1 (`control.CartesianController`). Equal layouts and actions
give equal bits, here and in `TabletopBatch`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from gymnasium import spaces

from mmrl.errors import RunError, UserError
from mmrl.fields import check_fields
from robotics.scenes.control import ControlSettings, check_actions
from robotics.scenes.mjcf_task import open_scene
from robotics.scenes.tabletop import CONTROL_HZ
from robotics.scenes.tabletop_tasks import LAYOUTS, layout_seed
from robotics.scenes.variant import ActionDelay, ObservationDelay, SceneVariant
from robotics.scenes.videos import VIDEO_SIZE, Caption, VideoRenderer, write_caption
from robotics.sim.backends import require_backend
from robotics.sim.episodes import EpisodeSpec
from robotics.sim.randomization import RandomizationConfig, read_randomization
from robotics.sim.rendering import FrameRenderer, RenderSettings, check_cameras, update_poses, update_sensors

if TYPE_CHECKING:
    import mujoco
    from numpy.typing import NDArray

    from robotics.scenes.presentation import Outcome
    from robotics.scenes.scene import Scene
    from robotics.scenes.viewer import SceneViewer

Watcher = Callable[["mujoco.MjData", Caption], object]
ROW = (0,)
LOOKS = ("film", "policy")
POLICY_SIZE = (256, 256)
SHOWN_PARTS = 5
"""Parts of a control step after each of which watchers see the scene."""
OBSERVATIONS = ("state", "proprio", "rgb", "depth", "segmentation")
RENDERED = OBSERVATIONS[2:]
MAX_ID = 2**24


class SimulationDiverged(RunError):  # noqa: N818 - named for what happened
    """A simulation diverged; its episode has no result."""


class TabletopEnv(gymnasium.Env[dict[str, Any], np.ndarray]):
    """One tabletop task with one arm, or your own task.

    Observations are a dictionary with the chosen kinds: `state` (S,) float32, see `SceneSensors.state` (22 entries at
    the table); `proprio` (10,) float32, its leading part, without pieces; `rgb` (H, W, 3) uint8; `depth` (H, W) float32
    metres; `segmentation` (H, W, 2) int32 object id and type, -1 for the background; and `views` (V, H, W, 3) uint8 of
    further cameras. `info` has success, instruction, layout, split and dense_reward, and randomization, the episode's
    draw, if something is randomised. Noise and delays affect observations only; the property `state`, videos, windows
    and rewards are exact, and depth and segmentation have no noise.

    Args:
        task: key in `TASKS`, or module:Class of your own `MjcfTask`.
        arm: key in `ARMS`, or module:Class of your own `ArmModel`.
        observation: kinds, see above.
        image_size: (H, W) pixels of observed images.
        camera: front or wrist; "" = front, or the first one of a scene without it.
        views: further cameras, whose images are the entry `views`.
        horizon: control steps until truncation; None = the task's.
        render_mode: rgb_array; human, a window that shows the episode in real time; or None.
        split: split from which `reset` draws layouts unless its options name one.
        reward: sparse, 1 with the step that solves the task, or dense in 0..1.
        control: step sizes and workspace.
        render_size: (H, W) pixels of `render()`; None = (480, 640) for the look film and (256, 256) for policy.
        render_look: film, for people: lights and shadows, a separate camera, a caption, and at the end a ring around
            the goal, green after a success and red after a failure; or policy, the policy's camera as in `rgb`.
            Observations do not depend on it.
        randomization: what differs from episode to episode, a configuration or a dictionary of its fields.

    Raises:
        UserError: an argument is unknown or out of range, or there is no renderer or no display for a window.
    """

    metadata: dict[str, Any] = {"render_modes": ["human", "rgb_array"], "render_fps": CONTROL_HZ}  # noqa: RUF012 - as in the base

    def __init__(
        self,
        task: str = "reach",
        arm: str = "panda",
        observation: Sequence[str] = ("state", "rgb"),
        image_size: tuple[int, int] = (64, 64),
        camera: str = "",
        horizon: int | None = None,
        render_mode: str | None = None,
        split: str = "train",
        reward: str = "sparse",
        control: ControlSettings | None = None,
        render_size: tuple[int, int] | None = None,
        render_look: str = "film",
        randomization: RandomizationConfig | Mapping[str, Any] | None = None,
        views: Sequence[str] = (),
    ) -> None:
        if horizon is not None and horizon < 1:
            raise UserError(f"horizon is {horizon}; must be at least 1")
        chosen = read_randomization(randomization)
        self.scene = scene = open_scene(task, arm, split, reward, chosen)
        """Scene that is simulated."""
        self.kinds = (observation,) if isinstance(observation, str) else tuple(observation)
        if not self.kinds or any(kind not in OBSERVATIONS for kind in self.kinds):
            raise UserError(f"observation is {self.kinds}; expected at least one of {', '.join(OBSERVATIONS)}")
        if render_look not in LOOKS:
            raise UserError(f"render_look is {render_look!r}; must be {' or '.join(LOOKS)}")
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise UserError(f"render_mode is {render_mode!r}; must be human, rgb_array or None")
        if render_mode == "human":
            from robotics.scenes.viewer import check_display

            check_display()
        self._draws = bool(views) or any(kind in RENDERED for kind in self.kinds)
        camera = camera or scene.camera
        # a scene without cameras is fine as long as nothing is drawn
        if self._draws or camera:
            check_cameras(scene.model, (camera, *views))
        self.split = split
        self.reward = reward
        self.render_mode = render_mode
        self._views = tuple(views)
        self._look = render_look
        self.horizon = horizon or scene.task.horizon
        # a renderer is only required if something is drawn
        self._backend = require_backend().name if render_mode == "rgb_array" or self._draws else ""

        import mujoco

        self._lib = mujoco
        self.model = scene.model
        """Model of the episode: the scene's, or a copy with its domain randomisation."""
        self.data = mujoco.MjData(self.model)
        self._variant: SceneVariant | None = None
        self._delay = ActionDelay(0, scene.parts.hold)
        self._seen = ObservationDelay(self.model, self.data, 0)
        self.controller = scene.controller(control)
        seen, self._video_size = render_size or POLICY_SIZE, render_size or VIDEO_SIZE
        self._settings = {
            "observe": RenderSettings(image_size[1], image_size[0], camera),
            "render": RenderSettings(seen[1], seen[0], camera),
        }
        for settings in self._settings.values():
            check_fields(settings, "image")
        self._renderers: dict[str, FrameRenderer] = {}
        self._video: VideoRenderer | None = None
        self._viewer: SceneViewer | None = None
        self._watchers: list[Watcher] = []
        self._layout = -1
        self._elapsed = 0
        self._over = True
        self._outcome: Outcome = ""
        self.action_space = spaces.Box(-1.0, 1.0, (len(scene.action_names),), np.float32)
        kinds, sizes = [*self.kinds, *(["views"] if views else [])], state_sizes(scene)
        self.observation_space = observation_space(kinds, image_size, len(views), sizes)
        states = {kind: scene.state_names[:size] for kind, size in sizes.items()}
        named = [kind for kind in self.observation_space if kind in states]
        known: dict[str, Any] = {"action_names": scene.action_names, "camera": camera, "render_fps": scene.control_hz}
        known |= {"state_names": states[named[0]]} if len(named) == 1 else {}
        self.metadata = {**self.metadata, **known}

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin an episode.

        Args:
            seed: for drawing the layout.
            options: layout, a number, drawn if missing; split, the environment's own if missing; draw, the number of
                the randomisation's draw, 0 if missing, None for the nominal scene.

        Raises:
            UserError: an option is unknown or out of range.
        """
        super().reset(seed=seed)
        chosen = dict(options or {})
        layout = chosen.pop("layout", None)
        split = chosen.pop("split", self.split)
        draw = chosen.pop("draw", 0)
        if chosen:
            raise UserError(f"unknown options of reset: {', '.join(map(str, chosen))}; available: layout, split, draw")
        number = int(self.np_random.integers(LAYOUTS)) if layout is None else int(layout)
        # before anything changes: an unknown split or layout leaves the episode as it was
        start = layout_seed(split, number)
        # the model is shared between splits; only the squares for the pieces differ
        self.scene = self.scene.for_split(split)
        self._layout = number
        self._elapsed = 0
        self._over = False
        self._outcome = ""
        self._vary(EpisodeSpec(self.scene.task.name, "", number, split, draw))
        self._lib.mj_resetData(self.model, self.data)
        self.scene.reset(self.model, self.data, np.random.default_rng(start))
        self._lib.mj_forward(self.model, self.data)
        self.controller.reset(1)
        # only now, because a delayed observation repeats the state after the reset
        self._seen = ObservationDelay(self.model, self.data, self._variant.observation_delay if self._variant else 0)
        success, dense = self._success_and_reward()
        self._show()
        return self._observe(), self._info(success, dense)

    def step(self, action: NDArray[np.floating]) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Move for one control step, a tenth of a second at the table; terminated once the task is solved.

        Args:
            action: (A,), at the table dx, dy, dz, dyaw, gripper; clipped to -1..1.

        Raises:
            UserError: the action has another shape or is not finite, or no episode runs.
            SimulationDiverged: MuJoCo gave a warning; call reset to continue.
        """
        given = np.asarray(action)
        names = self.scene.action_names
        if given.shape != (len(names),):
            raise UserError(f"an action has the shape {given.shape}; expected ({len(names)},): {', '.join(names)}")
        moves = check_actions(given[None, None], 1, names)
        if self._over:
            raise UserError("no episode is running; call reset first")
        # a delayed action reaches the controller late, so its command lags like the arm
        moves = self._delay(moves[0])[None]
        # one target for the whole control step, as in `TabletopBatch`
        self.data.ctrl[:] = self.scene.controls(self.controller.plan(ROW, moves).controls)[0, 0]
        # cut only for watchers; MuJoCo's steps are the same either way
        parts = SHOWN_PARTS if self._watchers else 1
        ends = [self.scene.substeps * part // parts for part in range(parts + 1)]
        for part in range(1, parts + 1):
            self._lib.mj_step(self.model, self.data, ends[part] - ends[part - 1])
            if part < parts:
                self._show(part / parts)
        # mj_step leaves the sensor values of the state before it
        update_sensors(self.model, self.data)
        self._elapsed += 1
        self._check_diverged()
        # only after the check: a diverged state must not enter the delayed observations
        self._seen.add(self.data)
        success, dense = self._success_and_reward()
        # a success in the last step is an end, not a cut
        truncated = not success and self._elapsed >= self.horizon
        self._over = success or truncated
        self._outcome = "success" if success else "failure" if truncated else ""
        self._show()
        reward = dense if self.reward == "dense" else float(success)
        return self._observe(), reward, success, truncated, self._info(success, dense)

    def render(self) -> NDArray[np.uint8] | None:
        """Render the scene as (H, W, 3) RGB; None without a render mode, or with a window."""
        if self.render_mode != "rgb_array":
            return None
        if self._look == "policy":
            return self.policy_image()
        if self._video is None:
            self._video = VideoRenderer(self.scene, self._video_size, self._backend)
        return write_caption(self._video.rgb(self.data, outcome=self._outcome), self._caption())

    def policy_image(self, camera: str | None = None) -> NDArray[np.uint8]:
        """Render (H, W, 3) RGB as the policy sees it, in the size of `render()`; needs a render mode.

        Args:
            camera: an additional camera; None = the policy's. Raises UserError if it does not exist.
        """
        update_poses(self.model, self._seen.data)
        return self._policy_image("render", camera)

    def close(self) -> None:
        """Free the renderers and close the window."""
        while self._renderers:
            self._renderers.popitem()[1].close()
        for shown in (self._video, self._viewer):
            if shown is not None:
                shown.close()
        self._video = self._viewer = None
        self._watchers.clear()

    def watch(self, watcher: Watcher) -> None:
        """Call a function with state and caption 50 times per simulated second; it must not change the state."""
        self._watchers.append(watcher)

    @property
    def window_closed(self) -> bool:
        """Whether the user has closed the window of the render mode human."""
        return self._viewer is not None and not self._viewer.is_open

    @property
    def instruction(self) -> str:
        """Language instruction of the task."""
        return self.scene.task.instruction

    @property
    def state(self) -> NDArray[np.float32]:
        """(S,) exact full state, whether observed or not."""
        return self.scene.sensors.state(self.data.sensordata[None], self.controller.commands(ROW))[0]

    def expert_action(self) -> NDArray[np.float32]:
        """(A,) action of the task's expert; raises UserError if it has none."""
        return self.scene.expert(self.data.sensordata[None], self.controller.commands(ROW))[0]

    def _show(self, part: float = 0.0) -> None:
        """Call the watchers, a part of a control step after the last one."""
        if self.render_mode == "human" and self._viewer is None:
            from robotics.scenes.viewer import SceneViewer

            self._viewer = viewer = SceneViewer(self.scene)
            self.watch(
                lambda data, caption: viewer.show(data, caption, wait_s=1.0 / self.scene.control_hz / SHOWN_PARTS)
            )
        for watcher in self._watchers:
            watcher(self.data, self._caption(part))

    def _caption(self, part: float = 0.0) -> Caption:
        return Caption(self.instruction, (self._elapsed + part) / self.scene.control_hz, self._outcome)

    def _success_and_reward(self) -> tuple[bool, float]:
        reading = self.scene.sensors.read(self.data.sensordata[None])
        task = self.scene.task
        return bool(task.success(reading)[0]), float(task.dense_reward(reading)[0])

    def _check_diverged(self) -> None:
        warnings = self.data.warning.number
        if warnings.any():
            self._over = True
            kinds = [self._lib.mjtWarning(int(index)).name for index in np.flatnonzero(warnings)]
            raise SimulationDiverged(
                f"the simulation of {self.scene.task.name} failed in control step {self._elapsed} of layout "
                f"{self._layout} ({', '.join(kinds)}); reset to continue"
            )

    def _vary(self, episode: EpisodeSpec) -> None:
        """Draw the episode's variant, and use its model."""
        self._variant = self.scene.variant(episode)
        self.model = self.scene.model if self._variant is None else self._variant.model
        self._delay = ActionDelay(self._variant.action_delay if self._variant else 0, self.scene.parts.hold)
        # renderers are kept, because opening an OpenGL context is slow
        for renderer in self._renderers.values():
            renderer.show(self.model)

    def _info(self, success: bool, dense: float) -> dict[str, Any]:
        info = {
            "success": success,
            "instruction": self.instruction,
            "layout": self._layout,
            "split": self.scene.split,
            "dense_reward": dense,
        }
        return info if self._variant is None else info | {"randomization": dict(self._variant.drawn)}

    def _observe(self) -> dict[str, Any]:
        if self._draws:
            update_poses(self.model, self._seen.data)
        seen = {kind: self._observe_kind(kind) for kind in self.kinds}
        if self._views:
            seen["views"] = np.stack([self._policy_image("observe", view) for view in self._views])
        return seen

    def _observe_kind(self, kind: str) -> NDArray[Any]:
        """An observation, with the episode's delay and noise."""
        if kind in ("state", "proprio"):
            commands = self.controller.commands(ROW)
            state = self.scene.sensors.state(self._seen.sensordata[None], commands)[0]
            seen = state if self._variant is None else self._variant.noisy_state(state, self._elapsed)
            # proprio is the leading part of the state, with the same noise
            return seen[: state_sizes(self.scene)[kind]]
        if kind == "rgb":
            return self._policy_image("observe")
        renderer = self._renderer("observe")
        return (renderer.depth if kind == "depth" else renderer.segmentation)(self._seen.data)

    def _policy_image(self, purpose: str, camera: str | None = None) -> NDArray[np.uint8]:
        image = self._renderer(purpose).rgb(self._seen.data, camera=camera).copy()
        return image if self._variant is None else self._variant.noisy_image(image, self._elapsed, camera or "")

    def _renderer(self, purpose: str) -> FrameRenderer:
        if purpose not in self._renderers:
            self._renderers[purpose] = FrameRenderer(self.model, self._settings[purpose], self._backend)
        return self._renderers[purpose]


def state_sizes(scene: Scene) -> dict[str, int]:
    """Sizes of a scene's states by kind of observation."""
    return {"state": len(scene.state_names), "proprio": scene.proprio_size}


def observation_space(
    kinds: Sequence[str], image_size: tuple[int, int], views: int, sizes: Mapping[str, int]
) -> spaces.Dict:
    """Space of the given kinds of observations; `views` is the number of additional cameras."""
    every: dict[str, spaces.Space[Any]] = {
        **{kind: spaces.Box(-np.inf, np.inf, (size,), np.float32) for kind, size in sizes.items()},
        "rgb": spaces.Box(0, 255, (*image_size, 3), np.uint8),
        "depth": spaces.Box(0.0, np.inf, image_size, np.float32),
        "segmentation": spaces.Box(-1, MAX_ID, (*image_size, 2), np.int32),
        "views": spaces.Box(0, 255, (views, *image_size, 3), np.uint8),
    }
    return spaces.Dict({kind: every[kind] for kind in kinds})
