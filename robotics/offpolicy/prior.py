"""Transitions of data that a run did not collect itself: demonstrations, or the replay of an earlier run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mmrl.errors import UserError
from mmrl.fields import SET, bounded, only_with
from mmrl.files import expanded
from robotics.data import LeRobotReader
from robotics.data.features import STATE
from robotics.episodes.demonstrations import DemonstrationConfig, load_demonstrations
from robotics.offpolicy.replay import DATASET, NEXT, read_records
from robotics.offpolicy.transitions import TransitionForm
from robotics.sim.episodes import RobotSim


@dataclass
class PriorConfig:
    """Data that a run learns from in addition to its own."""

    path: str = ""
    """Folder of a LeRobotDataset of successful demonstrations, or `replay` of a run or of a checkpoint; empty = none.
    Its actions have to be those that were executed, and its state that of `sim`."""
    ratio: float = only_with(bounded(0.5, at_least=0, at_most=1), path=SET)
    """Fraction of each batch that comes from this data."""


def prior_records(config: PriorConfig, form: TransitionForm, sim: RobotSim) -> NDArray[np.void]:
    """Transitions of prior data for a run in a simulator.

    A window of K actions starts at every control step of a demonstration. One that the end cuts short repeats the last
    action. The end of a success ends the episode; a demonstration that does not say how it ended, or that failed, is
    left out, because the observation after its last action is not stored.

    Raises:
        UserError: the dataset is missing or damaged, does not fit the simulator, or lacks what the run needs.
    """
    folder = expanded(config.path)
    # of a run or checkpoint, or of the dataset itself
    folder = folder / DATASET if (folder / DATASET).is_dir() else folder
    if NEXT + STATE in LeRobotReader(folder).info["features"]:
        records = read_records(folder, form)
    else:
        records = _demonstrated(folder, form, sim)
    known = len(sim.tasks())
    if not len(records) or not records["task"].max(initial=0) < known:
        raise UserError(f"prior.path: {folder} has no transition of the {known} tasks of the simulator")
    return records


def _demonstrated(folder: Path, form: TransitionForm, sim: RobotSim) -> NDArray[np.void]:
    if form.full:
        raise UserError(
            f"prior.path: the critic reads the full state of the simulator, which {folder} does not store; set "
            "critic_state: policy, or use the replay of a run"
        )
    settings = DemonstrationConfig(path=str(folder), camera="")
    found = load_demonstrations(settings).fitted(settings, sim)
    reader = LeRobotReader(folder)
    if any(episode.get("success") is None for episode in reader.episodes):
        raise UserError(f"prior.path: {folder} does not store whether its episodes succeeded")
    numbers = {text: number for number, text in enumerate(sim.tasks().values())}
    unknown = sorted(set(found.instructions) - set(numbers))
    if unknown:
        raise UserError(f"prior.path: {folder} has the instruction {unknown[0]!r}; the tasks have {list(numbers)}")
    if found.states[0].shape[1] != form.state:
        raise UserError(
            f"prior.path: the states of {folder} have {found.states[0].shape[1]} entries, those of the simulator "
            f"{form.state}"
        )
    parts = [
        _windows(states, actions, numbers[text], form)
        for states, actions, text in zip(found.states, found.actions, found.instructions, strict=True)
    ]
    return np.concatenate(parts)


def _windows(
    states: NDArray[np.float32], actions: NDArray[np.float32], task: int, form: TransitionForm
) -> NDArray[np.void]:
    """Windows of K actions at every control step of a success."""
    length = len(actions)
    records = np.zeros(length, form.dtype)
    start = np.arange(length)
    ends = np.minimum(start + form.chunk, length)
    records["state"] = states
    # after the end there is no next state; nothing reads it, because the episode ended there
    records["next_state"] = states[np.minimum(ends, length - 1)]
    records["actions"] = actions[np.minimum(start[:, None] + np.arange(form.chunk), length - 1)].clip(-1, 1)
    records["steps"] = ends - start
    records["task"] = task
    records["terminated"] = records["success"] = ends == length
    return records
