"""Transitions of data that a run did not collect itself: demonstrations, or the replay of an earlier run."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mmrl.errors import UserError
from mmrl.fields import SET, bounded, choice, only_with
from mmrl.files import expanded
from mmrl.hub.building import BuiltPath, build_if_missing
from robotics.data import LeRobotReader
from robotics.data.features import ACTION, EXECUTED, FULL_STATE, REWARD, STATE
from robotics.episodes.dataset_fit import UNITS, check_replay, in_simulator_units
from robotics.episodes.demonstrations import DemonstrationConfig, Demonstrations, check_finite, load_demonstrations
from robotics.offpolicy.replay import DATASET, INTERVENTION, NEXT, read_records
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
    units: str = only_with(choice("", ("", *UNITS)), path=SET)
    """Units of the actions of demonstrations, as `demonstrations.units` of robot_clone."""
    all_successful: bool = only_with(False, path=SET)
    """Whether every episode succeeded, for demonstrations that do not store it."""


def prior_records(
    config: PriorConfig,
    form: TransitionForm,
    sim: RobotSim,
    *,
    rewarded: bool = False,
    accept_other: Collection[str] = (),
) -> NDArray[np.void]:
    """Transitions of prior data for a run in a simulator.

    A window of K actions starts at every control step of a demonstration. One that the end cuts short repeats the last
    action. The end of a success ends the episode; failures are left out, because the observation after their last
    action is not stored.

    Args:
        config: the dataset.
        form: sizes of a transition.
        sim: the simulator.
        rewarded: whether the run learns from the environment's rewards, which the data then has to have.
        accept_other: facts in which dataset and simulator may differ, see `robotics.sim.interface.FACTS`.

    Raises:
        UserError: the dataset is missing or damaged, does not fit the simulator, or lacks what the run needs.
    """
    build_if_missing(config, "prior")
    folder = expanded(config.path)
    # of a run or checkpoint, or of the dataset itself
    folder = folder / DATASET if (folder / DATASET).is_dir() else folder
    reader = LeRobotReader(folder)
    features = reader.info["features"]
    if NEXT + STATE in features:
        if form.demonstrated:
            raise UserError(
                f"sac.demo_bc imitates demonstrations, but {folder} is a replay, with the actions of a policy; set "
                "sac.demo_bc=0, or prior.path to demonstrations"
            )
        if form.watched != (INTERVENTION in features) and (form.watched or rewarded):
            raise UserError(
                f"prior.path: the replay {folder} {'lacks' if form.watched else 'has'} the rewards of an overseer's "
                "interventions, unlike this run; set prior.path to demonstrations"
            )
        check_replay(str(folder), reader.info, form.chunk, sim, accept_other)
        records = read_records(folder, form)
        # the run that recorded it may have had other tasks, or the same ones in another order
        texts = [episode["tasks"][0] for episode in reader.episodes]
        records["task"] = np.repeat(_numbers(folder, texts, sim), [episode["length"] for episode in reader.episodes])
    else:
        records = _demonstrated(config, reader, form, sim, rewarded, accept_other)
    if not len(records):
        raise UserError(f"prior.path: {folder} has no transition")
    return records


def _numbers(folder: Path, texts: Sequence[str], sim: RobotSim) -> list[int]:
    """Numbers of the tasks with these instructions."""
    known = list(sim.tasks().values())
    unknown = sorted(set(texts) - set(known))
    if unknown:
        raise UserError(f"prior.path: {folder} has the instruction {unknown[0]!r}; the tasks have {known}")
    return [known.index(text) for text in texts]


def _demonstrated(
    config: PriorConfig,
    reader: LeRobotReader,
    form: TransitionForm,
    sim: RobotSim,
    rewarded: bool,
    accept_other: Collection[str],
) -> NDArray[np.void]:
    folder, features = reader.folder, reader.info["features"]
    if rewarded and REWARD not in features:
        raise UserError(
            f"prior.path: the run learns from the environment's rewards, which {folder} does not store: it has no "
            f"{REWARD}. Add them, or set reward={{success: 1}} to reward success alone"
        )
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
    settings = DemonstrationConfig(path=str(folder), camera="", units=config.units)
    found = load_demonstrations(settings).fitted(settings, sim, accept_other, "prior.units")
    if not config.all_successful and any(episode.success is None for episode in reader):
        raise UserError(
            f"prior.path: {folder} does not say which succeeded; set prior.all_successful=true if they all did"
        )
    numbers = _numbers(folder, found.instructions, sim)
    if found.states[0].shape[1] != form.state:
        raise UserError(f"prior.path: the states of {folder} have {found.states[0].shape[1]} entries, not {form.state}")
    executed, full = found.actions, _column(reader, FULL_STATE) if form.full else found.states
    if EXECUTED in features:
        stored = _column(reader, EXECUTED)
        executed = in_simulator_units(str(folder), reader.info, stored, settings.units, sim, "prior.units")
    rewards = _column(reader, REWARD) if rewarded else [np.zeros((len(part), 1), np.float32) for part in executed]
    parts = [
        _windows(found, number, executed[number], full[number][:, : form.full], rewards[number].ravel(), task, form)
        for number, task in enumerate(numbers)
    ]
    return np.concatenate(parts)


def _column(reader: LeRobotReader, name: str) -> list[NDArray[np.float32]]:
    """(T, n) of each episode that `load_demonstrations` takes, in its order."""
    found = []
    for episode in reader:
        if episode.success is not False:
            check_finite(str(reader.folder), episode.number, name, episode.extra[name])
            found.append(episode.extra[name].astype(np.float32).reshape(len(episode), -1))
    return found


def _windows(
    found: Demonstrations,
    number: int,
    executed: NDArray[np.float32],
    full: NDArray[np.float32],
    rewards: NDArray[np.float32],
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
    # as in `Experience.records`: 0 where not executed, and the first step earns no difference of a potential
    records["rewards"] = rewards[places] * (np.arange(form.chunk) < records["steps"][:, None])
    records["before"] = rewards[np.maximum(start - 1, 0)]
    records["task"] = task
    records["terminated"] = records["success"] = ends == length
    return records
