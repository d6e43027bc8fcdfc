"""Episodes to look at: in a window, as a video, or as a strip of images (`mmrl sim play`)."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mmrl.errors import UserError
from mmrl.fields import bounded, choice
from robotics.scenes.arms import ARMS, PACKAGE_ARMS
from robotics.scenes.envs import SHOWN_PARTS, TabletopEnv
from robotics.scenes.scene import SPLITS
from robotics.scenes.videos import Caption, ImageStrip, VideoRenderer, video_size, write_caption, write_strips

if TYPE_CHECKING:
    import mujoco
    from numpy.typing import NDArray

    from mmrl.hub.video_writing import VideoRecorder

Say = Callable[[str], object]
HOLD_S = 1.0
"""Time for which the end of an episode is shown."""


@dataclass
class PlaySettings:
    """Which episodes to show, and how."""

    arm: str = choice("", ["", *ARMS, *PACKAGE_ARMS], or_function=True)
    """Arm, or module:Class of your own `ArmModel`; empty = the arm of the policy's run, otherwise panda."""
    split: str = choice("held_out", SPLITS)
    """train or held_out."""
    layout: int | None = bounded(None, at_least=0)
    """Number of the first episode's initial state, from which the others count up; null = drawn with the seed."""
    horizon: int = bounded(0, at_least=0)
    """Control steps after which an episode ends; 0 = the task's own horizon."""
    height: int = bounded(480, at_least=48)
    """Height in pixels of the video, which is 4:3."""
    temperature: float = bounded(0.0, at_least=0)
    """Sampling temperature of a policy's actions; 0 = the most likely actions."""
    step: int | None = None
    """Use the run's checkpoint of this step; null = the best one if there is one, otherwise the newest."""


class Actor(Protocol):
    """Chooses the actions of one episode after the other."""

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `TabletopEnv`: arm, observation, camera, image_size."""

    def reset(self, episode: int) -> None:
        """Begin an episode, whose number seeds random draws."""

    def act(self, env: TabletopEnv, observation: dict[str, Any]) -> NDArray[np.floating]:
        """Choose an action (A,)."""


class ExpertActor:
    """A task's scripted expert."""

    def __init__(self, seed: int) -> None:
        self.options: dict[str, Any] = {"observation": "state"}

    def reset(self, episode: int) -> None:
        """Nothing to reset."""

    def act(self, env: TabletopEnv, observation: dict[str, Any]) -> NDArray[np.float32]:
        """Choose an action (A,)."""
        return env.expert_action()


class RandomActor:
    """Uniform actions, each for half a second."""

    HELD = 5

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._steps = 0
        self.options: dict[str, Any] = {"observation": "state"}

    def reset(self, episode: int) -> None:
        """Begin an episode."""
        self._rng = np.random.default_rng([self._seed, episode])
        self._steps = 0

    def act(self, env: TabletopEnv, observation: dict[str, Any]) -> NDArray[np.float64]:
        """Choose an action (A,)."""
        if self._steps % self.HELD == 0:
            self._action = self._rng.uniform(-1.0, 1.0, env.action_space.shape)
        self._steps += 1
        return self._action


def play(
    task: str,
    actor: Actor,
    settings: PlaySettings,
    say: Say,
    *,
    episodes: int = 1,
    seed: int = 0,
    video: Path | None = None,
    strip: Path | None = None,
) -> int:
    """Show episodes in a window in real time, or write them to files if any are given."""
    if episodes < 1:
        raise UserError(f"--episodes is {episodes}; must be at least 1")
    for path, ending in ((video, ".mp4"), (strip, ".png")):
        if path is not None and path.suffix != ending:
            raise UserError(f"{path} must end with {ending}")
    options = {"arm": "panda", **actor.options} | ({"arm": settings.arm} if settings.arm else {})
    shown = video is None and strip is None
    with ExitStack() as stack:
        env = TabletopEnv(
            task,
            horizon=settings.horizon or None,
            split=settings.split,
            render_mode="human" if shown else None,
            **options,
        )
        stack.callback(env.close)
        strips = [ImageStrip() for _ in range(episodes if strip else 0)]
        recorder: _PlayRecorder | None = None
        if not shown:
            from mmrl.hub.video_writing import VideoRecorder

            renderer = stack.enter_context(VideoRenderer(env.scene, video_size(settings.height)))
            # every other state that the environment shows
            rate = env.scene.control_hz * SHOWN_PARTS / 2
            writer = stack.enter_context(VideoRecorder(video, rate)) if video else None
            recorder = _PlayRecorder(renderer, writer, hold=round(HOLD_S * rate))
            env.watch(recorder.see)
        solved = played = 0
        for number in range(episodes):
            if recorder is not None:
                recorder.strip = strips[number] if strip else None
            info = _run(env, actor, number, seed, settings)
            if env.window_closed:
                break
            played += 1
            solved += info["success"]
            ending = "solved" if info["success"] else "not solved"
            layout, seconds = f"layout {info['layout']} of {info['split']}", info["steps"] / env.scene.control_hz
            say(f"episode {number + 1}, {layout}: {ending} in {seconds:.1f} s")
            time.sleep(HOLD_S if shown else 0.0)
    say(f"{env.scene.task.name}: {solved} of {played} solved")
    if strip:
        write_strips(strip, strips)
    for path in filter(None, (video, strip)):
        say(f"written: {path}")
    return solved


def _run(env: TabletopEnv, actor: Actor, number: int, seed: int, settings: PlaySettings) -> dict[str, Any]:
    """Run an episode; returns the last info, with the number of control steps as `steps`."""
    layout = {} if settings.layout is None else {"layout": settings.layout + number}
    observation, info = env.reset(seed=seed if number == 0 else None, options=layout)
    actor.reset(number)
    steps, ended = 0, False
    while not (ended or env.window_closed):
        observation, _, terminated, truncated, info = env.step(actor.act(env, observation))
        steps, ended = steps + 1, terminated or truncated
    return {**info, "steps": steps}


@dataclass
class _PlayRecorder:
    """Draws what the environment shows, for a video, a strip or both."""

    renderer: VideoRenderer
    video: VideoRecorder | None
    hold: int  # frames of the end
    strip: ImageStrip | None = None  # of the present episode
    shown: int = 0  # states since its start

    def see(self, data: mujoco.MjData, caption: Caption) -> None:
        """Draw a state, if it is in the video or the strip."""
        self.shown = 0 if caption.seconds == 0 else self.shown + 1
        in_video = self.video is not None and (self.shown % 2 == 0 or bool(caption.outcome))
        in_strip = self.strip is not None and self.shown % SHOWN_PARTS == 0
        if not (in_video or in_strip):
            return
        frame = self.renderer.rgb(data, outcome=caption.outcome)
        if self.video is not None and in_video:
            for _ in range(self.hold if caption.outcome else 1):
                self.video.add(write_caption(frame, caption))
        if self.strip is not None and in_strip:
            self.strip.add(frame, caption)


ACTORS: dict[str, Callable[[int], Actor]] = {"expert": ExpertActor, "random": RandomActor}
