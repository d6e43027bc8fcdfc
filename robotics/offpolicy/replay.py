"""A replay of robot episodes on disk: a LeRobotDataset that any tool can read, with an index to draw batches from.

    replay = Replay(Path("runs/first/replay"), TransitionForm(state=3, full=0, chunk=1, action=1), fps=20)
    replay.append([experience])
    records = replay.index.draw(256, torch.Generator())

Each episode is in the dataset when `append` returns. A frame of the dataset is one decision of the policy; with chunks
of one control step that is an ordinary dataset. Beyond the usual columns it has

    action.steps                  control steps of the chunk that were executed
    next.reward                   the environment's reward of each control step
    next.observation.state        the observation after the chunk, also that after the last one of the episode
    next.terminated               True in the last frame if the task ended the episode, and not a time limit
    task.number                   number of the task
    action.noise                  what the policy chose, if it chooses the noise of a frozen one
    intervention                  whether an overseer chose the action, if one watches

and, for a critic that reads more than the policy, `observation.environment_state` and the one after the chunk. All of
it is float32 as the simulator gave it, so that statistics, discount and reward may change without collecting again.

Episodes are never changed, and batches come from the index, a file of fixed-size records mapped into memory. The index
is made from the dataset whenever a replay is opened; nothing is in the index alone.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmrl.errors import UserError
from mmrl.runs.checkpoint import link_or_copy
from robotics.data.features import ACTION, FULL_STATE, REWARD, STATE, SUCCESS
from robotics.data.layout import DATA_PATH, INFO_PATH, dataset_file, named_errors
from robotics.data.reader import LeRobotReader
from robotics.data.tables import column_array, read_table
from robotics.data.writer import EpisodeWriter
from robotics.offpolicy.transitions import Experience, TransitionFile, TransitionForm

NEXT = "next."
STEPS, TERMINATED, TASK = "action.steps", "next.terminated", "task.number"
NOISE, INTERVENTION = "action.noise", "intervention"
INDEX_FILE = "index.bin"
DATASET = "dataset"


def replay_features(form: TransitionForm, state_names: Sequence[str] | None = None) -> dict[str, Any]:
    """Features of a replay's dataset."""

    def part(*shape: int, dtype: str = "float32", names: Sequence[str] | None = None) -> dict[str, Any]:
        return {"dtype": dtype, "shape": list(shape), "names": None if names is None else list(names)}

    action = part(form.action) if form.chunk == 1 else part(form.chunk, form.action)
    features = {STATE: part(form.state, names=state_names), ACTION: action}
    features |= {NEXT + STATE: part(form.state), REWARD: part(form.chunk), STEPS: part(1, dtype="int32")}
    features |= {TERMINATED: part(1, dtype="bool"), TASK: part(1, dtype="int32")}
    features |= {NOISE: part(*form.noise)} if form.noise else {}
    features |= {INTERVENTION: part(1, dtype="bool")} if form.watched else {}
    # a simulator without a full state has no such columns
    return features | ({FULL_STATE: part(form.full), NEXT + FULL_STATE: part(form.full)} if form.full else {})


class Replay:
    """Episodes of a run, stored as they end; see the module.

    Args:
        folder: of the replay, which must not hold another one; `restore` reads one from a checkpoint.
        form: sizes of a transition.
        fps: decisions per second.
        state_names: names of the entries of the state; None if unknown.
    """

    def __init__(
        self, folder: Path, form: TransitionForm, fps: float, state_names: Sequence[str] | None = None
    ) -> None:
        self.folder = folder
        self.form = form
        self.fps = fps
        self.features = replay_features(form, state_names)
        self.control_steps = 0
        """Executed control steps of all episodes."""
        self.episodes = 0
        """Number of episodes."""
        self._index: TransitionFile | None = None
        self._writer: EpisodeWriter | None = None

    @property
    def dataset(self) -> Path:
        """Folder of the LeRobotDataset."""
        return self.folder / DATASET

    @property
    def index(self) -> TransitionFile:
        """The index; raises UserError if the folder holds the replay of another run."""
        if self._index is None:
            if (self.dataset / INFO_PATH).exists():
                raise UserError(
                    f"{self.folder} has the replay of an earlier run that was not resumed; use --resume, move it away, "
                    "or choose another output_dir"
                )
            self._index = TransitionFile(self.folder / INDEX_FILE, self.form)
        return self._index

    def __len__(self) -> int:
        """Number of transitions."""
        return 0 if self._index is None else len(self._index)

    def append(self, episodes: Sequence[Experience]) -> None:
        """Store episodes; raises ValueError for parts of another size, or numbers that are not finite."""
        index = self.index
        for episode in episodes:
            records = episode.records(self.form)
            # dataset first: the index may always be made again
            self._write(episode, records)
            index.append(records)
            self.control_steps += int(records["steps"].sum())

    def save(self, folder: Path) -> None:
        """Write a copy into a new folder; files that never change are linked if the file system has links."""
        self._finish()
        if len(self):
            link_or_copy(self.dataset, folder / DATASET)

    def restore(self, folder: Path) -> None:
        """Continue with the episodes of a copy made by `save`; those collected after it are forgotten.

        Raises:
            UserError: it is damaged, or has transitions of other sizes.
        """
        self._finish()
        shutil.rmtree(self.dataset, ignore_errors=True)
        self._index = TransitionFile(self.folder / INDEX_FILE, self.form)
        self.control_steps = self.episodes = 0
        if not (folder / DATASET).exists():  # no episode had ended yet
            return
        link_or_copy(folder / DATASET, self.dataset)
        records = read_records(self.dataset, self.form)
        self._index.append(records)
        self.control_steps += int(records["steps"].sum())
        self.episodes = len(LeRobotReader(self.dataset))

    def close(self) -> None:
        """Finish the dataset and delete the index, which can be made again."""
        self._finish()
        if self._index is not None:
            self._index.close()

    def _write(self, episode: Experience, records: NDArray[np.void]) -> None:
        if self._writer is None:
            self._writer = EpisodeWriter(self.dataset, self.fps, self.features)
        columns = {
            NEXT + STATE: records["next_state"],
            REWARD: records["rewards"],
            STEPS: records["steps"],
            TERMINATED: records["terminated"],
            TASK: records["task"],
        }
        columns |= {FULL_STATE: records["full"], NEXT + FULL_STATE: records["next_full"]} if self.form.full else {}
        columns |= {} if episode.noise is None else {NOISE: episode.noise}
        columns |= {} if episode.by_overseer is None else {INTERVENTION: episode.by_overseer}
        actions = episode.actions[:, 0] if self.form.chunk == 1 else episode.actions
        self._writer.add_episode(records["state"], actions, None, episode.instruction, episode.success, extra=columns)
        self.episodes += 1

    def _finish(self) -> None:
        """Join the dataset's small files; the next episode opens it again."""
        if self._writer is not None:
            self._writer.finish()
            self._writer = None


def read_records(dataset: Path, form: TransitionForm) -> NDArray[np.void]:
    """All transitions of a replay's dataset, in their order.

    Raises:
        UserError: it is damaged, or has transitions of other sizes.
    """
    reader = LeRobotReader(dataset)
    wanted, found = replay_features(form), reader.info["features"]
    for key, feature in wanted.items():
        shape = found.get(key, {}).get("shape")
        if shape != feature["shape"]:
            raise UserError(
                f"{dataset} has {key} of shape {shape}; this run needs {feature['shape']}"
                if shape
                else f"{dataset} is no replay of transitions: it has no {key}"
            )
    names = [*wanted, SUCCESS, "index", "episode_index", "frame_index"]
    columns = _columns(reader, names)
    records = np.zeros(len(columns["index"]), form.dtype)
    with named_errors(f"the replay in {dataset}"):
        _check_order(reader, columns)
        for name, key in (("state", STATE), ("full", FULL_STATE)):
            if key in wanted:
                # vectors of a single entry are stored as numbers
                for to, column in ((name, columns[key]), (f"next_{name}", columns[NEXT + key])):
                    records[to] = column.reshape(records[to].shape)
        judged = columns[NOISE] if form.noise else columns[ACTION]
        records["actions"] = judged.reshape(records["actions"].shape)
        records["rewards"] = columns[REWARD].reshape(records["rewards"].shape)
        records["steps"] = columns[STEPS].ravel()
        records["task"], records["terminated"] = columns[TASK].ravel(), columns[TERMINATED].ravel()
        records["success"] = columns[SUCCESS].ravel()
        if form.watched:
            # as in `Experience.records`
            records["by_overseer"] = columns[INTERVENTION].ravel()
            if form.demonstrated:
                records["demonstrated"] = records["actions"]
        if len(records) and not ((records["steps"] >= 1) & (records["steps"] <= form.chunk)).all():
            raise UserError(f"{dataset} has chunks with {STEPS} outside of 1 to {form.chunk}")
        last = records["rewards"][np.arange(len(records)), records["steps"] - 1]
        first = columns["frame_index"].ravel() == 0
        # as in `Experience.records`
        records["before"] = np.where(first, records["rewards"][:, 0], np.roll(last, 1))
    return records


def _columns(reader: LeRobotReader, names: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Columns (N, ...) of the dataset, file by file."""
    pattern = reader.info.get("data_path") or DATA_PATH
    pointers = dict.fromkeys((row["data/chunk_index"], row["data/file_index"]) for row in reader.episodes)
    paths = [dataset_file(reader.folder, pattern, chunk_index=one, file_index=two) for one, two in pointers]
    parts: dict[str, list[NDArray[Any]]] = {name: [] for name in names}
    for path in paths:
        with named_errors(str(path)):
            table = read_table(path, columns=list(names))
            for name in names:
                parts[name].append(column_array(table[name]))
    return {name: np.concatenate(part) if part else np.zeros(0) for name, part in parts.items()}


def _check_order(reader: LeRobotReader, columns: dict[str, NDArray[Any]]) -> None:
    lengths = [row["length"] for row in reader.episodes]
    expected = np.repeat(np.arange(len(lengths)), lengths)
    frames = np.concatenate([np.arange(length) for length in lengths]) if lengths else np.zeros(0, np.int64)
    same = np.array_equal(columns["episode_index"].ravel(), expected)
    if not same or not np.array_equal(columns["frame_index"].ravel(), frames):
        raise UserError(
            f"{reader.folder} is damaged: its data files do not have the {int(sum(lengths))} transitions of "
            f"{len(lengths)} episodes that its metadata counts, each once and in order"
        )
