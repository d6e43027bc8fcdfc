"""Many episodes of the scenes at once in the threads of one process: the simulator for training.

The actions of a chunk are first turned into joint targets, which do not depend on the physics; then the physics of the
whole chunk runs in one call a row (`ImageRollout`), and only images that a policy or a video needs are rendered. Rows
may have different tasks. Trajectories equal those of `TabletopEnv` with the same layouts and actions, bit for bit.
"""

from __future__ import annotations

import platform
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from mmrl.errors import UserError
from mmrl.fields import bounded, check_config, check_fields, choice, only_with
from robotics.scenes.control import ControlSettings, check_actions
from robotics.scenes.mjcf_task import open_scene
from robotics.scenes.tabletop_tasks import LAYOUTS, SPLITS, TASKS, layout_seed
from robotics.scenes.variant import ActionDelay, SceneVariant
from robotics.scenes.videos import VideoRenderer, video_size
from robotics.sim.backends import Backend, probe_backend, require_backend
from robotics.sim.episodes import ChunkResult, EpisodeSpec
from robotics.sim.randomization import RandomizationConfig
from robotics.sim.recent import RecentObservations
from robotics.sim.rendering import FrameRenderer, RenderSettings, check_cameras, update_poses
from robotics.sim.rollout import ImageRollout

if TYPE_CHECKING:
    import mujoco
    from numpy.typing import ArrayLike, NDArray

    from robotics.scenes.scene import Scene
    from robotics.sim.interface import Chunk, SceneObservation
    from robotics.sim.opening import SimConfig

STATES = ("full", "proprio")
LOOKS = ("policy", "film")
PHYSICS = ("mujoco", "warp")


@dataclass(frozen=True)
class BatchSettings:
    """Observations and rewards of the rows."""

    image_size: tuple[int, int] | None = (64, 64)
    """(H, W) pixels; None for states only."""
    camera: str = ""
    """front or wrist; "" = front, or the first one of a scene without it."""
    views: tuple[str, ...] = ()
    """Additional cameras besides `camera`, in the order of observation."""
    look: str = choice("policy", LOOKS)
    """policy: plain images for policies; film: images for human viewers (`robotics.scenes.videos`), about 50 times
    slower."""
    state: str = choice("full", STATES)
    """full: includes the poses of the pieces; proprio: only the robot's own state."""
    reward: str = "sparse"
    """sparse: 1 at the step that solves the task; dense: 0..1."""
    horizon: int | None = bounded(None, at_least=1)
    """Control steps after which an episode is truncated; None = each task's own horizon."""
    end_at_success: bool = True
    """Whether success ends an episode; otherwise it runs to the horizon."""
    control: ControlSettings = field(default_factory=ControlSettings)
    """Step sizes and workspace."""
    randomization: RandomizationConfig = field(default_factory=RandomizationConfig)
    """Domain randomisation, drawn for each episode."""
    physics: str = choice("mujoco", PHYSICS)
    """mujoco: in threads on the CPU; warp: all rows of a task together on a GPU, see `robotics.sim.warp_physics`."""
    device: str | None = only_with(None, physics="warp")
    """Warp's device, such as cuda:0. Default: a GPU if there is one."""

    def validate(self) -> None:
        """Reject additional cameras that are not rendered; raises UserError."""
        if self.views and (self.image_size is None or self.look == "film"):
            why = "image_size is None" if self.image_size is None else "videos use a separate camera"
            raise UserError(f"views has {', '.join(self.views)}, but {why}; leave it empty")


@dataclass
class _Group:
    """Rows of one task and split; scenes are numbered from 0 within it."""

    scene: Scene
    rollout: ImageRollout
    rows: NDArray[np.int64]


class TabletopBatch:
    """Runs episodes of tabletop tasks or your own tasks; implements `RobotSim`.

    At the table the state has 22 entries, see `SceneSensors.state`, or with `state="proprio"` its first 10. Noise and
    delays of a domain randomisation are in observations; `full_state`, rewards, `object_poses` and recorded frames are
    exact.

    Args:
        tasks: keys of `TASKS` that episodes may name, or module:Class of your own `MjcfTask`, named by its class.
        arm: key in `ARMS`, or module:Class of your own `ArmModel`.
        settings: observation, reward, horizon and control.
        workers: threads; the usable cores when None.
        backend: name of a probed renderer; chosen and probed when None.

    Raises:
        UserError: there is no such task, arm, camera, state or reward, or no renderer.
    """

    capacity: int | None = None

    def __init__(
        self,
        tasks: Sequence[str] = ("reach",),
        arm: str = "panda",
        settings: BatchSettings | None = None,
        *,
        workers: int | None = None,
        backend: str | None = None,
    ) -> None:
        self.settings = settings or BatchSettings()
        check_config(self.settings)
        if not tasks:
            raise UserError("tasks is empty; list at least one")
        opened = [open_scene(name, arm, "train", self.settings.reward, self.settings.randomization) for name in tasks]
        self._scenes = {scene.task.name: scene for scene in opened}
        self._scene = opened[0]
        _check_alike(opened)
        self.settings = replace(self.settings, camera=self.settings.camera or self._scene.camera)
        self.action_names = self._scene.action_names
        self.action_size = len(self.action_names)
        self.control_hz = self._scene.control_hz
        self.full_state_size = len(self._scene.state_names)
        self.image_size = self.settings.image_size
        self.views = tuple(self.settings.views)
        self.potential_rewards = self.settings.reward == "dense"
        self.state_size = self.full_state_size if self.settings.state == "full" else self._scene.proprio_size
        self.state_names = self._scene.state_names[: self.state_size]
        # the longest of the tasks; each row ends at its own
        self.horizon = max(self._horizon(name) for name in self._scenes)
        self.counts: dict[str, int] = dict.fromkeys(COUNTS, 0)
        self.live: NDArray[np.int64] = np.zeros(0, np.int64)
        self._rendering: RenderSettings | None = None
        self._drawing: Backend | None = None
        if self.image_size is not None:
            self._rendering = RenderSettings(self.image_size[1], self.image_size[0], self.settings.camera, self.views)
            check_fields(self._rendering, "image")
            for scene in opened:
                check_cameras(scene.model, (self.settings.camera, *self.views))
            if backend is None:
                self._drawing = require_backend()
            else:
                # a renderer that was named is used even if its probe failed
                self._drawing = probe_backend(backend)[0] or Backend(backend, "unknown device")
        self._workers = workers
        chosen = self.settings.control
        self._controller = self._scene.controller(None if chosen == ControlSettings() else chosen)
        self._rollouts: dict[tuple[str, str], ImageRollout] = {}
        self._warp: str | None = None
        if self.settings.physics == "warp":
            from robotics.sim.warp_physics import describe_warp

            self._warp = describe_warp(self.settings.device)
        self._groups: list[_Group] = []
        self._close_up: FrameRenderer | None = None
        self._full = np.zeros((0, self.full_state_size), np.float32)
        self._variants: dict[int, SceneVariant] = {}
        self._delays: dict[int, ActionDelay] = {}
        self._elapsed = np.zeros(0, np.int64)
        self._past = 0
        self._recent = dict[int, RecentObservations]()

    def tasks(self) -> Mapping[str, str]:
        """Names of the tasks with their instructions."""
        return {name: scene.task.instruction for name, scene in self._scenes.items()}

    def layouts(self) -> Mapping[str, int | None]:
        """Names of the splits with their numbers of layouts."""
        return dict.fromkeys(SPLITS, LAYOUTS)

    def reset(self, episodes: Sequence[EpisodeSpec], past: int = 0) -> ChunkResult:
        """Begin episodes in rows 0..R-1, see `RobotSim.reset`; with a past of P control steps until the next reset."""
        if not episodes:
            raise UserError("no episodes to begin")
        seeds = [layout_seed(episode.split, episode.layout) for episode in episodes]
        self._groups = self._arrange(episodes)
        self.live = np.arange(len(episodes))
        self._controller.reset(len(episodes))
        self._full = np.zeros((len(episodes), self.full_state_size), np.float32)
        self._elapsed = np.zeros(len(episodes), np.int64)
        self._variants = {}
        self._delays = {}
        self._past = past
        self._recent = {}
        # before `_begin`, which starts the scenes from their variants
        self._vary(dict(enumerate(episodes)))
        return self._begin(self.live, dict(enumerate(seeds)), past)

    def restart(self, episodes: Mapping[int, EpisodeSpec]) -> ChunkResult:
        """Begin episodes by row, each of the task and split of the row's last `reset`, while the others continue."""
        # results are in the order of rows
        rows = np.array(sorted(episodes), np.int64)
        seeds = {row: layout_seed(episode.split, episode.layout) for row, episode in episodes.items()}
        self._check_restart(episodes)
        # restarted rows may have ended or may still be live
        self.live = np.union1d(self.live, rows)
        self._controller.restart(rows)
        self._elapsed[rows] = 0
        self._vary(episodes)
        return self._begin(rows, seeds)

    def _begin(self, rows: NDArray[np.int64], seeds: Mapping[int, int], past: int | None = None) -> ChunkResult:
        """Begin episodes in some rows: in all of them with a past given, which resets the rollouts."""
        # no step was taken: rewards have the length 0
        output = self._empty(rows, 0)
        for group in self._groups:
            scenes = np.flatnonzero(np.isin(group.rows, rows))
            if not len(scenes):
                continue
            begun = group.rows[scenes]
            chosen = [seeds[row] for row in begun.tolist()]
            variants = [self._variants.get(row) for row in begun.tolist()]
            if past is None:
                observation = group.rollout.restart(scenes, chosen, variants)
            else:
                observation = group.rollout.reset(chosen, variants, past)
            self._observe(group, observation, self._controller.commands(begun), np.ones(len(begun), bool), output)
        for index, row in enumerate(rows.tolist() if self._past else ()):
            self._recent[row] = RecentObservations(self._past)
            self._add_present(row, index, output)
        drawn = {row: self._variants[row].drawn for row in rows.tolist() if row in self._variants}
        return replace(output, drawn=drawn)

    def step_chunk(self, actions: ArrayLike, record: Collection[int] = ()) -> ChunkResult:
        """Step the live rows, see `RobotSim.step_chunk`; actions (L, K, A) are those of `action_names`."""
        if not len(self.live):
            raise UserError("all episodes have ended; call reset() first")
        if record and self._rendering is None:
            raise UserError("recording needs images; set image_size")
        moves = check_actions(actions, len(self.live), self.action_names)
        live = self.live
        for index, row in enumerate(live.tolist()):
            if row in self._delays:
                # the delay is part of the robot, so it comes before the controller
                moves[index] = self._delays[row](moves[index])
        plan = self._controller.plan(live, moves)
        output = self._empty(live, moves.shape[1])
        frames: dict[int, NDArray[np.uint8]] = {}
        for group in self._groups:
            # scenes of a group end at different times
            rows = group.rows[group.rollout.live]
            if not len(rows):
                continue
            # places of the group's rows in the result, which is in the order of all live rows
            at = np.searchsorted(live, rows)
            wanted = {int(np.searchsorted(group.rows, row)) for row in record if row in rows}
            chunk = group.rollout.step_chunk(group.scene.controls(plan.controls[at]), wanted)
            output.rewards[at], output.steps[at] = chunk.rewards, chunk.steps
            output.success[at], output.terminated[at] = chunk.solved, chunk.dones.any(axis=1)
            output.truncated[at], output.failed[at] = chunk.truncated, chunk.failed
            self._elapsed[rows] += chunk.steps
            # commands of the last step taken; a chunk may end early
            ends = plan.commands[at, np.maximum(chunk.steps - 1, 0)]
            self._observe(group, chunk.observation, ends, ~chunk.failed, output)
            if self._past:
                self._add_chunk_past(group, chunk, plan.commands[at], output)
            frames |= {int(group.rows[scene]): recorded for scene, recorded in chunk.recorded.items()}
        self.live = live[~(output.terminated | output.truncated | output.failed)]
        broken = [int(row) for row in live[output.failed]]
        self.counts["diverged"] += len(broken)
        self.counts["dropped"] += len(broken)
        reasons = dict.fromkeys(broken, "diverged: MuJoCo reported diverging values or a full buffer")
        # of rows that ended too: experts and critics read the state after the last step
        return replace(output, reasons=reasons, frames=frames, full_state=self._full[live])

    def full_state(self) -> NDArray[np.float32]:
        """Full state (L, 22) of the live rows as last observed, for scripted experts."""
        return self._full[self.live]

    def expert_actions(self) -> NDArray[np.float32]:
        """Actions (L, A) of the tasks' experts in the live rows; raises UserError if a task has none."""
        actions = np.zeros((len(self.live), self.action_size), np.float32)
        for group in self._groups:
            for scene in group.rollout.live.tolist():
                row = int(group.rows[scene])
                sensors = group.rollout.data(scene).sensordata[None]
                actions[np.searchsorted(self.live, row)] = group.scene.expert(sensors, self._controller.commands([row]))
        return actions

    def scene_of(self, row: int) -> tuple[mujoco.MjModel, mujoco.MjData]:
        """Model and state of a row, for viewers; neither may be changed."""
        group = next(group for group in self._groups if row in group.rows)
        variant = self._variants.get(row)
        scene = int(np.searchsorted(group.rows, row))
        return group.rollout.model if variant is None else variant.model, group.rollout.data(scene)

    def picture(self, pixels: int) -> NDArray[np.uint8]:
        """(pixels, pixels, 3) RGB of row 0, of any size, to look at."""
        model, data = self.scene_of(0)
        if self._close_up is None:
            self._close_up = FrameRenderer(model, RenderSettings(pixels, pixels, self.settings.camera))
        # of the same size for all tasks and variants
        self._close_up.show(model)
        update_poses(model, data)
        return self._close_up.rgb(data)

    def describe(self) -> Mapping[str, Any]:
        """Everything that a measurement depends on."""
        import mujoco

        settings = asdict(self.settings)
        # Entries at their defaults are left out: fingerprints of evaluations made before they existed stay valid.
        unset = {
            "look": self.settings.look == "policy",
            "randomization": not self.settings.randomization.active(),
            "views": not self.views,
            "end_at_success": self.settings.end_at_success,
            "device": True,
            "physics": self._warp is None,
        }
        if self._warp is not None:
            settings["physics"] = self._warp
        settings = {name: value for name, value in settings.items() if not unset.get(name)}
        return {
            "simulator": "tabletop",
            "tasks": {name: self._horizon(name) for name in self._scenes},
            "arm": self._scene.arm.name if self._scene.arm else None,
            "control_hz": round(1.0 / (self._scene.substeps * self._physics_step()), 3),
            "physics_step_s": self._physics_step(),
            "renderer": f"{self._drawing.name}: {self._drawing.device}" if self._drawing else None,
            "mujoco": mujoco.__version__,
            "numpy": np.__version__,
            "machine": platform.machine(),
            "sensors": "of the observed state",  # numbers with those of the physics step before are others
            **settings,
            "horizon": self.horizon,
            **{f"{name}.{key}": part for name, scene in self._scenes.items() for key, part in scene.describe().items()},
        }

    def close(self) -> None:
        """Stop the threads and free the renderers."""
        self._groups = []
        self.live = np.zeros(0, np.int64)
        while self._rollouts:
            self._rollouts.popitem()[1].close()
        if self._close_up is not None:
            self._close_up.close()
            self._close_up = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _horizon(self, task: str) -> int:
        return self.settings.horizon or self._scenes[task].task.horizon

    def _physics_step(self) -> float:
        return float(self._scene.model.opt.timestep)

    def _arrange(self, episodes: Sequence[EpisodeSpec]) -> list[_Group]:
        rows: dict[tuple[str, str], list[int]] = {}
        for row, episode in enumerate(episodes):
            if episode.task not in self._scenes:
                raise UserError(
                    f"episode {row} has the task {episode.task!r}, but this simulator runs {', '.join(self._scenes)}. "
                    f"All tasks: {', '.join(TASKS)}"
                )
            rows.setdefault((episode.task, episode.split), []).append(row)
        return [self._group(key, np.array(found)) for key, found in rows.items()]

    def _group(self, key: tuple[str, str], rows: NDArray[np.int64]) -> _Group:
        task, split = key
        # splits differ in where the pieces begin
        scene = self._scenes[task].for_split(split)
        known = self._rollouts.get(key)
        # a smaller batch uses a part of the rollout, so evaluations need no new threads
        if known is None or known.scenes < len(rows):
            if known is not None:
                known.close()
            drawing = self._drawing.name if self._drawing else None
            physics = None
            video = None
            if self._warp is not None:
                from robotics.sim.warp_physics import WarpPhysics

                physics = WarpPhysics(scene.model, len(rows), scene.substeps, self.settings.device)
            if self.settings.look == "film" and self.image_size is not None:
                video = partial(VideoRenderer, scene, self.image_size, drawing)
            known = self._rollouts[key] = ImageRollout(
                scene.model,
                scene,
                len(rows),
                self._rendering,
                substeps=scene.substeps,
                horizon=self._horizon(task),
                workers=self._workers,
                backend=drawing,
                video=video,
                physics=physics,
                ends=self.settings.end_at_success,
            )
        return _Group(scene, known, rows)

    def _check_restart(self, episodes: Mapping[int, EpisodeSpec]) -> None:
        kinds = {int(row): (group.scene.task.name, group.scene.split) for group in self._groups for row in group.rows}
        for row, episode in episodes.items():
            if row not in kinds:
                raise UserError(f"row {row} does not exist; the last reset began {len(kinds)} episodes")
            if (episode.task, episode.split) != kinds[row]:
                raise UserError(
                    f"row {row} runs the task {kinds[row][0]} of the split {kinds[row][1]}, not {episode.task} of "
                    f"{episode.split}; reset all rows to change that"
                )

    def _empty(self, rows: NDArray[np.int64], length: int) -> ChunkResult:
        output = ChunkResult.empty(rows, length, self.state_size, self.image_size, len(self.views), self._past)
        return replace(output, object_poses=np.full((len(rows), 4, 4), np.nan))

    def _observe(
        self,
        group: _Group,
        seen: SceneObservation,
        commands: NDArray[np.float64],
        sound: NDArray[np.bool_],
        out: ChunkResult,
    ) -> None:
        """Write the observations of a group's scenes into the result; failed rows stay zero."""
        rows = group.rows[seen.scenes[sound]]
        at, views = np.searchsorted(out.rows, rows), out.observation.views
        # exact, whatever the variant measures
        self._full[rows] = measured = group.scene.sensors.state(seen.sensordata[sound], commands[sound])
        if self._variants:
            measured = group.scene.sensors.state(seen.measured[sound], commands[sound])
        out.observation.state[at] = measured[:, : self.state_size]
        assert out.object_poses is not None
        out.object_poses[at] = group.scene.object_poses(seen.qpos[sound], seen.sensordata[sound])
        if out.observation.images is not None and seen.frames is not None:
            out.observation.images[at] = seen.frames[sound]
        if views is not None and seen.views is not None:
            views[at] = seen.views[sound]
        for row, index in zip(rows.tolist(), at.tolist(), strict=True):
            if row in self._variants:
                self._add_noise(row, int(self._elapsed[row]), _parts(out, index))

    def _add_noise(self, row: int, step: int, parts: Mapping[str, NDArray[Any]]) -> None:
        """Add the noise of a control step to an observation."""
        variant = self._variants[row]
        parts["state"][:] = variant.noisy_state(parts["state"], step)
        # videos for people are drawn without noise
        if "images" in parts and self.settings.look == "policy":
            parts["images"][:] = variant.noisy_image(parts["images"], step)
        for image, name in zip(parts.get("views", ()), self.views if "views" in parts else (), strict=True):
            image[:] = variant.noisy_image(image, step, name)

    def _add_chunk_past(self, group: _Group, chunk: Chunk, commands: NDArray[np.float64], out: ChunkResult) -> None:
        """Write the pasts of a group's rows that continue, given their commands (L, K, 5)."""
        for index, scene in enumerate(chunk.scenes.tolist()):
            if scene not in group.rollout.live:
                continue
            row = int(group.rows[scene])
            looks = chunk.observation.earlier[index]
            step = int(chunk.steps[index]) - 1
            # oldest first; `back` control steps before the present one
            for back, look in zip(range(len(looks), 0, -1), looks, strict=True):
                state = group.scene.sensors.state(look.measured[None], commands[index, step - back][None])
                seen = {"state": state[0, : self.state_size], "images": look.frame, "views": look.views}
                parts = {name: part for name, part in seen.items() if part is not None}
                if row in self._variants:
                    # noise is drawn by control step, so a step seen again has the noise it had
                    self._add_noise(row, int(self._elapsed[row]) - back, parts)
                self._recent[row].add(parts)
            self._add_present(row, int(np.searchsorted(out.rows, row)), out)

    def _add_present(self, row: int, index: int, out: ChunkResult) -> None:
        """Add a row's observation to its recent ones, and write those before it into the result."""
        self._recent[row].add(_parts(out, index))
        for name, part in self._recent[row].before().items():
            getattr(out.observation, f"past_{name}")[index] = part

    def _vary(self, episodes: Mapping[int, EpisodeSpec]) -> None:
        """Draw the variants of the episodes that begin in some rows."""
        for row, episode in episodes.items():
            variant = self._scenes[episode.task].variant(episode)
            self._variants.pop(row, None)
            self._delays.pop(row, None)
            if variant is not None:
                hold = self._scene.parts.hold
                self._variants[row], self._delays[row] = variant, ActionDelay(variant.action_delay, hold)


def open_tabletop(config: SimConfig, height: int | None = None) -> TabletopBatch:
    """Start the simulator of a configuration; with a height in pixels, in the presentation look for videos."""
    size = (config.image_size, config.image_size) if config.image_size else None
    if unknown := sorted(set(config.options) - {"end_at_success"}):
        raise UserError(f"sim.options has {', '.join(unknown)}; allowed: end_at_success")
    settings = BatchSettings(
        image_size=video_size(height) if height else size,
        look="film" if height else "policy",
        camera=config.camera,
        views=tuple(config.views),
        state=config.state,
        reward="dense",  # `success` is a flag of its own
        horizon=config.horizon or None,
        randomization=config.randomization,
        physics="mujoco" if height else config.physics,
        end_at_success=bool(config.options.get("end_at_success", True)),
    )
    return TabletopBatch(config.tasks or ["reach"], config.arm, settings, workers=config.workers or None)


def _check_alike(scenes: Sequence[Scene]) -> None:
    """Raise UserError unless policies and one controller fit all scenes."""
    first, doubled = scenes[0], len({scene.task.name for scene in scenes}) < len(scenes)
    if doubled:
        raise UserError(f"two tasks have the same name: {', '.join(scene.task.name for scene in scenes)}")
    for name in ("state_names", "action_names", "control_hz", "arm"):
        for scene in scenes:
            if getattr(scene, name) != getattr(first, name):
                raise UserError(
                    f"the tasks {first.task.name} and {scene.task.name} differ in {name}: {getattr(first, name)} and "
                    f"{getattr(scene, name)}; run them in separate simulators"
                )


def _parts(out: ChunkResult, index: int) -> dict[str, NDArray[Any]]:
    """Writable parts of a row's observation."""
    seen = {name: getattr(out.observation, name) for name in ("state", "images", "views")}
    return {name: part[index] for name, part in seen.items() if part is not None}


COUNTS = ("crashed", "hung", "memory", "raised", "restarted", "dropped", "diverged")
