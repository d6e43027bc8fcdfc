"""Episodes in the scenes, the options of a closed loop, and sources of flow."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from mmrl.fields import bounded, check_config, choice, rare
from robotics.flow3d.clip import VISIBLE, Observation
from robotics.flow3d.flow_model import FlowModel
from robotics.flow3d.geometry import FloatArray
from robotics.flow3d.objects.demonstrator import Demonstrator
from robotics.flow3d.objects.flow_tasks import FLOW_TASKS
from robotics.flow3d.objects.scene import FLOW_ARMS, FlowScene, SceneConfig
from robotics.flow3d.objects.tabletop import FlowTabletop
from robotics.flow3d.plan.grasps import PROPOSERS
from robotics.flow3d.plan.judge import VerifierConfig
from robotics.flow3d.plan.planner_config import PlannerConfig
from robotics.flow3d.plan.result import PredicateVerifier, Verifier
from robotics.scenes.tabletop_tasks import SPLITS


@dataclass(frozen=True)
class FlowEpisode:
    """One episode; the same number gives the same layout and appearance with every arm."""

    scene: SceneConfig
    """Task, arm, shape, and what is held out."""
    number: int
    """Number of the layout within its split."""

    @property
    def id(self) -> str:
        """Name of the episode, such as `pour/ur5e/mug/held_out/train/7`."""
        scene = self.scene
        looks = scene.background if scene.background == scene.colours else f"{scene.colours}-{scene.background}"
        return f"{scene.task}/{scene.actor_name}/{scene.shape}/{scene.layouts}/{looks}/{self.number}"

    @property
    def family(self) -> str:
        """place, pour, insert or drawer."""
        return FLOW_TASKS[self.scene.task].family


@dataclass
class FlowEpisodesConfig:
    """A set of episodes: each task with each arm."""

    tasks: list[str] = choice([], lambda: FLOW_TASKS)
    """Tasks; empty = all."""
    arms: list[str] = choice(["panda"], lambda: FLOW_ARMS, or_function=True)
    """Arms to evaluate on every task: names, or your own `ArmModel` as module:Class or module:function."""
    episodes: int = bounded(10, at_least=1)
    """Number of layouts per task, the same for all arms."""
    first: int = rare(bounded(0, at_least=0))
    """Number of the first layout."""
    layouts: str = choice("held_out", SPLITS)
    """Positions of objects: as in the training data, or held-out ones."""
    objects: str = choice("train", SPLITS)
    """Shapes and colours of the moved object: as in the training data, or held-out ones."""
    background: str = choice("train", SPLITS)
    """Table tops and floors."""
    image_size: int = rare(bounded(128, at_least=16))
    """Image width and height in pixels."""
    depth: str = rare("clean")
    """See `SceneConfig.depth`."""
    depth_noise: float = rare(bounded(0.0, at_least=0, below=1))
    """See `SceneConfig.depth_noise`."""
    lose_after_m: float = bounded(0.0, at_least=0)
    """See `SceneConfig.lose_after_m`."""

    def validate(self) -> None:
        """Raise ValueError if there is no arm or two have the same name."""
        if not self.arms:
            raise ValueError(f"arms is empty; available: {', '.join(FLOW_ARMS)}")
        names = [SceneConfig(actor=arm).actor_name for arm in self.arms]
        if len(set(names)) < len(names):
            raise ValueError(f"arms is [{', '.join(self.arms)}], with the names {', '.join(names)}; list each arm once")


def list_episodes(config: FlowEpisodesConfig) -> list[FlowEpisode]:
    """Episodes x arms x tasks of a set, interleaved so that the first ones cover all tasks and arms."""
    check_config(config, "episodes")
    found = []
    for number in range(config.first, config.first + config.episodes):
        for arm in config.arms:
            for task in config.tasks or FLOW_TASKS:
                # the shape follows from the number, so that all arms get the same object
                shapes = FLOW_TASKS[task].shape_names(config.objects == "held_out")
                scene = SceneConfig(
                    task=task,
                    actor=arm,
                    shape=shapes[number % len(shapes)],
                    layouts=config.layouts,
                    colours=config.objects,
                    background=config.background,
                    width=config.image_size,
                    height=config.image_size,
                    depth=config.depth,
                    depth_noise=config.depth_noise,
                    lose_after_m=config.lose_after_m,
                )
                found.append(FlowEpisode(scene, number))
    return found


@dataclass
class LoopConfig:
    """Settings from a flow to an episode."""

    verifier: VerifierConfig = field(default_factory=VerifierConfig)
    """Verifier of predicted outcomes."""
    grasps: list[str] = rare(choice(["primitive", "antipodal"], lambda: PROPOSERS))
    """Proposers of grasps, tried together."""
    planner: PlannerConfig = field(default_factory=PlannerConfig)
    """Planning and execution."""
    language_swap: bool = True
    """Also predict for the other instructions of a scene, without executing them."""
    seed: int = 0
    """Seed of the predictions, together with the episode's number."""

    def validate(self) -> None:
        """Raise ValueError if there is no proposer."""
        if not self.grasps:
            raise ValueError(f"grasps is empty; available: {', '.join(PROPOSERS)}")


def verifier_in(config: VerifierConfig, opened: Verifier | None, robot: FlowTabletop) -> Verifier | None:
    """The verifier for a scene: `opened`, or the scene's own criteria for oracle."""
    if config.kind != "oracle":
        return opened
    # the pose is read at the time of the verdict: a replan starts from where the object is then
    return PredicateVerifier(lambda T_t_0: robot.success(T_t_0 @ robot.object_pose()).success)


class TrueFlow:
    """Flow of the scripted motion that does a scene's task: an upper bound for every model.

    Args:
        scene: the scene of the episode.
        num_frames: T.
    """

    def __init__(self, scene: FlowScene, num_frames: int = 8) -> None:
        self._demonstrator = Demonstrator(scene)
        self._frames = num_frames

    def predict(self, observation: Observation, points: FloatArray, samples: int = 1, seed: int = 0) -> FloatArray:
        """The true flow, repeated; see `FlowModel`."""
        # from the object's current pose, so that it also serves a replan
        flow = self._demonstrator.flow_of(points, self._frames)
        return np.repeat(flow[None], samples, axis=0)


class StillPoints:
    """A model whose flow keeps a fraction of its points still, like points on the background."""

    def __init__(self, model: FlowModel, share: float) -> None:
        self._model = model
        self._share = share
        self.encoding = getattr(model, "encoding", None)

    def predict(self, observation: Observation, points: FloatArray, samples: int = 1, seed: int = 0) -> FloatArray:
        """The model's flow with still points, which count as visible; see `FlowModel`."""
        flow = np.array(self._model.predict(observation, points, samples, seed), dtype=np.float64)
        count = points.shape[0] * points.shape[1]
        # a stream apart from the model's own, which starts from `seed`
        chosen = np.random.default_rng([seed, 5]).choice(count, round(self._share * count), replace=False)
        rows, columns = np.unravel_index(chosen, points.shape[:2])
        flow[:, :, rows, columns, :VISIBLE] = points[rows, columns]
        flow[:, :, rows, columns, VISIBLE] = 1.0
        return flow
