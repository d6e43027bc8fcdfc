"""The simulator's own criteria on a predicted final pose, for clips of the suite's flow scenes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from mmrl.errors import UserError
from robotics.flow3d.check.verdict import PlanFacts, Verdict, closeness
from robotics.flow3d.geometry import FloatArray, ImageArray
from robotics.flow3d.scenes.criteria import Outcome
from robotics.flow3d.scenes.scene import NOBODY, FlowScene
from robotics.flow3d.scenes.tasks import FLOW_TASKS

if TYPE_CHECKING:
    from robotics.flow3d.clip import FlowClip

NEEDED = ("task", "shape", "layouts", "seed")
"""Entries of `FlowClip.meta` that identify its episode."""


class CriteriaVerifier:
    """Accepts where all criteria of a task hold; the score is the product of their `closeness`.

    Progress with one criterion raises the score by the same factor, whatever the others are. `outcome` takes the
    object's motion (4, 4) to the end of the plan, in the world frame.
    """

    def __init__(self, outcome: Callable[[FloatArray], Outcome]) -> None:
        self.outcome = outcome

    def verify(self, before: ImageArray, after: ImageArray, instruction: str, meta: PlanFacts) -> Verdict:
        """Judge the final pose; see `Verifier`."""
        found = self.outcome(meta.motion.T_t_0_world[-1])
        missed = [f"{name}: {found.errors[name]:.1f} tolerances" for name in found.failed]
        score = math.prod(closeness(error) for error in found.errors.values())
        return Verdict(found.success, score, "; ".join(missed) or "all criteria are met")


class SceneOracle:
    """Restores the episode of a clip and checks its task's criteria at a predicted pose of the object."""

    def __init__(self) -> None:
        self._scenes: dict[tuple[str, str, str], FlowScene] = {}

    def of(self, clip: FlowClip) -> CriteriaVerifier:
        """The verifier of a clip, valid until the next call."""
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
        """The scene in the clip's episode; scenes with the same furniture and shape are shared."""
        meta = clip.meta
        key = FLOW_TASKS[meta["task"]].furniture.name, str(meta["shape"]), str(meta["layouts"])
        if key not in self._scenes:
            self._scenes[key] = FlowScene(task=meta["task"], actor=NOBODY, shape=key[1], layouts=key[2])
        scene = self._scenes[key]
        scene.give(meta["task"])
        scene.reset(int(meta["seed"]))
        return scene
