"""Expert demonstrations as a LeRobotDataset, from your own Gymnasium environment or any other simulator.

Shapes: L rows still running, A entries of an action, S entries of the state.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.config import from_values
from mmrl.errors import UserError
from mmrl.fields import check_config
from mmrl.files import replaced
from mmrl.recipes import world_table
from robotics.data.features import ACTION, EXECUTED, FULL_STATE, REWARD
from robotics.sim.episodes import EpisodeSpec, RobotObservation, RobotSim
from robotics.sim.interface import interface_of
from robotics.sim.opening import SimConfig, open_sim

if TYPE_CHECKING:
    from numpy.typing import NDArray

LOGGER = logging.getLogger("mmrl")
CAMERA = "front"
"""Camera name for simulators without a choice of cameras; the default of `demonstrations.camera`."""
FPS = 10
"""Frames per second of a dataset from a simulator that does not report its control rate."""
BATCH = 32
"""Number of episodes to run at once if the simulator has no limit."""
TRIES = 10
"""Maximum number of episodes to run per requested one."""
BROKEN = 3
"""Stop if the simulation failed in all episodes so far and there were at least this many."""


@dataclass
class Demonstration:
    """Observations and actions of one episode."""

    states: list[NDArray[np.float32]] = field(default_factory=list)
    """(S,) before each action."""
    images: list[NDArray[np.uint8]] = field(default_factory=list)
    """(H, W, 3) before each action; none without a camera."""
    views: list[NDArray[np.uint8]] = field(default_factory=list)
    """(V, H, W, 3) of the additional cameras."""
    actions: list[NDArray[np.float32]] = field(default_factory=list)
    """(A,) in -1..1, those of the expert."""
    executed: list[NDArray[np.float32]] = field(default_factory=list)
    """(A,) in -1..1 as executed, with noise."""
    full: list[NDArray[np.float32]] = field(default_factory=list)
    """(F,) full state before each action; none if the simulator does not report it."""
    rewards: list[float] = field(default_factory=list)
    """The environment's own reward of each control step."""
    solved: list[bool] = field(default_factory=list)
    """Whether the task is solved after each action."""
    success: bool = False
    failed: bool = False
    """Whether the simulation failed."""
    reason: str = ""
    """Why it failed."""
    drawn: Mapping[str, Any] = field(default_factory=dict)
    """Its domain randomisation."""

    @property
    def ending(self) -> str:
        """success, horizon, or failed if the simulation failed."""
        return "failed" if self.failed else "success" if self.success else "horizon"

    def images_of(self, cameras: Sequence[str]) -> dict[str, NDArray[np.uint8]]:
        """(T, H, W, 3) of the camera and of each additional one, by these names; none without images."""
        if not self.images:
            return {}
        further = (np.stack(images) for images in zip(*self.views, strict=True))
        return dict(zip(cameras, [np.stack(self.images), *further], strict=True))

    def columns_of(self, features: Mapping[str, Any]) -> dict[str, NDArray[np.float32]]:
        """(T, ...) of those of its parts that `demonstration_features` adds to a dataset."""
        parts: dict[str, Sequence[Any]] = {EXECUTED: self.executed, FULL_STATE: self.full, REWARD: self.rewards}
        return {
            name: np.array(values, np.float32).reshape(len(values), -1)
            for name, values in parts.items()
            if name in features
        }


Act = Callable[["RobotObservation"], "tuple[NDArray[np.float32], NDArray[np.float32]]"]
"""Observation of live rows (L,) to the actions (L, A) that are recorded and those that are executed."""


def record_episodes(sim: RobotSim, episodes: Sequence[EpisodeSpec], act: Act) -> list[Demonstration]:
    """Run episodes to their ends, an action at a time."""
    found = [Demonstration() for _ in episodes]
    result = sim.reset(episodes)
    observation = result.observation
    for row, drawn in result.drawn.items():
        found[row].drawn = drawn
    for row in np.flatnonzero(result.failed).tolist():
        found[row].failed = True
        found[row].reason = result.reasons.get(row, "")
    while len(sim.live):
        # the simulator changes `live` in place while it steps
        rows = sim.live.copy()
        seen = observation.of(rows)
        actions, executed = act(seen)
        executed = np.clip(executed, -1, 1)
        full = sim.full_state() if hasattr(sim, "full_state") else None
        for place, row in enumerate(rows.tolist()):
            found[row].states.append(seen.state[place])
            # the recorded action may be the expert's, the executed one with noise
            found[row].actions.append(actions[place])
            found[row].executed.append(executed[place])
            found[row].full += [] if full is None else [full[place]]
            found[row].images += [] if seen.images is None else [seen.images[place]]
            found[row].views += [] if seen.views is None else [seen.views[place]]
        # chunks of one action
        result = sim.step_chunk(executed[:, None])
        observation = result.observation
        for place, row in enumerate(result.rows.tolist()):
            found[row].rewards.append(float(result.rewards[place, 0]))
            found[row].solved.append(bool(result.success[place]))
            found[row].success |= found[row].solved[-1]
            found[row].failed |= bool(result.failed[place])
            found[row].reason = result.reasons.get(row, found[row].reason)
    return found


@dataclass(frozen=True)
class ActionNoise:
    """Gaussian noise on the executed actions of an expert, so that its data shows how to recover."""

    std: float = 0.0
    """Standard deviation, on the scale -1..1."""
    share: float = 1.0
    """Fraction of the control steps with noise, drawn at random."""
    seed: int = 0

    def __post_init__(self) -> None:
        """Reject numbers out of range; raises UserError."""
        if self.std < 0:
            raise UserError(f"noise is {self.std}; must be at least 0")
        if not 0 <= self.share <= 1:
            raise UserError(f"noise_share is {self.share}; must be 0 to 1")

    def draw(self, rng: np.random.Generator, moves: NDArray[np.bool_]) -> NDArray[np.float32]:
        """(A,) noise of a control step; none on the entries that `moves` (A,) leaves out."""
        drawn = self.std * rng.standard_normal(len(moves)) * (rng.random() < self.share) * moves
        return drawn.astype(np.float32)


def demonstration_features(
    sim: RobotSim, cameras: Mapping[str, tuple[int, int]], noise: float = 0.0, full: bool = False
) -> dict[str, Any]:
    """Features of a dataset of an expert's episodes.

    Args:
        sim: the simulator.
        cameras: (H, W) of each camera.
        noise: standard deviation of the noise on executed actions. The dataset then has a column of these, and the
            `info` of its feature `action` says so.
        full: whether it has a column of the simulator's full state.

    Raises:
        UserError: the simulator does not report a full state.
    """
    from robotics.episodes.dataset_fit import recorded_features

    features = recorded_features(sim, cameras) | {REWARD: {"dtype": "float32", "shape": [1], "names": None}}
    if noise:
        features[EXECUTED] = dict(features[ACTION])
        # told apart: actions to imitate, and actions that led to the next state
        features[ACTION] = features[ACTION] | {"info": features[ACTION]["info"] | {"noise": noise}}
    if full:
        size = getattr(sim, "full_state_size", 0)
        if not size:
            raise UserError("full is true, but this simulator does not report its full state; leave it out")
        features[FULL_STATE] = {"dtype": "float32", "shape": [size], "names": None}
    return features


def build_demonstrations(
    path: str,
    *,
    sim: Mapping[str, Any],
    expert: str = "",
    episodes: int = 50,
    first_layout: int = 0,
    noise: float = 0.0,
    noise_share: float = 1.0,
    seed: int = 0,
    full: bool = False,
) -> Path:
    """Run an expert until enough of its episodes succeed, and write these as a LeRobotDataset.

    States, images and actions are those that a policy has in the same simulator, so it can be cloned from them.

    Args:
        path: folder to write.
        sim: options of the simulator, those of the run.
        expert: module:function or file.py:function, called as function(observation) with what your Gymnasium
            environment observes, for an action in its units, which is clipped to its bounds; for sim.kind gymnasium.
            Default: the simulator's own expert, such as Meta-World's.
        episodes: number of successful episodes per task; failed ones are discarded.
        first_layout: number of the first layout, in the split train.
        noise: standard deviation of noise on the executed actions, on the scale -1..1, so that the data shows how to
            recover. `action` stays the expert's; `complementary_info.executed_action` is what was executed. Entries
            whose name contains "gripper" get none, so the simulator must name its action entries.
        noise_share: fraction of the control steps with noise, drawn at random.
        seed: seed of the noise.
        full: whether to store the simulator's full state, as `observation.environment_state`, for a critic that reads
            it.

    Returns:
        The folder.

    Raises:
        UserError: an option is wrong, there is no expert, or too few of its episodes succeed.
    """
    from robotics.data import EpisodeWriter

    shaken = ActionNoise(noise, noise_share, seed)
    if episodes < 1:
        raise UserError(f"episodes is {episodes}; must be at least 1")
    check_missing(Path(path))
    config = _with_expert(from_values(SimConfig, sim, "sim"), expert)
    cameras = [config.camera or CAMERA, *config.views]
    # a failure midway leaves no half-written dataset
    with replaced(Path(path)) as draft, contextlib.closing(open_sim(config)) as opened:
        size, about = opened.image_size if config.image_size else None, opened.describe()
        features = demonstration_features(opened, {} if size is None else dict.fromkeys(cameras, size), noise, full)
        rate = interface_of(opened).control_hz
        if rate is None:
            LOGGER.warning(
                "the simulator does not report its control rate, so the dataset is written with %d frames per "
                "second. Set render_fps in the environment's metadata, or sim.options.adapter.control_hz",
                FPS,
            )
        robot = str(about.get("environment", config.kind))
        with EpisodeWriter(draft, rate or FPS, features, robot) as writer:
            for task, instruction in opened.tasks().items():
                for seen in _successes(opened, task, instruction, episodes, first_layout, shaken):
                    states, images = np.stack(seen.states) if opened.state_size else None, seen.images_of(cameras)
                    extra = seen.columns_of(features)
                    writer.add_episode(states, np.stack(seen.actions), images, instruction, True, extra)
    return Path(path)


def check_missing(path: Path) -> None:
    """Check that a folder does not exist yet; raises UserError."""
    if path.exists():
        raise UserError(f"{path} already exists; choose another folder or remove it")


def _with_expert(config: SimConfig, expert: str) -> SimConfig:
    check_config(config, "sim")
    if not expert:
        return config
    if config.kind != "gymnasium":
        raise UserError(
            f"expert is {expert!r} with sim.kind {config.kind}, but only gymnasium takes an expert; leave it out"
        )
    adapter = {**config.options.get("adapter", {}), "expert": expert}
    return replace(config, options={**config.options, "adapter": adapter})


def _acting(sim: RobotSim, episodes: Sequence[EpisodeSpec], noise: ActionNoise) -> Act:
    """The simulator's expert, with noise that depends on seed, task and layout alone."""
    known: Any = sim
    ask: Callable[[], NDArray[np.float64]] = known.expert_actions
    numbers = list(sim.tasks())
    rngs = [np.random.default_rng([noise.seed, numbers.index(spec.task), spec.layout]) for spec in episodes]
    names = interface_of(sim).actions
    if noise.std and names is None:
        raise UserError(
            f"noise is {noise.std}, but the simulator does not name its action entries, so a gripper would get noise "
            "too; set action_names in the environment's metadata, or leave noise out"
        )
    moves = np.array(["gripper" not in name for name in names or ()])

    def act(seen: RobotObservation) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        actions = ask().astype(np.float32)
        if not noise.std:
            return actions, actions
        return actions, actions + np.stack([noise.draw(rngs[row], moves) for row in seen.rows.tolist()])

    return act


def _successes(
    sim: RobotSim, task: str, instruction: str, wanted: int, first_layout: int, noise: ActionNoise
) -> Iterator[Demonstration]:
    """Yield `wanted` successful episodes of the expert in a task, in the order of their layouts."""
    if not hasattr(sim, "expert_actions"):
        builder = world_table("DEMONSTRATIONS")["tabletop"]
        raise UserError(
            "this simulator has no built-in expert; pass one with sim.kind gymnasium, or build demonstrations of "
            f"the tabletop tasks with {builder}"
        )
    # an expert that rarely succeeds ends with an error instead of running forever
    limit, last = sim.layouts()["train"], first_layout + TRIES * wanted
    last = last if limit is None else min(last, limit)
    ends = Counter[str]()
    reason = ""
    layout = first_layout
    while ends["success"] < wanted and layout < last:
        # never more than are still missing: which layouts end up in the dataset must not depend on the capacity
        count = min(sim.capacity or BATCH, wanted - ends["success"], last - layout)
        specs = [EpisodeSpec(task, instruction, number) for number in range(layout, layout + count)]
        layout += count
        for seen in record_episodes(sim, specs, _acting(sim, specs, noise)):
            ends[seen.ending] += 1
            reason = reason or seen.reason
            if seen.success and not seen.failed:
                yield seen
        if ends["failed"] == ends.total() >= BROKEN:
            break
    others = ", ".join(f"{count} ended by {ending}" for ending, count in ends.items() if ending != "success")
    LOGGER.info("%s: %d of %d episodes of the expert succeeded", task, ends["success"], ends.total())
    if ends["success"] < wanted:
        raise UserError(
            f"the expert succeeded in {ends['success']} of {ends.total()} episodes of {task!r}, {wanted} are "
            f"required; {others}{reason and f', the first one because {reason}'}"
        )
