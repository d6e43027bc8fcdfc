"""Demonstrations as transitions: an observation and the actions that followed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from mmrl.errors import UserError
from mmrl.fields import bounded, choice, rare
from mmrl.files import expanded, shortened_name
from mmrl.hub.building import BuiltPath, build_if_missing
from mmrl.runs.fingerprint import content_digest
from robotics.data import EpisodeData, LeRobotReader
from robotics.data.features import ACTION, STATE
from robotics.episodes.dataset_fit import UNITS, check_dataset, in_simulator_units
from robotics.policies.base.action_policy import PolicyInputs
from robotics.policies.base.action_statistics import ActionStatistics, StateStatistics
from robotics.sim.episodes import RobotSim

LOGGER = logging.getLogger("mmrl")
IMAGES_READ = 256
"""Number of episodes whose first image is part of the digest of the demonstrations."""


@dataclass
class DemonstrationConfig(BuiltPath):
    """A folder in the LeRobotDataset v3 format."""

    path: str = ""
    """Folder of the dataset."""
    camera: str = "front"
    """Camera of the policy's images; empty = no images."""
    views: list[str] = rare(field(default_factory=list))
    """Additional cameras of the dataset, in the order expected by the policy."""
    cache: str = ""
    """Folder for decoded images. All processes of a machine map them from disk, so each does not need its own copy in
    memory; a 256 x 256 image takes 197 kB. Default: keep images in memory."""
    max_episodes: int = rare(bounded(0, at_least=0))
    """Use only the first N episodes; 0 = all."""
    only_success: bool = rare(True)
    """Skip episodes marked as failures."""
    units: str = choice("", ("", *UNITS))
    """environment: actions are in the environment's own units, within the bounds of its action space, as is usual for
    robot recordings; normalised: in -1..1. Default: as declared by the dataset. A dataset that declares nothing is
    rejected unless the environment's own units are also -1..1."""
    unscaled: list[int] = field(default_factory=list)
    """Action entries that `acting.scale: bounds_q99` does not scale, such as the gripper; -1 is the last one."""

    min_state_std: float = rare(bounded(0.0, at_least=0))
    """Minimum standard deviation by which state entries are divided, in their own units. Without one, a policy is
    thrown off by tiny changes of an entry that hardly moves in the demonstrations. 0.05 suits metres and radians."""

    @property
    def cameras(self) -> list[str]:
        """Cameras that the policy sees, the one of its images first; empty without images."""
        return [self.camera, *self.views] if self.camera else []

    def validate(self) -> None:
        """Reject an empty path, and views that are not additional cameras; raises ValueError."""
        if not self.path:
            raise ValueError("demonstrations.path is empty; set it to the folder of a LeRobotDataset")
        doubled = [name for name in self.views if [self.camera, *self.views].count(name) > 1]
        if doubled or (self.views and not self.camera):
            raise ValueError(
                f"demonstrations.views is [{', '.join(self.views)}] with demonstrations.camera '{self.camera}'; list "
                "each camera once, with the first one in demonstrations.camera"
            )


class Transition(NamedTuple):
    """One control step of a demonstration."""

    episode: int
    """Number of the episode in `Demonstrations`."""
    step: int
    """Number of the control step."""


@dataclass
class Demonstrations:
    """Episodes to imitate; images are uint8."""

    states: list[NDArray[np.float32]]
    """(T, S) of each episode."""
    actions: list[NDArray[np.float32]]
    """(T, A) of each episode, as in the dataset; after `fitted`, in the simulator's -1..1."""
    images: list[NDArray[np.uint8]] | None
    """(T, H, W, 3) of each episode; None without a camera."""
    instructions: list[str]
    """Instruction of each episode at its first step."""
    skipped: int = 0
    """Skipped episodes: failures, or episodes without a required entry."""
    changing_instructions: dict[int, list[str]] = field(default_factory=dict)
    """T texts by number of the episode, for episodes in which the instruction changes."""
    views: list[list[NDArray[np.uint8]]] = field(default_factory=list)
    """(T, H, W, 3) of each additional camera of each episode; empty without any."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Content of the dataset's `meta/info.json`."""

    def fitted(
        self,
        config: DemonstrationConfig,
        sim: RobotSim,
        accept_other: Collection[str] = (),
        option: str = "demonstrations.units",
    ) -> Demonstrations:
        """The demonstrations with actions in a simulator's -1..1.

        Args:
            config: with the declared units.
            sim: the simulator, which says its units, order, cameras and rate.
            accept_other: facts in which both may differ, see `robotics.sim.interface.FACTS`.
            option: the user's option for the units, for messages.

        Raises:
            UserError: both differ in something else, or the units of the actions are unknown or wrong.
        """
        found = self.actions[0].shape[1]
        if found != sim.action_size:
            raise UserError(
                f"the actions of {config.path} have {found} entries, but the simulator's have {sim.action_size}"
            )
        check_dataset(config.path, self.info, config.cameras, sim, accept_other)
        actions = in_simulator_units(config.path, self.info, self.actions, config.units, sim, option)
        return dataclasses.replace(self, actions=actions)

    @property
    def num_transitions(self) -> int:
        """Number of control steps of all episodes."""
        return sum(map(len, self.actions))

    @property
    def transitions(self) -> list[Transition]:
        """Every control step of every episode."""
        return [Transition(number, step) for number, actions in enumerate(self.actions) for step in range(len(actions))]

    def digest(self) -> str:
        """Digest of all states, actions and instructions, and of the first images of some episodes."""
        videos = self.images or []
        # some of the images stand for all: decoding every video would take longer than the run
        step = max(1, len(videos) // IMAGES_READ)
        changing = [sorted(self.changing_instructions.items())] if self.changing_instructions else []
        first = [images[:1] for images in videos[::step]]
        first += [images[:1] for views in self.views[::step] for images in views]
        return content_digest([self.states, self.actions, self.instructions, *changing, first])

    def statistics(self, unscaled: Sequence[int] = ()) -> ActionStatistics:
        """Distribution of the actions."""
        size = self.actions[0].shape[1]
        wrong = [entry for entry in unscaled if not -size <= entry < size]
        if wrong:
            raise UserError(
                f"demonstrations.unscaled has {wrong}; an action has {size} entries, with indices from {-size} to "
                f"{size - 1}"
            )
        kept = np.ones(size, bool)
        kept[list(unscaled)] = False
        # over all frames: quantiles of single episodes cannot be averaged
        found = ActionStatistics.from_arrays(np.concatenate(self.actions), kept.tolist())
        still = np.flatnonzero(found.mask & found.hardly_moves).tolist()
        if still:
            first = still[0]
            LOGGER.warning(
                "entries %s of the actions stay within a fiftieth of their range in 98%% of the frames (entry %d is "
                "in %g to %g, its 1 and 99%% quantiles are %g and %g); scale bounds_q99 clips them in the remaining "
                "frames; list them in demonstrations.unscaled to leave them unchanged",
                still,
                first,
                found.minimum[first],
                found.maximum[first],
                found.q01[first],
                found.q99[first],
            )
        return found

    def state_statistics(self) -> StateStatistics:
        """Distribution of the states."""
        return StateStatistics.from_arrays(np.concatenate(self.states))

    def observations(self, transitions: Sequence[Transition], past: int = 0) -> PolicyInputs:
        """Observations at some transitions."""
        present = self._present(transitions)
        if not past:
            return present
        steps = range(past, 0, -1)
        # the first observation is repeated before the start, as simulators with a past do
        before = self._present(
            [Transition(now.episode, max(0, now.step - back)) for now in transitions for back in steps]
        )
        parts = {f"past_{name}": getattr(before, name) for name in ("images", "state", "views")}
        parts = {name: part.unflatten(0, (-1, past)) for name, part in parts.items() if part is not None}
        return dataclasses.replace(present, **parts)

    def _present(self, transitions: Sequence[Transition]) -> PolicyInputs:
        images = None
        if self.images is not None:
            images = torch.from_numpy(np.stack([self.images[now.episode][now.step] for now in transitions]))
        views = None
        if self.views:
            seen = [[images[now.step] for images in self.views[now.episode]] for now in transitions]
            views = torch.from_numpy(np.stack(seen))
        states = np.stack([self.states[now.episode][now.step] for now in transitions])
        changing = self.changing_instructions
        instructions = tuple(
            changing[now.episode][now.step] if now.episode in changing else self.instructions[now.episode]
            for now in transitions
        )
        return PolicyInputs(images, torch.from_numpy(states), instructions, views)

    def chunks(self, transitions: Sequence[Transition], length: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """The next K actions (B, K, A), the last one repeated past the end, and a mask (B, K), 0 past the end."""
        actions, mask = [], []
        for now in transitions:
            done = self.actions[now.episode][now.step : now.step + length]
            missing = length - len(done)
            # the mask removes these steps from the loss; a repeated action is finite and within bounds
            actions.append(np.concatenate([done, np.repeat(done[-1:], missing, 0)]))
            mask.append(np.concatenate([np.ones(len(done), np.float32), np.zeros(missing, np.float32)]))
        return np.stack(actions), np.stack(mask)


def load_demonstrations(config: DemonstrationConfig) -> Demonstrations:
    """Read demonstrations; a missing folder is built first if there is a builder.

    Args:
        config: folder, cameras and selection of episodes.

    Returns:
        All usable episodes; images in memory, or mapped from the files of `config.cache`.

    Raises:
        UserError: no such dataset, no usable episode in it, or a number that is not finite.
    """
    build_if_missing(config, "demonstrations")
    reader = LeRobotReader(expanded(config.path))
    limit = config.max_episodes or len(reader.episodes)
    found = Demonstrations([], [], [] if config.camera else None, [], info=reader.info)
    for number in range(len(reader.episodes)):
        if len(found.actions) == limit:
            break
        episode = reader.episode(number)
        if config.only_success and episode.success is False:
            found.skipped += 1
            continue
        for name, values in ((STATE, episode.state), (ACTION, episode.action)):
            check_finite(config.path, number, name, values)
        found.states.append(episode.state)
        found.actions.append(episode.action)
        if len(set(episode.frame_tasks)) > 1:
            found.changing_instructions[len(found.instructions)] = list(episode.frame_tasks)
        found.instructions.append(episode.task)
        if found.images is not None:
            videos = {name: _images(episode, reader, config, name) for name in (config.camera, *config.views)}
            if len({images.shape for images in videos.values()}) > 1:
                sizes = ", ".join(f"{name} {images.shape[1]} x {images.shape[2]}" for name, images in videos.items())
                raise UserError(
                    f"demonstrations.views: the cameras of {config.path} have different image sizes: {sizes}"
                )
            found.images.append(videos[config.camera])
            if config.views:
                found.views.append([videos[name] for name in config.views])
    if not found.actions:
        raise UserError(f"{config.path} has no usable episode; {found.skipped} were skipped")
    if found.skipped:
        LOGGER.info("%d demonstrations of %s were skipped because they are failures", found.skipped, config.path)
    return found


def check_finite(path: str, episode: int, name: str, values: NDArray[Any]) -> None:
    """Reject numbers (T, ...) of an episode that are not finite; raises UserError."""
    wrong = np.argwhere(~np.isfinite(values))
    if len(wrong):
        raise UserError(
            f"{path} has {name} that is not finite in frame {wrong[0][0]} of episode {episode}; correct or remove the "
            "episode"
        )


def _images(episode: EpisodeData, reader: LeRobotReader, config: DemonstrationConfig, camera: str) -> NDArray[np.uint8]:
    if camera not in episode.images:
        option = "camera is" if camera == config.camera else "views has"
        known = ", ".join(episode.images) or "none"
        raise UserError(f"demonstrations.{option} '{camera}', but {config.path} has {known}")
    if not config.cache:
        return episode.images[camera]
    # named by a digest of the metadata and of the files' sizes and times: a dataset that was recorded again at the same
    # path may have equal metadata
    stats = [path.stat() for path in reader.image_files(episode.number, camera) if path.is_file()]
    files = [(stat.st_size, stat.st_mtime_ns) for stat in stats]
    about = json.dumps([str(reader.folder.absolute()), camera, reader.info, files], sort_keys=True)
    digest = hashlib.sha256(about.encode()).hexdigest()[:12]
    folder = expanded(config.cache) / f"{shortened_name(reader.folder.name)}-{digest}"
    path = folder / f"episode-{episode.number:06d}.npy"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        # several processes may write at the same time; each renames a complete file into place
        draft = path.with_name(f".{path.stem}.{os.getpid()}.npy")
        try:
            np.save(draft, episode.images[camera])
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    images: NDArray[np.uint8] = np.load(path, mmap_mode="r")
    return images
