"""A simulator, or a robot's environment, whose success is the verdict of a classifier.

The classifier looks when the policy does, after each chunk of actions. An episode ends with success when `looks`
consecutive probabilities exceed the threshold. The environment's own success pays and ends nothing: it is only reported
as `ChunkResult.true_success`. If the environment ends an episode with it, the episode counts as cut off.

A policy that reads states alone does not get the images that the classifier looks at.

Shapes: L live rows, C cameras of the classifier, of H x W pixels.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from accelerate import PartialState

from mmrl.errors import UserError
from mmrl.fields import SET, bounded, only_with, rare
from robotics.rewards.lerobot_classifier import LeRobotClassifier
from robotics.rewards.success_classifier import SuccessClassifier
from robotics.sim.episodes import ChunkResult, EpisodeSpec, RobotSim, begin_episodes
from robotics.sim.interface import interface_of, size_hint
from robotics.sim.opening import SUITES, WITHOUT_CAMERAS, SimConfig, open_sim

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

LOGGER = logging.getLogger("mmrl")
BY_ROW = (
    *("rewards", "steps", "success", "terminated", "truncated", "failed", "object_poses", "full_state"),
    *("executed", "by_person"),
)


class SuccessJudge(Protocol):
    """Sees in images whether tasks are solved; `SuccessClassifier` and `LeRobotClassifier`."""

    @property
    def image_size(self) -> tuple[int, int]:
        """(H, W) pixels."""

    @property
    def cameras(self) -> tuple[str, ...]:
        """Names of its C cameras; empty names fit any."""

    @property
    def threshold(self) -> float:
        """Probability that a look has to exceed."""

    @property
    def looks(self) -> int:
        """Number of consecutive looks that have to exceed it."""

    def look(self, images: NDArray[np.uint8], instructions: Sequence[str]) -> list[float]:
        """Probabilities (L,) of success for images (L, C, H, W, 3)."""
        ...

    def check_instructions(self, instructions: Iterable[str]) -> None:
        """Raise UserError for instructions that it cannot read."""

    def digest(self) -> str:
        """Changes with its weights."""
        ...

    def close(self) -> None:
        """End its process, if it has one."""


@dataclass
class SuccessConfig:
    """Who decides that an episode has succeeded."""

    classifier: str = rare("")
    """Folder of a success classifier, of a run of robot_success, or of a reward classifier of LeRobot: success is what
    it sees in the images. The simulator's own success, if it has one, is only compared with it. Empty = the simulator
    decides."""
    threshold: float | None = only_with(bounded(None, above=0, below=1), classifier=SET)
    """Probability that a look has to exceed; null = that of the classifier, 0.5 for LeRobot's."""
    looks: int | None = only_with(bounded(None, at_least=1), classifier=SET)
    """Number of consecutive looks that have to exceed it; null = that of the classifier, 1 for LeRobot's."""
    cameras: list[str] = rare(only_with(field(default_factory=list), classifier=SET))
    """Cameras of the simulator in the order of the classifier's; empty = those with the same names."""
    python: str | None = rare(only_with(None, classifier=SET))
    """Interpreter of an environment with lerobot; required for a reward classifier of LeRobot."""
    trust_remote_code: bool = rare(only_with(False, python=SET))
    """Whether code that comes with the encoder of LeRobot's classifier may run, such as that of lerobot/resnet10."""


def past_success(config: SimConfig) -> SimConfig:
    """The simulator with episodes that go on after its own success, if it has an option for that."""
    options = dict(config.options)
    if config.kind == "tabletop":
        options["end_at_success"] = False
    elif config.kind in (*SUITES, "gymnasium"):
        options["settings"] = {**options.get("settings", {}), "end_at_success": False}
    return replace(config, options=options)


def open_run_sim(config: SimConfig, success: SuccessConfig) -> RobotSim:
    """Start the simulator of a run, with its classifier if it has one; raises UserError if they do not fit."""
    if not success.classifier:
        return open_sim(config)
    judge = _open_judge(success)
    try:
        return _open_judged(config, judge, success)
    except BaseException:
        judge.close()
        raise


def _open_judge(success: SuccessConfig) -> SuccessJudge:
    device = PartialState().device
    if success.python is None:
        return SuccessClassifier.from_pretrained(success.classifier).to(device)
    code = success.trust_remote_code
    return LeRobotClassifier(success.classifier, success.python, str(device), trust_remote_code=code)


def _open_judged(config: SimConfig, judge: SuccessJudge, success: SuccessConfig) -> RobotSim:
    shown = config
    if not config.image_size:
        shown = replace(config, image_size=judge.image_size[0])
        # others have a camera of their own, which is the first, so that only their user knows the views
        if config.kind not in WITHOUT_CAMERAS:
            first, *others = success.cameras or judge.cameras
            shown = replace(shown, camera=first, views=others)
    # an empty key: the environment does not report success
    silent = config.kind == "gymnasium" and config.options.get("adapter", {}).get("success_key") == ""
    sim = open_sim(past_success(shown))
    try:
        judged: Any = JudgedSim(
            sim,
            judge,
            threshold=success.threshold,
            looks=success.looks,
            cameras=success.cameras,
            hidden=not config.image_size,
            compares=not silent,
        )
    except UserError:
        sim.close()
        raise
    opened: RobotSim = judged
    return opened


class JudgedSim:
    """A `RobotSim` whose successes are those of a classifier; everything else is that of the simulator.

    Args:
        sim: the simulator, with images; its episodes should go on after its own success.
        judge: the classifier.
        threshold: probability that a look has to exceed; None = that of the classifier.
        looks: number of consecutive looks that have to exceed it; None = that of the classifier.
        cameras: of the simulator, in the order of the classifier's; empty = those with the same names.
        hidden: whether to observe without images.
        compares: whether to report the simulator's own success.

    Raises:
        UserError: the simulator lacks the classifier's cameras, image size or instructions.
    """

    def __init__(
        self,
        sim: RobotSim,
        judge: SuccessJudge,
        *,
        threshold: float | None = None,
        looks: int | None = None,
        cameras: Sequence[str] = (),
        hidden: bool = False,
        compares: bool = True,
    ) -> None:
        wanted = judge.image_size
        if sim.image_size is None or tuple(sim.image_size) != tuple(wanted):
            raise UserError(
                f"success.classifier looks at images of {wanted} pixels, but those of the simulator are "
                f"{sim.image_size}; {size_hint(wanted)}"
            )
        self._pictures = _camera_numbers(judge.cameras, cameras, interface_of(sim).cameras or ("",))
        judge.check_instructions(sim.tasks().values())
        self._sim, self._judge, self._hidden, self._compares = sim, judge, hidden, compares
        self._threshold = judge.threshold if threshold is None else threshold
        self._looks = judge.looks if looks is None else looks
        self._weights = judge.digest()[:16]
        self.image_size = None if hidden else sim.image_size
        self.live: NDArray[np.int64] = np.zeros(0, np.int64)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._sim, name)
        if name in ("full_state", "expert_actions"):
            return lambda: found()[np.isin(self._sim.live, self.live)]
        return found

    def describe(self) -> Mapping[str, Any]:
        """The simulator's description, with the classifier that decides about success."""
        judge = {"classifier": self._weights, "threshold": self._threshold, "looks": self._looks}
        return {**self._sim.describe(), "success": judge}

    def reset(self, episodes: Sequence[EpisodeSpec], past: int = 0) -> ChunkResult:
        """Begin episodes, see `RobotSim.reset`."""
        result = begin_episodes(self._sim, episodes, past)
        self._texts, self.live = [episode.instruction for episode in episodes], self._sim.live.copy()
        self._streaks = np.zeros(len(episodes), np.int64)
        true = np.zeros(len(episodes), bool) if self._compares else None
        return self._given(replace(result, true_success=true), result.rows)

    def step_chunk(self, actions: ArrayLike, record: Collection[int] = ()) -> ChunkResult:
        """Step the live rows, and look at their images; see `RobotSim.step_chunk`."""
        moves, live = np.asarray(actions, np.float32), self.live
        # rows that were judged solved rest until all have ended
        given = np.zeros((len(self._sim.live), *moves.shape[1:]), np.float32)
        given[np.isin(self._sim.live, live)] = moves
        result = self._sim.step_chunk(given, record)
        mine, parts = np.isin(result.rows, live), {name: getattr(result, name) for name in BY_ROW}
        kept: dict[str, Any] = {name: part if part is None else part[mine] for name, part in parts.items()}
        result = replace(result, **kept)
        own, solved = result.success, self._look(result, live)
        # an end by its own success would tell what only the classifier may
        terminated = solved | (result.terminated & ~own)
        truncated = ~terminated & (result.truncated | (result.terminated & own))
        self.live = live[~(terminated | truncated | result.failed)]
        found = replace(result, success=solved, terminated=terminated, truncated=truncated)
        return self._given(replace(found, true_success=own if self._compares else None), live)

    def close(self) -> None:
        """End the simulator and the classifier's process."""
        self._sim.close()
        self._judge.close()

    def _look(self, result: ChunkResult, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """(L,) whether the rows are solved, as the classifier sees them."""
        seen = result.observation.of(rows)
        assert seen.images is not None
        images = seen.images[:, None]
        images = images if seen.views is None else np.concatenate([images, seen.views], 1)
        chances = self._judge.look(images[:, self._pictures], [self._texts[row] for row in rows])
        above = (np.array(chances) > self._threshold) & ~result.failed
        self._streaks[rows] = np.where(above, self._streaks[rows] + 1, 0)
        solved: NDArray[np.bool_] = self._streaks[rows] >= self._looks
        return solved

    def _given(self, result: ChunkResult, rows: NDArray[np.int64]) -> ChunkResult:
        """The result with the observation of some rows, without images that the policy does not get."""
        seen = result.observation.of(rows)
        if self._hidden:
            seen = replace(seen, images=None, views=None, past_images=None, past_views=None)
        return replace(result, rows=rows, observation=seen)


def _camera_numbers(judged: Sequence[str], chosen: Sequence[str], known: Sequence[str]) -> list[int]:
    """Positions of the classifier's C cameras among those of the simulator."""
    if chosen and len(chosen) != len(judged):
        raise UserError(
            f"success.cameras is [{', '.join(chosen)}], but the classifier has {len(judged)} cameras: "
            f"{', '.join(judged)}"
        )
    # cameras without a name cannot be compared
    if not chosen and len(judged) == 1 and (not judged[0] or known[0] in ("", judged[0])):
        return [0]
    wanted = [*(chosen or judged)]
    missing = [name for name in wanted if name not in known]
    if missing:
        raise UserError(
            f"success.classifier looks at the camera '{missing[0]}', but the simulator has {', '.join(known)}; set "
            "sim.camera, add it to sim.views, or say in success.cameras which of these it is"
        )
    return [known.index(name) for name in wanted]
