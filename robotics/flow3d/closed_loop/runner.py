"""Runs episodes in physics: one scene for each kind of episode, a planner in it, a video and the result of each run."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from mmrl.fields import check_config
from mmrl.hub.video_writing import write_mp4
from robotics.flow3d.clip import FlowClip
from robotics.flow3d.closed_loop.flow_episodes import FlowEpisode, LoopConfig, verifier_in
from robotics.flow3d.clouds import write_flow_page
from robotics.flow3d.flow_model import FlowModel
from robotics.flow3d.geometry import ImageArray
from robotics.flow3d.metrics import draw_flow, draw_paths, flow_errors, goal_reached
from robotics.flow3d.objects.demonstrator import Demonstrator
from robotics.flow3d.objects.flow_tasks import FLOW_TASKS
from robotics.flow3d.objects.scene import SceneConfig
from robotics.flow3d.objects.tabletop import FlowTabletop
from robotics.flow3d.plan.judge import open_verifier
from robotics.flow3d.plan.planner import FlowPlanner
from robotics.flow3d.plan.result import PlanResult, PlanRound, PlanTry
from robotics.sim.rendering import FrameRenderer, RenderSettings, update_poses

if TYPE_CHECKING:
    from PIL import Image


SIDE_PX = 384
FPS = 12
TICKS = 4
"""Ticks of 20 ms simulated time between two frames, which plays nearly in real time."""
STILL = 12
"""Frames for which the first image, the flow and the end are each shown."""
LOGGER = logging.getLogger("mmrl")
Row = dict[str, Any]
"""Result of an episode as JSON; see `EpisodeRunner.run`."""
Source = FlowModel | Callable[[FlowTabletop], FlowModel]
"""A flow model, or a function that makes one for a scene, such as `TrueFlow`."""


@contextmanager
def recorded_frames(robot: FlowTabletop) -> Iterator[list[ImageArray]]:
    """Frames of a scene at its start and then every `TICKS` ticks until the context ends."""
    frames: list[ImageArray] = []
    ticks = itertools.count(1)
    settings = RenderSettings(SIDE_PX, SIDE_PX, camera="scene", multisampling=True)
    with closing(FrameRenderer(robot.model, settings)) as renderer:

        def record() -> None:
            update_poses(robot.model, robot.data)
            frames.append(renderer.rgb(robot.data).copy())

        record()
        robot.on_frame = lambda _: record() if next(ticks) % TICKS == 0 else None
        try:
            yield frames
        finally:
            robot.on_frame = None


def write_video(path: Path, robot: FlowTabletop, frames: list[ImageArray], result: PlanResult, success: bool) -> None:
    """Write the frames of a run as mp4: the first one, the flow over it, the execution, and how it ended."""
    overlay = _overlay(result, robot.config.width)
    text = f"{robot.arm.name}: {result.instruction}"
    end = "done" if success else f"not done{f': {result.failure}' if result.failure else ''}"
    shown = [_frame(frames[0], None, text)] * STILL
    shown += [_frame(frames[0], overlay, text)] * STILL
    shown += [_frame(each, overlay, text) for each in frames[1:]]
    shown += [_frame(frames[-1], overlay, f"{text} ({end})")] * STILL
    write_mp4(path, np.stack(shown), FPS)


def _overlay(result: PlanResult, width_px: int) -> Image.Image | None:
    """About 4 x 4 paths of the first plan's flow on a transparent image."""
    from PIL import Image, ImageDraw

    first = result.rounds[0] if result.rounds else None
    if first is None or first.shown is None:
        return None
    flow = first.shown.flow
    image, every = Image.new("RGBA", (SIDE_PX, SIDE_PX)), max(1, len(first.points) // 4)
    pen = ImageDraw.Draw(image)
    draw_paths(pen, first.points[::every, ::every], flow[:, ::every, ::every], SIDE_PX / width_px)
    return image


def _frame(rgb: ImageArray, overlay: Image.Image | None, text: str) -> ImageArray:
    from PIL import Image, ImageDraw

    image: Any = Image.fromarray(rgb).convert("RGBA")
    if overlay is not None:
        image = Image.alpha_composite(image, overlay)
    pen = ImageDraw.Draw(image)
    pen.rectangle([0, SIDE_PX - 22, SIDE_PX, SIDE_PX], fill=(20, 20, 20, 255))
    pen.text((8, SIDE_PX - 18), text, fill=(255, 255, 255, 255), font_size=12)
    return np.asarray(image.convert("RGB"))


class FlowEpisodeRunner:
    """Runs episodes with one source of flow; each scene is built once and kept until `close`.

    Args:
        settings: verifier, planning and execution.
        source: a flow model, or a function that makes one for a scene.

    Raises:
        UserError: an option is out of range, or the verifier's model cannot be read.
    """

    def __init__(self, settings: LoopConfig, source: Source) -> None:
        check_config(settings, "loop")
        self.settings = settings
        self.source = source
        # A class such as TrueFlow also has `predict`, but makes a model for each scene.
        self._model = source if not isinstance(source, type) and hasattr(source, "predict") else None
        self._verifier = open_verifier(settings.verifier)
        self._sets: dict[SceneConfig, tuple[FlowTabletop, FlowPlanner]] = {}
        self._last: PlanResult | None = None

    def run(self, episode: FlowEpisode, video: Path | None = None) -> Row:
        """Run one episode to its end.

        Args:
            episode: which one.
            video: mp4 to write, with the predicted flow over the images; None records nothing.

        Returns:
            id, task, family, arm, shape, layouts, colours, background, number and instruction of the episode; success
            and failed_criteria by the scene; failure and detail of the planner, empty where the plan was executed;
            tries, each with ok, score and reason of the verifier and `meets`, whether the predicted end would do the
            task; ade_cm, fde_cm and rotation_deg of the executed flow, else of the first one, null without any; swaps,
            whether the model follows each other instruction; seconds. An episode with an error has `failed` true and a
            reason, and no success.
        """
        row = _describe(episode)
        started, self._last = time.perf_counter(), None
        try:
            row |= self._run(episode, video)
        except Exception as error:  # one episode must not end an evaluation
            LOGGER.warning("%s failed with %s: %s", episode.id, type(error).__name__, error)
            row |= {"failed": True, "success": False, "reason": f"{type(error).__name__}: {error}", "tries": []}
        return row | {"seconds": time.perf_counter() - started}

    def scene(self, episode: FlowEpisode) -> FlowTabletop:
        """The scene of an episode, at its start."""
        return self._prepare(episode)[0]

    def images(self) -> list[Image.Image]:
        """Images of the last episode: its flow over the first image, and the predicted outcome."""
        first = self._last.rounds[0] if self._last is not None and self._last.rounds else None
        if first is None or (chosen := first.shown) is None:
            return []
        from PIL import Image

        found = [draw_flow(first.observation.rgb, first.points, chosen.flow)]
        if chosen.after is not None:
            found.append(Image.fromarray(chosen.after).resize(found[0].size, Image.Resampling.NEAREST))
        return found

    def write_cloud(self, path: Path) -> None:
        """Write a page with scene, flow and predicted outcome of the last episode; nothing without a usable flow."""
        first = self._last.rounds[0] if self._last is not None and self._last.rounds else None
        if first is None or (chosen := first.shown) is None or chosen.motion is None:
            return
        clip = FlowClip(first.observation, first.points, chosen.flow)
        write_flow_page(path, clip, chosen.motion.moved_world_m[-1], first.observation.instruction)

    def close(self) -> None:
        """Free all renderers."""
        for robot, _ in self._sets.values():
            robot.close()
        self._sets.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _run(self, episode: FlowEpisode, video: Path | None) -> Row:
        robot, planner = self._prepare(episode)
        # spaced: the planner adds 0, 1, ... to it, and episodes must not share samples
        seed = self.settings.seed * 1_000_003 + 1009 * episode.number
        with nullcontext() if video is None else recorded_frames(robot) as frames:
            result = planner.run(robot, seed=seed)
        self._last, outcome = result, robot.success()
        if video is not None and frames:
            write_video(video, robot, frames, result, outcome.success)
        # Predictions are judged against the scene at the start.
        robot.reset(episode.number)
        return {
            "failed": False,
            "reason": "",
            "success": outcome.success,
            "failed_criteria": list(outcome.failed),
            "failure": str(result.failure or ""),
            "detail": result.detail,
            "plans": len(result.rounds),
            "tries": [_try_row(each, robot) for each in result.rounds[0].tries] if result.rounds else [],
            **self._flow_rows(robot, planner, result, seed),
        }

    def _flow_rows(self, robot: FlowTabletop, planner: FlowPlanner, result: PlanResult, seed: int) -> Row:
        found: Row = {"ade_cm": None, "fde_cm": None, "rotation_deg": None, "swaps": []}
        if not result.rounds or not (first := result.rounds[0]).tries:
            return found
        # the executed prediction, or the first one if none was accepted
        chosen = first.chosen or first.tries[0]
        demonstrator = Demonstrator(robot)
        if len(chosen.flow):
            # true flow of this very scene, for the points that the model was asked about
            truth = FlowClip(first.observation, first.points, demonstrator.flow_of(first.points, len(chosen.flow)))
            errors = flow_errors(chosen.flow[None], truth)
            found |= {name: getattr(errors, name) for name in ("ade_cm", "fde_cm", "rotation_deg")}
        if self.settings.language_swap and self._model is not None:
            found["swaps"] = _swaps(planner, first, demonstrator.goals(first.points), seed)
        return found

    def _prepare(self, episode: FlowEpisode) -> tuple[FlowTabletop, FlowPlanner]:
        # Tasks with the same furniture share a scene.
        robot, planner = self._sets.get(key := _key(episode.scene), (None, None))
        if robot is None or planner is None:
            robot = FlowTabletop(episode.scene)
            verifier = verifier_in(self.settings.verifier, self._verifier, robot)
            flow = self._model if self._model is not None else self.source(robot)  # type: ignore[operator]
            planner = FlowPlanner(flow, robot.arm, verifier, self.settings.grasps, self.settings.planner)
            self._sets[key] = robot, planner
        # the task first: the reset places its objects
        robot.give(episode.scene.task)
        robot.reset(episode.number)
        return robot, planner


def _key(scene: SceneConfig) -> SceneConfig:
    furniture = FLOW_TASKS[scene.task].furniture
    # the first task with this furniture stands for all of them
    return dataclasses.replace(
        scene, task=next(name for name, task in FLOW_TASKS.items() if task.furniture is furniture)
    )


def _describe(episode: FlowEpisode) -> Row:
    scene = episode.scene
    known = {name: getattr(scene, name) for name in ("shape", "layouts", "colours", "background")}
    return (
        {"id": episode.id, "task": scene.task, "family": episode.family, "arm": scene.actor_name}
        | known
        | {"number": episode.number, "instruction": FLOW_TASKS[scene.task].instruction}
    )


def _try_row(each: PlanTry, robot: FlowTabletop) -> Row:
    verdict, motion = each.verdict, each.motion
    return {
        "ok": None if verdict is None else verdict.ok,
        "score": None if verdict is None else verdict.score,
        "reason": "" if verdict is None else verdict.reason,
        "failure": str(each.failure or ""),
        "meets": None if motion is None else robot.success(motion.T_t_0_world[-1] @ robot.start).success,
    }


def _swaps(planner: FlowPlanner, first: PlanRound, goals: dict[str, list[float]], seed: int) -> list[bool]:
    """For each other instruction of the scene, whether the predicted object then ends nearest to its goal."""
    found = []
    for text in goals:
        if text == first.observation.instruction:
            continue
        asked = dataclasses.replace(first.observation, instruction=text)
        flow = planner.predictor.model.predict(asked, first.points, 1, seed)[0]
        end_m = FlowClip(asked, first.points, np.asarray(flow, dtype=np.float64)).flow_world_m[-1]
        found.append(goal_reached(end_m, goals, text))
    return found
