"""Build function for configurations: demonstrations of the tabletop tasks by their scripted experts."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.errors import UserError
from mmrl.files import replaced
from robotics.episodes.recording import (
    BATCH,
    FPS,
    ActionNoise,
    Demonstration,
    check_missing,
    demonstration_features,
    record_episodes,
)
from robotics.sim.episodes import EpisodeSpec, RobotObservation
from robotics.sim.randomization import read_randomization

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from robotics.scenes.batch import TabletopBatch

LOGGER = logging.getLogger("mmrl")
DRAWS_PATH = "meta/randomization.jsonl"


def build_demonstrations(
    path: str,
    *,
    tasks: Sequence[str] = ("reach",),
    episodes: int = 50,
    noise: float = 0.0,
    noise_share: float = 1.0,
    arm: str = "panda",
    image_size: int = 64,
    camera: str = "front",
    state: str = "proprio",
    first_layout: int = 0,
    keep_failures: bool = False,
    seed: int = 0,
    randomization: Mapping[str, Any] | None = None,
    views: Sequence[str] = (),
    full: bool = False,
) -> Path:
    """Run the experts on the tasks and write their observations and actions as a LeRobotDataset.

    Args:
        path: folder to write.
        tasks: keys of `robotics.sim.TASKS`.
        episodes: number of demonstrations per task, from the layouts of the train split.
        noise: standard deviation of noise on the executed actions, so that the data shows how to recover. `action`
            stays the expert's; `complementary_info.executed_action` is what was executed.
        noise_share: fraction of the control steps with noise, drawn at random. With noise in every step, the actions of
            a chunk after the first are unpredictable, because they respond to noise that the policy cannot have seen;
            rare and large noise leaves most chunks as the expert intended.
        arm: panda or ur5e.
        image_size: width and height of the images in pixels; 0 = none.
        camera: camera of the images.
        state: proprio, the robot's own state, or full, with the poses of all pieces.
        first_layout: number of the first layout.
        keep_failures: also write episodes without success, marked as such; not those whose simulation failed.
        seed: seed of the noise.
        randomization: fields of `RandomizationConfig`; each layout has its own draw. The experts see the exact
            state, the demonstrations hold a policy's observations. The draw of each episode is a line of
            `meta/randomization.jsonl`.
        views: additional cameras of the dataset.
        full: whether to store the simulator's full state, as `observation.environment_state`, for a critic that reads
            it.
    """
    from robotics.data import EpisodeWriter
    from robotics.scenes.batch import BatchSettings, TabletopBatch

    ActionNoise(noise, noise_share)  # raises
    size = (image_size, image_size) if image_size else None
    drawn = read_randomization(randomization)
    settings = BatchSettings(image_size=size, camera=camera, state=state, randomization=drawn, views=tuple(views))
    cameras = {name: size for name in (camera, *views) if size}
    ends: Counter[str] = Counter()
    check_missing(Path(path))
    with replaced(Path(path)) as partial, TabletopBatch(list(tasks), arm, settings) as sim:
        features = demonstration_features(sim, cameras, noise, full)
        with EpisodeWriter(partial, FPS, features, arm) as writer:
            for start in range(0, episodes, BATCH):
                layouts = range(first_layout + start, first_layout + min(start + BATCH, episodes))
                specs = [EpisodeSpec(task, sim.tasks()[task], layout) for layout in layouts for task in tasks]
                for spec, seen in zip(specs, run_experts(sim, specs, noise, seed + start, noise_share), strict=True):
                    ends[seen.ending] += 1
                    if seen.success or (keep_failures and not seen.failed):
                        states, actions = np.stack(seen.states), np.stack(seen.actions)
                        images = seen.images_of(list(cameras))
                        extra = seen.columns_of(features)
                        number = writer.add_episode(states, actions, images, spec.instruction, seen.success, extra)
                        if seen.drawn:
                            _note_draws(partial, {"episode_index": number, "layout": spec.layout, "drawn": seen.drawn})
        failures = ", ".join(f"{count} {ending}" for ending, count in ends.items() if ending != "success")
        LOGGER.info("%d of %d demonstrations succeeded%s", ends["success"], ends.total(), failures and f"; {failures}")
        if not ends["success"]:
            raise UserError(f"no demonstration of {', '.join(tasks)} succeeded; try noise below {noise}")
    return Path(path)


def _note_draws(folder: Path, line: Mapping[str, Any]) -> None:
    with (folder / DRAWS_PATH).open("a") as file:
        file.write(json.dumps(line) + "\n")


def run_experts(
    sim: TabletopBatch,
    episodes: Sequence[EpisodeSpec],
    noise: float = 0.0,
    seed: int = 0,
    noise_share: float = 1.0,
) -> list[Demonstration]:
    """Run episodes with the experts of their tasks, one control step at a time."""
    from robotics.scenes.experts import Expert

    experts = {task: Expert(task) for task in {episode.task for episode in episodes}}
    rng = np.random.default_rng(seed)

    def act(seen: RobotObservation) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        rows = seen.rows
        actions = np.stack(
            [experts[episodes[row].task].act(state) for row, state in zip(rows.tolist(), sim.full_state(), strict=True)]
        )
        moved = actions.copy()
        shift = noise * rng.standard_normal((len(rows), actions.shape[1] - 1)).astype(np.float32)
        moved[:, :-1] += shift if noise_share == 1 else shift * (rng.random((len(rows), 1)) < noise_share)
        # the noisy action is executed, the expert's own is recorded
        return actions, moved

    return record_episodes(sim, episodes, act)
