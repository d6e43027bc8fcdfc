"""Build function for configurations: the actions of the demonstrations in a folder of clips.

The clips of a world model have no actions. Their demonstrations are repeated here from the numbers in their `meta`, and
the gripper's trajectory is written with the same first image, points and instruction, so that behaviour cloning sees
the same demonstrations, except those with nobody in view.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mmrl.errors import RunError, UserError
from mmrl.files import expanded, replaced
from robotics.flow3d.clip import frame_indices
from robotics.flow3d.data import FlowReader
from robotics.flow3d.objects.demonstrator import Demonstrator, FlowDemonstration, Stage, arm_ik
from robotics.flow3d.objects.path_sim import (
    ACTIONS,
    APPROACH_POSES,
    action_of_angles,
    action_of_poses,
    canonical_grip,
    path_state,
)
from robotics.flow3d.objects.scene import FLOW_ARMS, FlowScene, SceneConfig
from robotics.sim.gym_adapter import resize

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from robotics.flow3d.clip import FlowClip

LOGGER = logging.getLogger("mmrl")
BEHIND_FRAMES = 3
"""Distance in frames of the first approach pose from the grip."""
FILE_MB = 1.0
"""Size of a data file; small, because finding an episode of one row scans all rows of its file."""
NEEDED = ("task", "shape", "actor", "layouts", "colours", "background", "seed")


def build_path_demonstrations(
    path: str,
    *,
    clips: str,
    split: str = "train",
    actors: Sequence[str] = (),
    actions: str = "grips",
    image_size: int = 64,
    limit: int = 0,
) -> Path:
    """Write the gripper's trajectories of a folder of clips as a LeRobotDataset, one control step per episode.

    Args:
        path: folder to write.
        clips: folder of `robotics.flow3d.data` with demonstrations of this simulator.
        split: split of the clips.
        actors: actors to include; empty = all with a gripper.
        actions: grips: poses of the gripper; joints: angles of the one arm in `actors`.
        image_size: width and height of the images in pixels.
        limit: maximum number of clips, starting with the first; 0 = all.
    """
    from robotics.data import EpisodeWriter, StorageSettings, robot_features

    _check_actions(actions, actors)

    reader = FlowReader(expanded(clips), split=split)
    numbers = range(min(limit, len(reader)) if limit else len(reader))
    ends: Counter[str] = Counter()
    writer: EpisodeWriter | None = None
    with replaced(Path(path)) as draft:
        for clip, action, state in _rows((reader[number] for number in numbers), actors, actions, ends):
            if writer is None:
                features = robot_features(len(state), len(action), {"front": (image_size, image_size)}, video=False)
                writer = EpisodeWriter(draft, 1, features, "two-finger gripper", StorageSettings(data_mb=FILE_MB))
            image = resize(clip.observation.rgb, image_size)
            writer.add_episode(
                state[None], action[None], {"front": image[None]}, clip.observation.instruction, success=True
            )
        if writer is None:
            raise UserError(f"{clips} has no demonstration with a gripper: {_listed(ends)}")
        writer.finish()
    LOGGER.info("%s: %s", path, _listed(ends))
    return Path(path)


def path_frames(length: int, approach: int, num_frames: int, released: bool) -> tuple[list[int], NDArray[np.bool_]]:
    """T + 4 of the L frames of a demonstration that make a path, and (T + 4,) whether the fingers are closed there.

    They are two of the approach, the grip again with closed fingers, T of the motion after the approach, and the last
    again, with open fingers if the object is released.
    """
    motion = approach + frame_indices(length - approach, num_frames)[1:]
    frames = [max(0, approach - BEHIND_FRAMES), approach, approach, *motion.tolist(), int(motion[-1])]
    closed = np.arange(len(frames)) >= APPROACH_POSES
    closed[-1] = not released
    return frames, closed


def canonical_along(T_world_grip: NDArray[np.float64]) -> NDArray[np.float64]:
    """A path, turned as a whole by half a turn if its grip is not canonical, so that it stays continuous."""
    grip = T_world_grip[APPROACH_POSES]
    turned: NDArray[np.float64] = T_world_grip @ (np.linalg.inv(grip) @ canonical_grip(grip))
    return turned


def _rows(
    clips: Iterator[FlowClip], actors: Sequence[str], actions: str, ends: Counter[str]
) -> Iterator[tuple[FlowClip, NDArray[np.float32], NDArray[np.float32]]]:
    """Clip, action and state of each demonstration with a gripper; the others are counted."""
    with Stage() as stage:
        for clip in clips:
            meta = clip.meta
            if missing := [name for name in NEEDED if name not in meta]:
                raise UserError(f"a clip of {clip.source or 'unknown source'} lacks {', '.join(missing)} in its meta")
            if meta["actor"] == "nobody" or (actors and meta["actor"] not in actors):
                ends[f"of {meta['actor']}, skipped"] += 1
                continue
            demonstrator = _play(stage, clip)
            try:
                planned = demonstrator.plan()
            except RunError:
                ends[f"out of reach of {meta['actor']}"] += 1
                continue
            ends[f"of {meta['actor']}"] += 1
            poses = _grips(demonstrator.scene, planned)
            # after pouring the vessel stays in the hand
            released = demonstrator.scene.task.family != "pour"
            frames, closed = path_frames(len(poses), planned.approach, len(clip.flow), released)
            if actions == "joints" and planned.joint_rad is not None:
                action = action_of_angles(planned.joint_rad[frames], closed)
            else:
                action = action_of_poses(canonical_along(poses[frames]), closed)
            yield clip, action, path_state(poses[0], clip.points_world_m)


def _check_actions(actions: str, actors: Sequence[str]) -> None:
    if actions not in ACTIONS:
        raise UserError(f"actions is {actions!r}; expected {' or '.join(ACTIONS)}")
    if actions == "joints" and (len(actors) != 1 or actors[0] not in FLOW_ARMS):
        raise UserError(
            f"actions is joints and actors is {list(actors)}; actions=joints needs exactly one arm, one of "
            f"{', '.join(FLOW_ARMS)}"
        )


def _play(stage: Stage, clip: FlowClip) -> Demonstrator:
    """A demonstrator in the episode of a clip."""
    task, shape, actor, layouts, colours, background, seed = (clip.meta[name] for name in NEEDED)
    width, height = clip.observation.size_px
    return stage.begin(SceneConfig(task, actor, shape, layouts, colours, background, width, height), int(seed))


def _grips(scene: FlowScene, planned: FlowDemonstration) -> NDArray[np.float64]:
    """(L, 4, 4) poses of the grip in each frame."""
    if planned.T_world_hand is not None:
        return planned.T_world_hand
    if scene.arm is None or planned.joint_rad is None:
        raise UserError(f"demonstrations by {scene.config.actor} have no actions")
    return np.stack([arm_ik(scene.arm).pose(row) for row in planned.joint_rad])


def _listed(ends: Counter[str]) -> str:
    return ", ".join(f"{count} {what}" for what, count in sorted(ends.items())) or "no clips"
