"""Transitions of data that a run did not collect itself: demonstrations, or the replay of an earlier run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mmrl.errors import UserError
from mmrl.fields import SET, bounded, only_with
from mmrl.files import expanded
from mmrl.hub.building import BuiltPath, build_if_missing
from robotics.data import LeRobotReader
from robotics.data.features import ACTION, EXECUTED, FULL_STATE, STATE
from robotics.episodes.dataset_fit import in_simulator_units
from robotics.episodes.demonstrations import DemonstrationConfig, Demonstrations, load_demonstrations
from robotics.offpolicy.replay import DATASET, NEXT, read_records
from robotics.offpolicy.transitions import TransitionForm
from robotics.sim.episodes import RobotSim


@dataclass
class PriorConfig(BuiltPath):
    """Data that a run learns from in addition to its own."""

    path: str = ""
    """Folder of a LeRobotDataset of successful demonstrations, or `replay` of a run or of a checkpoint; empty = none.
    Its state has to be that of `sim`. Its actions count as executed unless a column has the executed ones, as in
    demonstrations that were built with noise."""
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
    build_if_missing(config, "prior")
    folder = expanded(config.path)
    # of a run or checkpoint, or of the dataset itself
    folder = folder / DATASET if (folder / DATASET).is_dir() else folder
    if NEXT + STATE in LeRobotReader(folder).info["features"]:
        if form.demonstrated:
            raise UserError(
                f"sac.demo_bc imitates demonstrations, but {folder} is a replay, with the actions of a policy; set "
                "sac.demo_bc=0, or prior.path to demonstrations"
            )
        records = read_records(folder, form)
    else:
        records = _demonstrated(folder, form, sim)
    known = len(sim.tasks())
    if not len(records) or not records["task"].max(initial=0) < known:
        raise UserError(f"prior.path: {folder} has no transition of the {known} tasks of the simulator")
    return records


def _demonstrated(folder: Path, form: TransitionForm, sim: RobotSim) -> NDArray[np.void]:
    reader = LeRobotReader(folder)
    features = reader.info["features"]
    if form.full and features.get(FULL_STATE, {}).get("shape") != [form.full]:
        raise UserError(
            f"prior.path: the critic reads the {form.full} entries of the simulator's full state, which {folder} does "
            "not store; build it with full: true, set critic_state: policy, or use the replay of a run"
        )
    noise = (features.get(ACTION, {}).get("info") or {}).get("noise")
    if noise and EXECUTED not in features:
        raise UserError(
            f"prior.path: {folder} was recorded with noise of {noise:g} on the executed actions, but has only those "
            f"without noise, which did not lead to its next states; it lacks {EXECUTED}. Build it again"
        )
    settings = DemonstrationConfig(path=str(folder), camera="")
    found = load_demonstrations(settings).fitted(settings, sim)
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
    executed, full = found.actions, found.states
    if EXECUTED in features:
        stored = _column(reader, EXECUTED)
        executed = in_simulator_units(str(folder), reader.info, stored, settings.units, sim)
    if form.full:
        full = _column(reader, FULL_STATE)
    parts = [
        _windows(found, number, executed[number], full[number][:, : form.full], numbers[text], form)
        for number, text in enumerate(found.instructions)
    ]
    return np.concatenate(parts)


def _column(reader: LeRobotReader, name: str) -> list[NDArray[np.float32]]:
    """(T, n) of each success, in the order of `load_demonstrations`."""
    return [episode.extra[name].reshape(len(episode), -1) for episode in reader if episode.success]


def _windows(
    found: Demonstrations,
    number: int,
    executed: NDArray[np.float32],
    full: NDArray[np.float32],
    task: int,
    form: TransitionForm,
) -> NDArray[np.void]:
    """Windows of K actions at every control step of success `number`."""
    states, length = found.states[number], len(executed)
    records = np.zeros(length, form.dtype)
    start = np.arange(length)
    ends = np.minimum(start + form.chunk, length)
    places = np.minimum(start[:, None] + np.arange(form.chunk), length - 1)
    # after the end there is no next state; nothing reads it, because the episode ended there
    following = np.minimum(ends, length - 1)
    records["state"], records["next_state"] = states, states[following]
    records["full"], records["next_full"] = full, full[following]
    records["actions"] = executed[places].clip(-1, 1)
    if form.demonstrated:
        records["demonstrated"] = found.actions[number][places].clip(-1, 1)
    records["steps"] = ends - start
    records["task"] = task
    records["terminated"] = records["success"] = ends == length
    return records
