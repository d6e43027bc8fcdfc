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
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from mmrl.config import load_run
from mmrl.errors import RunError, UserError
from mmrl.files import last_line, output_folder
from mmrl.runs.folder import has_begun
from robotics.episodes.pacing import ControlRate, Pacer
from robotics.episodes.payload import episode_id, list_episodes
from robotics.interventions.devices import QUIT, REDO, Device
from robotics.interventions.hg_dagger import ACTOR, HgDaggerConfig, published
from robotics.interventions.overseers import InsideOverseer, Overseer, Person, open_overseer
from robotics.interventions.watched import WatchedEpisode, run_watched
from robotics.policies.policy_loading import load_action_policy
from robotics.rewards.judged_sim import open_run_sim
from robotics.sim.episodes import RobotObservation, RobotSim
from robotics.sim.interface import interface_of

Say = Callable[[str], object]
LOG = "learner.log"
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
        if isinstance(overseer, Person):
            stack.callback(overseer.device.close)
        learner = stack.enter_context(_learner(path, overrides, config)) if learn else None
        session = _Session(config, overseer, say, learner, stack)
        session.run()
    return session.attempts


@contextlib.contextmanager
def _learner(path: Path, overrides: Sequence[str], config: HgDaggerConfig) -> Iterator[subprocess.Popen[bytes]]:
    """The process that learns; it is asked to save and stop at the end."""
    run_dir = Path(config.output_dir)
    threads = [] if config.trainer.threads else ["trainer.threads=1"]
    words = ["train", str(path), *overrides, *threads, *(["--resume"] if has_begun(run_dir) else [])]
    run_dir.mkdir(parents=True, exist_ok=True)
    # of an earlier learner, which the episodes must not begin with
    shutil.rmtree(run_dir / ACTOR, ignore_errors=True)
    with (run_dir / LOG).open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "mmrl.cli", *words],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={"OMP_NUM_THREADS": "1", **os.environ},
            # not in this terminal's group: Ctrl-C is for the control loop, which then stops the learner itself
            start_new_session=True,
        )
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, process.pid, os.getpriority(os.PRIO_PROCESS, 0) + NICE)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait()


class _Session:
    """The control loop over all watched episodes."""

    def __init__(
        self,
        config: HgDaggerConfig,
        overseer: Overseer,
        say: Say,
        learner: subprocess.Popen[bytes] | None,
        stack: contextlib.ExitStack,
    ) -> None:
        self._config, self._overseer, self._say, self._learner = config, overseer, say, learner
        self._run_dir = Path(config.output_dir)
        self._weights: int | None = None
        if learner is not None:
            say(f"waiting for the learner's first weights; its output is in {self._run_dir / LOG}")
        # before the environment, which the learner opens at its start; a robot takes one process at a time
        self._newest(first=True)
        torch.set_num_threads(1)
        self._sim = open_run_sim(dataclasses.replace(config.sim, workers=1), config.success)
        stack.callback(self._sim.close)
        self._policy = load_action_policy(config.model, self._sim, config.seed).eval()
        hz = interface_of(self._sim).control_hz
        if hz is None:
            raise UserError(
                "the simulator does not report its control rate; set render_fps in the environment's metadata, or "
                "sim.options.adapter.control_hz"
            )
        self._hz = hz
        self._record = stack.enter_context(config.record(self._sim))
        self._tasks = list_episodes(config.data, self._sim.tasks(), self._sim.layouts())
        self._show = _shown_on(overseer.device, self._sim) if isinstance(overseer, Person) else None

    @property
    def attempts(self) -> int:
        """Recorded attempts."""
        return len(self._record.attempts)

    def run(self) -> None:
        """Run episodes until all are recorded and learned from, or the person quits."""
        self._load_weights()
        try:
            while self.attempts < self._config.attempts:
                pacer = Pacer(self._hz)
                episode = self._episode(pacer)
                if episode.press == QUIT:
                    self._say(f"stopped after {self.attempts} episodes; run the command again to continue")
                    return
                if episode.press == REDO:
                    self._record.forget()
                    self._say("the episode was discarded and begins again")
                    continue
                self._record.add(episode, pacer.rate(), self._weights)
                self._say(_line(self.attempts, episode, pacer.rate(), self._weights))
                self._load_weights()
        except KeyboardInterrupt:
            self._say(f"interrupted after {self.attempts} episodes; run the command again to continue")
            return
        if self._learner is not None:
            self._say("all episodes are recorded; waiting for the learner")
            self._learner.wait()
            # raises an error if it has failed
            self._load_weights()

    def _episode(self, pacer: Pacer) -> WatchedEpisode:
        spec, seed = self._config.attempt(self._tasks, self.attempts)
        recalled, self._record.unfinished = self._record.unfinished, []
        # what somebody did inside the environment cannot be repeated, so that an unfinished episode begins again
        inside = isinstance(self._overseer, InsideOverseer)
        (episode,) = run_watched(
            self._policy,
            self._sim,
            [spec],
            self._overseer,
            self._config.acting,
            [seed],
            before_step=pacer.wait,
            show=self._show,
            note=None if inside else self._record.note,
            recalled=[] if inside else recalled,
        )
        return episode

    def _load_weights(self) -> None:
        """Take the learner's newest weights, between two episodes."""
        found = self._newest()
        if found is not None and found[0] != self._weights:
            self._weights, folder = found
            self._policy.load_weights(folder)
            self._policy.eval()

    def _newest(self, *, first: bool = False) -> tuple[int, Path] | None:
        """Trainer step and folder of the learner's newest weights, whose `first` ones are waited for."""
        while self._learner is not None:
            code, found = self._learner.poll(), published(self._run_dir)
            if code:
                log = self._run_dir / LOG
                raise RunError(
                    f"the learner ended with code {code}: {last_line(log)}; its output is in {log}. The recorded "
                    "episodes are kept: run the command again to continue"
                )
            # before its first round, the learner clones the demonstrations; one that ends had nothing left to do
            if (found and found[-1][0] >= self._config.interventions.first) or code == 0 or not first:
                return found[-1] if found else None
            time.sleep(POLL_S)
        return None


def _line(number: int, episode: WatchedEpisode, rate: ControlRate | None, weights: int | None) -> str:
    ending = f"failed ({episode.reason})" if episode.failed else "success" if episode.success else "no success"
    by = f"{sum(episode.by_person)} of {len(episode)} steps in {episode.starts} interventions"
    at = "" if rate is None else f", {rate.hz:.2f} Hz (jitter {rate.jitter_ms:.1f} ms, {rate.late} late)"
    old = "" if weights is None else f", weights of step {weights}"
    return f"episode {number}, {episode_id(episode.episode)}: {ending}, {by}{at}{old}"


def _shown_on(device: Device, sim: RobotSim) -> Callable[[RobotObservation, str], None]:
    """Shows a device the tabletop in more pixels than the policy gets, else the policy's image."""
    picture: Any = getattr(sim, "picture", None)

    def show(observation: RobotObservation, text: str) -> None:
        image = None if observation.images is None else observation.images[0]
        device.show(image if picture is None else picture(PICTURE), text)

    return show
