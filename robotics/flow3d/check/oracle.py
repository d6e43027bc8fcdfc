"""The simulator's own criteria on a predicted final pose, for clips of the suite's flow scenes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from mmrl.errors import UserError
from robotics.flow3d.check.verdict import PlanFacts, Verdict, closeness
from robotics.flow3d.scenes.criteria import Outcome
from robotics.flow3d.scenes.scene import NOBODY, FlowScene
from robotics.flow3d.scenes.tasks import FLOW_TASKS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from robotics.flow3d.clip import FlowClip

NEEDED = ("task", "shape", "layouts", "seed")
"""Entries of `FlowClip.meta` from which an episode is set up again."""


class CriteriaVerifier:
    """Accepts where all criteria of a task are met; the score is the product of their closeness, see `closeness`.

    So it is 1 where all are met, and progress with one criterion raises it by the same share whatever the others say.

    Args:
        outcome: of the (4, 4) motion of the object from now to the end of the plan, in the world frame.
    """

    def __init__(self, outcome: Callable[[NDArray[np.float64]], Outcome]) -> None:
        self.outcome = outcome

    def verify(self, before: NDArray[np.uint8], after: NDArray[np.uint8], instruction: str, meta: PlanFacts) -> Verdict:
        """Judge the final pose; see `Verifier`."""
        found = self.outcome(meta.motion.T_t_0_world[-1])
        missed = [f"{name}: {found.errors[name]:.1f} tolerances" for name in found.failed]
        score = math.prod(closeness(error) for error in found.errors.values())
        return Verdict(found.success, score, "; ".join(missed) or "all criteria are met")


class SceneOracle:
    """Sets up the episode that a clip is of, and asks how far its task is done once the object is at a pose."""

    def __init__(self) -> None:
        self._scenes: dict[tuple[str, str, str], FlowScene] = {}

    def of(self, clip: FlowClip) -> CriteriaVerifier:
        """The verifier of a clip; it serves until that of the next clip is asked for."""
        missing = [name for name in NEEDED if name not in clip.meta]
        if missing or clip.meta["task"] not in FLOW_TASKS:
            raise UserError(
                f"the verifier oracle needs clips of the suite's flow scenes; this one, of {clip.source or 'no source'}"
                f", lacks {', '.join(missing) or 'a known task'} in its meta data; take geometric, vlm or endpoint"
            )
        scene = self._scene(clip)
        start = scene.start.copy()

        return CriteriaVerifier(lambda T_end_world: scene.success(T_end_world @ start))

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
