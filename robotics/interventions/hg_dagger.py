"""HG-DAgger: behaviour cloning on a dataset that grows by the control steps in which an overseer had control.

A round is a number of episodes of the current policy under an overseer, followed by training steps of `robot_clone` on
the demonstrations and all steps of the overseer so far. There is no critic and no reward. A chunk that begins in an
intervention is learned up to the end of the intervention, as the actions after it are the policy's own.

Rounds are the same whether the run collects them itself (a scripted overseer, many episodes at once) or takes them from
a live session (`mmrl robot intervene`, a control loop in another process): the training steps of round r begin as soon
as the attempts of rounds 1 to r are in the dataset, and use exactly those. A resumed run repeats them from the dataset,
so learner and data do not depend on the wall clock.

Differences to the paper: training continues from the current weights instead of starting again after each round, as in
HIL-SERL's train_hgdagger.py; the paper's doubt threshold, a risk measure of an ensemble, is not computed.

Source: Kelly et al., HG-DAgger, arXiv 1810.02890, algorithm 1; rail-berkeley/hil-serl examples/train_hgdagger.py.
"""

from __future__ import annotations

import functools
import logging
import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import PartialState
from numpy.typing import NDArray

from mmrl.core.loss import Metric
from mmrl.core.rollouts import Rollouts
from mmrl.errors import UserError
from mmrl.fields import bounded, rare
from mmrl.files import expanded, replaced
from mmrl.runs.fingerprint import content_digest
from mmrl.training.machines import check_same_folder
from mmrl.training.processes import Streams, stream_seed
from mmrl.training.recipe import Step
from robotics.data import EpisodeData, LeRobotReader
from robotics.episodes.demonstrations import Demonstrations, Transition
from robotics.episodes.payload import EpisodeSetConfig, list_episodes
from robotics.interventions.overseers import PEOPLE, OverseerConfig, open_overseer
from robotics.interventions.record import INTERVENTION, InterventionRecord, read_attempts
from robotics.interventions.watched import run_watched
from robotics.methods.clone import CloneConfig, CloneRecipe
from robotics.policies.base.action_policy import ActionPolicy
from robotics.sim.episodes import EpisodeSpec, RobotSim

LOGGER = logging.getLogger("mmrl")
FOLDER, ACTOR = "interventions", "actor"
"""Folders of a run: the recorded episodes, and the weights for the process that acts."""
TRIES = 20
"""How often a dataset is read that another process may be changing."""


@dataclass
class InterventionConfig:
    """Episodes that an overseer watches."""

    path: str = rare("")
    """Folder of the recorded episodes; empty = interventions in the run folder. Episodes in it are the run's first."""
    episodes: int = bounded(10, at_least=1)
    """Episodes in a round."""
    every: int = bounded(100, at_least=1)
    """Training steps in a round, after its episodes."""
    first: int = bounded(0, at_least=0)
    """Training steps on the demonstrations alone, before the first round."""
    live: bool = False
    """false: the run collects the episodes itself, with a scripted overseer. true: `mmrl robot intervene` collects them
    in a control loop and starts the run, which trains meanwhile."""
    overseer: OverseerConfig = field(default_factory=OverseerConfig)
    """Who watches the policy."""

    def validate(self) -> None:
        """Refuse a person without a live session; raises ValueError."""
        if self.overseer.kind in PEOPLE and not self.live:
            raise ValueError(
                f"interventions.overseer.kind is {self.overseer.kind}, but interventions.live is false, so the run "
                "would collect the episodes itself; set interventions.live=true and start `mmrl robot intervene`"
            )


@dataclass
class HgDaggerConfig(CloneConfig):
    """An HG-DAgger run."""

    data: EpisodeSetConfig = field(default_factory=EpisodeSetConfig)
    """Initial states of the watched episodes, in turn."""
    interventions: InterventionConfig = field(default_factory=InterventionConfig)
    """The watched episodes."""

    @property
    def record_folder(self) -> Path:
        """Folder of the recorded episodes."""
        given = self.interventions.path
        return expanded(given) if given else Path(self.output_dir) / FOLDER

    @property
    def attempts(self) -> int:
        """Watched episodes of the whole run."""
        return self.attempts_before(self.trainer.steps - 1)

    def attempts_before(self, step: int) -> int:
        """Number of watched episodes whose steps training step `step` may use."""
        about, past = self.interventions, step - self.interventions.first
        return 0 if past < 0 else (1 + past // about.every) * about.episodes

    def record(self, sim: RobotSim) -> InterventionRecord:
        """Open the folder of the recorded episodes."""
        return InterventionRecord(self.record_folder, sim, self.demonstrations.cameras, self.interventions.episodes)

    def attempt(self, tasks: Sequence[EpisodeSpec], number: int) -> tuple[EpisodeSpec, int]:
        """Initial state and seed of a watched episode; the initial states follow each other in turn."""
        return tasks[number % len(tasks)], stream_seed(self.seed, "watched", number)

    def validate(self) -> None:
        """Check that there is a round at all; raises ValueError."""
        super().validate()
        if not self.attempts:
            raise ValueError(
                f"trainer.steps is {self.trainer.steps}, but the first round only comes after interventions.first = "
                f"{self.interventions.first} steps; use robot_clone to clone demonstrations alone"
            )


@dataclass
class AggregatedDemonstrations(Demonstrations):
    """Demonstrations, and watched episodes of which only the overseer's control steps are imitated.

    Checkpoints hold the number of attempts, which are read again from their folder.
    """

    folder: Path = Path()
    """Folder of the dataset with the watched episodes."""
    cameras: Sequence[str] = ()
    """Names of the policy's camera and the additional ones."""
    attempts: list[dict[str, Any]] = field(default_factory=list)
    """Lines of the attempts that have been added."""
    person_steps: int = 0
    """Number of the overseer's control steps."""

    def __post_init__(self) -> None:
        # (T,) of each episode, whether its action is to be imitated
        self.by_person = [np.ones(len(actions), bool) for actions in self.actions]
        # the control steps at which a chunk to be imitated may begin
        self._starts = super().transitions

    @property
    def transitions(self) -> list[Transition]:
        """Control steps of demonstrations and of the overseer."""
        return self._starts

    @property
    def num_transitions(self) -> int:
        """Number of these control steps."""
        return len(self._starts)

    def take(self, count: int) -> list[dict[str, Any]]:
        """Add the attempts up to number `count`; returns their lines."""
        lines = read_attempts(self.folder)[len(self.attempts) : count]
        found = [line["episode_index"] for line in lines if line["episode_index"] is not None]
        for episode in _read_episodes(self.folder, found) if found else []:
            self.add(episode)
        self.attempts += lines
        return lines

    def add(self, episode: EpisodeData) -> None:
        """Add a watched episode, if the overseer acted in it."""
        owner = np.asarray(episode.extra[INTERVENTION], bool).reshape(-1)
        if not owner.any():
            return
        self._starts += [Transition(len(self.actions), int(step)) for step in np.flatnonzero(owner)]
        self.person_steps += int(owner.sum())
        self.states.append(episode.state)
        self.actions.append(episode.action)
        self.instructions.append(episode.task)
        self.by_person.append(owner)
        if self.images is not None:
            first, *others = (episode.images[camera] for camera in self.cameras)
            self.images.append(first)
            self.views += [others] if others else []

    def chunks(self, transitions: Sequence[Transition], length: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """The next K actions (B, K, A), and a mask (B, K), 0 from the first step on that is not to be imitated."""
        actions, mask = super().chunks(transitions, length)
        for place, now in enumerate(transitions):
            owner = self.by_person[now.episode][now.step : now.step + length]
            # what follows the intervention is the policy's reaction to another state
            mask[place, : len(owner)] *= np.logical_and.accumulate(owner)
        return actions, mask

    def state_dict(self) -> dict[str, Any]:
        """Number of attempts, and a digest of the actions that are imitated."""
        return {"attempts": len(self.attempts), "digest": content_digest([self.actions, self.by_person])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Add the attempts of a checkpoint again; raises UserError if they are gone or have changed."""
        self.take(int(state["attempts"]))
        if self.state_dict() != state:
            raise UserError(
                f"{self.folder} no longer has the {state['attempts']} watched episodes that the checkpoint was trained "
                "on; restore the folder to resume"
            )


class HgDaggerRecipe(CloneRecipe):
    """Imitates an overseer in the states that the policy reaches; see the module."""

    config: HgDaggerConfig
    own_loss = "hg_dagger"

    def __init__(self, config: HgDaggerConfig, policy: ActionPolicy | None = None, sim: RobotSim | None = None) -> None:
        super().__init__(config, policy, sim)
        self._given = self.demonstrations.digest()
        # the lists of the demonstrations grow, and nobody else has them
        self.demonstrations: AggregatedDemonstrations = AggregatedDemonstrations(
            **vars(self.demonstrations), folder=config.record_folder, cameras=config.demonstrations.cameras
        )
        self.parts |= {"interventions": self.demonstrations}
        self._watched = list_episodes(config.data, self.sim.tasks(), self.sim.layouts())
        self._rows = 0
        self._published: int | None = None
        if config.interventions.live and not self.eval_tasks:
            # the session acts in another process, and a robot takes one at a time
            self.sim.close()

    @functools.cached_property
    def _record(self) -> InterventionRecord:
        return self.opened.enter_context(self.config.record(self.sim))

    def load_train_tasks(self) -> Sequence[Any]:
        """Places in a batch; their transitions are drawn from the dataset as it is at the step."""
        return list(range(self.config.trainer.tasks_per_step))

    def data_digest(self) -> str:
        """Digest of the demonstrations; `parts` has that of the watched episodes."""
        return self._given

    def waits_for(self, step: Step) -> str:
        """Which episodes of the step's round are missing; a live session is given the weights meanwhile."""
        config = self.config
        if not config.interventions.live:
            return ""
        wanted = config.attempts_before(step.number)
        begins = wanted > len(self.demonstrations.attempts)
        if self._published is None or (begins and self._published != step.number):
            if PartialState().is_main_process:
                publish(self.policy, Path(config.output_dir), step.number)
            self._published = step.number
        found = len(read_attempts(self.demonstrations.folder)) if begins else wanted
        by = "`mmrl robot intervene` records them, in the same folder or on a shared disk"
        return "" if found >= wanted else f"{self.demonstrations.folder} has {found} of {wanted} episodes; {by}"

    def rollout(self, policy: ActionPolicy, tasks: Sequence[Any], streams: Streams, step: Step) -> Rollouts:
        """Add the episodes of a round that begins, and draw a batch from all transitions so far."""
        wanted = self.config.attempts_before(step.number)
        if wanted > len(self.demonstrations.attempts):
            if PartialState().is_main_process and not self.config.interventions.live:
                self._collect(policy, wanted)
            PartialState().wait_for_everyone()
            lines = self.demonstrations.take(wanted)
            failures = [line["reason"] for line in lines if line["episode_index"] is None]
            if failures:
                text = "%d of %d watched episodes have no result, the first one because %s"
                LOGGER.warning(text, len(failures), len(lines), failures[0])
            check_same_folder(self.demonstrations.folder, len(self.demonstrations.attempts))
        known = self.demonstrations.transitions
        # one draw per place, with replacement: the dataset grows, so there are no epochs
        drawn = streams.seeds(len(tasks), 1, purpose="transition").flatten().tolist()
        self._rows = (step.number + 1) * self.config.trainer.tasks_per_step  # of all processes
        return self.batch(policy, [known[seed % len(known)] for seed in drawn], streams, step)

    def describe(self) -> str:
        """Name of the loss."""
        kind, known = self.config.interventions.overseer.kind, self.demonstrations
        count = known.num_transitions - known.person_steps
        return f"behaviour cloning of {count} demonstrated transitions and the steps of an overseer ({kind})"

    def step_metrics(self, rollouts: Rollouts) -> dict[str, float | Metric]:
        """Size of the dataset, and the interventions of the last round."""
        found = super().step_metrics(rollouts) | {"data/person_steps": float(self.demonstrations.person_steps)}
        found |= {"data/epoch": self._rows / self.demonstrations.num_transitions}
        lines = self.demonstrations.attempts[-self.config.interventions.episodes :]
        return found | (round_metrics(lines) if lines else {})

    def load_parts(self, folder: Path) -> None:
        """Open the recorded episodes: closing them finishes what an interruption left unfinished."""
        if PartialState().is_main_process and not self.config.interventions.live:
            _ = self._record

    def _collect(self, policy: ActionPolicy, wanted: int) -> None:
        """Run the attempts that the dataset lacks, as many at once as the simulator can."""
        begun, known = len(self._record.attempts), self.demonstrations
        if begun > len(known.attempts):
            LOGGER.info("%d episodes of %s are used again", begun - len(known.attempts), known.folder)
        overseer = open_overseer(self.config.interventions.overseer)
        size = self.sim.capacity or wanted
        for start in range(begun, wanted, size):
            numbers = range(start, min(start + size, wanted))
            specs, seeds = zip(*(self.config.attempt(self._watched, number) for number in numbers), strict=True)
            for episode in run_watched(policy, self.sim, specs, overseer, self.config.acting, seeds):
                self._record.add(episode)


def round_metrics(lines: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Metrics of the interventions in some attempts; those whose environment failed are only counted."""
    whole = [line for line in lines if line["episode_index"] is not None]
    count, steps = len(whole) or math.nan, sum(line["steps"] for line in whole) or math.nan
    found = {
        "intervention/rate": sum(line["person_steps"] for line in whole) / steps,
        "intervention/per_episode": sum(line["starts"] for line in whole) / count,
        "intervention/success": sum(line["success"] for line in whole) / count,
        "intervention/success_alone": sum(line["success"] for line in whole if not line["starts"]) / count,
        "intervention/failed": float(len(lines) - len(whole)),
    }
    paced = [line for line in whole if line.get("hz")]
    if paced:
        found["control/hz"] = sum(line["hz"] for line in paced) / len(paced)
        found["control/jitter_ms"] = sum(line["jitter_ms"] for line in paced) / len(paced)
        found["control/longest_ms"] = max(line["longest_ms"] for line in paced)
        found["control/late"] = float(sum(line["late"] for line in paced))
    return found


def publish(policy: ActionPolicy, run_dir: Path, step: int) -> None:
    """Write the weights for the process that acts; the newest two are kept, as the older one may be being read."""
    with replaced(run_dir / ACTOR / f"step-{step:06d}") as draft:
        policy.save_pretrained(draft)
    for _, old in published(run_dir)[:-2]:
        shutil.rmtree(old)


def published(run_dir: Path) -> list[tuple[int, Path]]:
    """Trainer steps of the published weights, and their folders; the newest last."""
    return sorted((int(path.name.removeprefix("step-")), path) for path in (run_dir / ACTOR).glob("step-*"))


def _read_episodes(folder: Path, numbers: Sequence[int], tries: int = TRIES) -> list[EpisodeData]:
    """Read what another process may be changing: joining the files of a dataset moves episodes between them."""
    try:
        return list(map(LeRobotReader(folder).episode, numbers))
    except UserError:
        if tries == 1:
            raise
    time.sleep(0.1)
    return _read_episodes(folder, numbers, tries - 1)
