"""A live session: a control loop at a fixed rate in this process, and the run that learns in another one.

    this process                                             `mmrl train`, started here
    ------------                                             --------------------------
    device or script ─▶ control loop ─▶ episodes (dataset) ─▶ rounds of cloning
                            ▲                                      │
                            └── weights between two episodes ◀── actor/step-N

The session never waits for the learner, except at its start for the first weights. It may be stopped at any time and
started again: an unfinished episode continues where it was, and the learner resumes from its checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mmrl.config import load_run
from mmrl.errors import RunError, UserError
from mmrl.files import output_folder
from mmrl.runs.folder import has_begun
from robotics.episodes.payload import episode_id, list_episodes
from robotics.interventions.devices import QUIT, REDO
from robotics.interventions.hg_dagger import (
    HgDaggerConfig,
    attempt_of,
    open_record,
    published,
)
from robotics.interventions.overseers import Person, open_overseer
from robotics.interventions.pacing import ControlRate, Pacer
from robotics.interventions.watched import WatchedEpisode, run_watched
from robotics.policies.policy_loading import load_action_policy
from robotics.sim.episodes import RobotObservation, RobotSim
from robotics.sim.interface import interface_of
from robotics.sim.opening import open_sim

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from robotics.interventions.overseers import Overseer
    from robotics.scenes.batch import TabletopBatch

LOGGER = logging.getLogger("mmrl")
Say = Callable[[str], object]
POLL_S = 0.2
NICE = 5
"""Added to the learner's niceness, so that the control loop gets the processor when it needs it."""
PICTURE = 384
"""Pixels of the picture that a person sees of a tabletop scene."""


def intervene(path: Path, overrides: Sequence[str], say: Say, *, learn: bool = True) -> int:
    """Run the watched episodes of an HG-DAgger configuration in a control loop, and its learner.

    Args:
        path: the configuration, with `interventions.live: true`.
        overrides: of the configuration, `a.b=c`.
        say: takes lines to print.
        learn: whether to start the learner; without it, the policy of `model.path` acts and episodes are recorded.

    Returns:
        The number of recorded attempts, earlier sessions included.

    Raises:
        UserError: the configuration is of another recipe or not live, a device is missing, or a part cannot be used.
        RunError: the learner failed; the episodes so far are kept.
    """
    _, config = load_run(path, list(overrides))
    if not isinstance(config, HgDaggerConfig):
        raise UserError(f"{path} has the recipe {config.recipe}; `mmrl robot intervene` needs robot_hg_dagger")
    if not config.interventions.live:
        raise UserError("interventions.live is false, so the run collects the episodes itself; set it to true")
    if not learn and not config.model.path:
        raise UserError("--no-learner records with the policy of model.path, which is empty; set it to a policy")
    output_folder(config.output_dir, "output_dir")
    # the device first: without it nothing needs to start
    overseer = open_overseer(config.interventions.overseer)
    with contextlib.ExitStack() as stack:
        stack.callback(overseer.close)
        learner = stack.enter_context(_learner(path, overrides, config)) if learn else None
        session = _Session(config, overseer, say, learner, stack)
        finished = session.run()
        if learner is not None and finished:
            say("all episodes are recorded; waiting for the learner")
            learner.finish()
    return session.attempts


class _Learner:
    """The process that learns."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                # not in this terminal's group: Ctrl-C is for the control loop, which then stops the learner itself
                start_new_session=True,
            )
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self.process.pid, os.getpriority(os.PRIO_PROCESS, 0) + NICE)

    def check(self) -> None:
        """Raise RunError if it has failed."""
        code = self.process.poll()
        if code:
            lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            raise RunError(
                f"the learner ended with code {code}: {lines[-1] if lines else 'no message'}; its output is in "
                f"{self.log}. The recorded episodes are kept: run the command again to continue"
            )

    def finish(self) -> None:
        """Wait for its end."""
        self.process.wait()
        self.check()

    def stop(self) -> None:
        """Ask it to save and stop, and wait."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait()


@contextlib.contextmanager
def _learner(path: Path, overrides: Sequence[str], config: HgDaggerConfig) -> Iterator[_Learner]:
    run_dir = Path(config.output_dir)
    threads = [] if config.trainer.threads else ["trainer.threads=1"]
    words = ["train", str(path), *overrides, *threads, *(["--resume"] if has_begun(run_dir) else [])]
    learner = _Learner([sys.executable, "-m", "mmrl.cli", *words], run_dir / "learner.log")
    try:
        yield learner
    finally:
        learner.stop()


class _Session:
    """The control loop over all watched episodes."""

    def __init__(
        self,
        config: HgDaggerConfig,
        overseer: Overseer,
        say: Say,
        learner: _Learner | None,
        stack: contextlib.ExitStack,
    ) -> None:
        self._config, self._overseer, self._say, self._learner = config, overseer, say, learner
        torch.set_num_threads(1)
        self._sim = open_sim(dataclasses.replace(config.sim, workers=1))
        stack.callback(self._sim.close)
        self._policy = load_action_policy(config.model, self._sim, config.seed).eval()
        self._weights: int | None = None
        hz = interface_of(self._sim).control_hz
        if hz is None:
            raise UserError(
                "the simulator does not report its control rate; set render_fps in the environment's metadata, or "
                "sim.options.adapter.control_hz"
            )
        self._pacer = Pacer(hz)
        self._record = open_record(config, self._sim)
        stack.callback(self._record.close)
        self._tasks = list_episodes(config.data, self._sim.tasks(), self._sim.layouts())
        self._picture = _picture_of(self._sim) if isinstance(overseer, Person) else None

    @property
    def attempts(self) -> int:
        """Recorded attempts."""
        return len(self._record.attempts)

    def run(self) -> bool:
        """Run episodes until all are recorded (True) or the person quits (False)."""
        self._await_weights()
        if self._record.unfinished and isinstance(self._overseer, Person):
            self._overseer.recalled.extend(step.given for step in self._record.unfinished if step.given is not None)
        try:
            while self.attempts < self._config.attempts:
                episode = self._episode()
                if episode.press == QUIT:
                    self._say(f"stopped after {self.attempts} episodes; run the command again to continue")
                    return False
                if episode.press == REDO:
                    self._record.forget()
                    self._say("the episode was discarded and begins again")
                    continue
                rate = self._pacer.rate()
                self._record.add(episode, rate, self._weights)
                self._say(_line(self.attempts, episode, rate, self._weights))
                self._load_weights()
        except KeyboardInterrupt:
            self._say(f"interrupted after {self.attempts} episodes; run the command again to continue")
            return False
        return True

    def _episode(self) -> WatchedEpisode:
        spec, seed = attempt_of(self._config, self._tasks, self.attempts)
        self._pacer.restart()
        recalled, self._record.unfinished = self._record.unfinished, []
        (episode,) = run_watched(
            self._policy,
            self._sim,
            [spec],
            self._overseer,
            self._config.acting,
            [seed],
            before_step=self._pacer.wait,
            show=self._show if self._picture is not None else None,
            note=self._record.note,
            recalled=recalled,
        )
        return episode

    def _show(self, observation: RobotObservation, text: str) -> None:
        assert self._picture is not None
        self._overseer.show(self._picture(observation), text)

    def _await_weights(self) -> None:
        """Wait for the weights of the learner that has just been started; it removes half-written files until then."""
        if self._learner is None:
            return
        self._say(f"waiting for the learner's first weights; its output is in {self._learner.log}")
        while True:
            self._learner.check()
            found = published(Path(self._config.output_dir))
            started = found is not None and found[1] == self._learner.process.pid
            # before its first round, the learner clones the demonstrations
            if found is not None and started and found[0] >= self._config.interventions.first:
                break
            if self._learner.process.poll() is not None:
                break  # it had nothing left to do
            time.sleep(POLL_S)
        self._load_weights()

    def _load_weights(self) -> None:
        """Take the newest weights, between two episodes."""
        if self._learner is None:
            return
        self._learner.check()
        found = published(Path(self._config.output_dir))
        if found is not None and found[0] != self._weights:
            self._policy.load_weights(found[2])
            self._policy.eval()
            self._weights = found[0]


def _line(number: int, episode: WatchedEpisode, rate: ControlRate | None, weights: int | None) -> str:
    ending = "failed" if episode.failed else "success" if episode.success else "no success"
    by = f"{sum(episode.by_person)} of {len(episode)} steps in {episode.starts} interventions"
    at = "" if rate is None else f", {rate.hz:.2f} Hz (jitter {rate.jitter_ms:.1f} ms, {rate.late} late)"
    old = "" if weights is None else f", weights of step {weights}"
    return f"episode {number}, {episode_id(episode.episode)}: {ending}, {by}{at}{old}"


def _picture_of(sim: RobotSim) -> Callable[[RobotObservation], NDArray[np.uint8] | None]:
    """What a person sees: the tabletop in more pixels than the policy gets, else the policy's image."""
    from robotics.scenes.batch import TabletopBatch

    if not isinstance(sim, TabletopBatch):
        return lambda observation: None if observation.images is None else observation.images[0]
    return _TablePicture(sim)


class _TablePicture:
    """Draws the scene of a tabletop's first row."""

    def __init__(self, sim: TabletopBatch) -> None:
        self._sim = sim
        self._renderer: Any = None
        self._model: Any = None

    def __call__(self, observation: RobotObservation) -> NDArray[np.uint8]:
        from robotics.sim.rendering import FrameRenderer, RenderSettings, update_poses

        model, data = self._sim.scene_of(0)
        if self._renderer is None:
            settings = RenderSettings(PICTURE, PICTURE, self._sim.settings.camera)
            self._renderer = FrameRenderer(model, settings)
        elif model is not self._model:
            self._renderer.show(model)
        self._model = model
        update_poses(model, data)
        drawn: NDArray[np.uint8] = self._renderer.rgb(data)
        return drawn
