"""The simulator's own criterion on a predicted final pose, for clips of the suite's flow scenes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mmrl.errors import UserError
from robotics.flow3d.check.verdict import PredicateVerifier
from robotics.flow3d.scenes.scene import NOBODY, FlowScene
from robotics.flow3d.scenes.tasks import FLOW_TASKS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from robotics.flow3d.clip import FlowClip

__all__ = ["SceneOracle"]

NEEDED = ("task", "shape", "layouts", "seed")
"""Entries of `FlowClip.meta` from which an episode is set up again."""


class SceneOracle:
    """Sets up the episode that a clip is of, and asks whether its task is done once the object is at a pose."""

    def __init__(self) -> None:
        self._scenes: dict[tuple[str, str, str], FlowScene] = {}

    def of(self, clip: FlowClip) -> PredicateVerifier:
        """The verifier of a clip; it serves until that of the next clip is asked for.

        Args:
            clip: with the meta data of `Demonstrator.clip`.

        Raises:
            UserError: the clip does not say which episode it is of.
        """
        missing = [name for name in NEEDED if name not in clip.meta]
        if missing or clip.meta["task"] not in FLOW_TASKS:
            raise UserError(
                f"the verifier oracle needs clips of the suite's flow scenes; this one, of {clip.source or 'no source'}"
                f", lacks {', '.join(missing) or 'a known task'} in its meta data; take geometric, vlm or endpoint"
            )
        scene = self._scene(clip)
        start = scene.start.copy()

        def done(T_end_world: NDArray[np.float64]) -> bool:
            return scene.success(T_end_world @ start).success

        return PredicateVerifier(done)

    def close(self) -> None:
        """Free the scenes."""
        while self._scenes:
            self._scenes.popitem()[1].close()

    def _scene(self, clip: FlowClip) -> FlowScene:
        """The scene in the clip's episode; scenes with the same furniture and shape are built once."""
        meta = clip.meta
        key = FLOW_TASKS[meta["task"]].furniture.name, str(meta["shape"]), str(meta["layouts"])
        if key not in self._scenes:
            self._scenes[key] = FlowScene(task=meta["task"], actor=NOBODY, shape=key[1], layouts=key[2])
        scene = self._scenes[key]
        scene.give(meta["task"])
        scene.reset(int(meta["seed"]))
        return scene
