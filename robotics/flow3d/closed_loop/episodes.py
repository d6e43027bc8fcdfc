"""Episodes of the flow scenes: task, arm, what is held out, and the number of the layout."""

from __future__ import annotations

from dataclasses import dataclass, field

from mmrl.errors import UserError
from mmrl.fields import bounded, choice, rare
from robotics.flow3d.scenes.arms import FLOW_ARMS
from robotics.flow3d.scenes.scene import SceneConfig
from robotics.flow3d.scenes.tasks import FLOW_TASKS, find_flow_task
from robotics.sim.tasks import SPLITS


@dataclass(frozen=True)
class FlowEpisode:
    """One episode; the same numbers give the same layout and looks with every arm."""

    scene: SceneConfig
    """Task, arm, shape, and what is held out."""
    number: int
    """Of the layout within its split."""

    @property
    def id(self) -> str:
        """Name of the episode, such as `pour/ur5e/mug/held_out/train/7`."""
        scene = self.scene
        looks = scene.background if scene.background == scene.colours else f"{scene.colours}-{scene.background}"
        return f"{scene.task}/{scene.actor}/{scene.shape}/{scene.layouts}/{looks}/{self.number}"

    @property
    def family(self) -> str:
        """place, pour, insert or drawer."""
        return FLOW_TASKS[self.scene.task].family


@dataclass
class FlowEpisodesConfig:
    """A set of episodes: each task with each arm."""

    tasks: list[str] = field(default_factory=list)
    """Keys of `FLOW_TASKS`; empty = all."""
    arms: list[str] = field(default_factory=lambda: ["panda"])
    """Keys of `FLOW_ARMS`."""
    episodes: int = bounded(10, at_least=1)
    """Layouts of each task, the same for all arms."""
    first: int = rare(bounded(0, at_least=0))
    """Number of the first of them."""
    layouts: str = choice("held_out", SPLITS)
    """Where things lie: on fields of training data, or on those kept out of them."""
    objects: str = choice("train", SPLITS)
    """Shapes and colours of the moved thing: those of training data, or those kept out of them."""
    background: str = choice("train", SPLITS)
    """Table tops and floors."""
    image_size: int = rare(bounded(128, at_least=16))
    """Side of the pictures in pixels."""
    depth: str = rare("clean")
    """See `SceneConfig.depth`."""
    depth_noise: float = rare(bounded(0.0, at_least=0, below=1))
    """See `SceneConfig.depth_noise`."""
    lose_after_m: float = bounded(0.0, at_least=0)
    """See `SceneConfig.lose_after_m`."""

    def validate(self) -> None:
        """Refuse unknown tasks and arms; raises UserError."""
        for task in self.tasks:
            find_flow_task(task)
        if not self.arms or (unknown := [arm for arm in self.arms if arm not in FLOW_ARMS]):
            raise UserError(f"arms are {', '.join(unknown) if self.arms else 'none'}; there are {', '.join(FLOW_ARMS)}")


def list_episodes(config: FlowEpisodesConfig) -> list[FlowEpisode]:
    """Episodes of a set, one of each task and arm in turn, so that the first ones cover all of them.

    Args:
        config: the set; shapes take turns with the numbers.

    Returns:
        episodes x arms x tasks of them.

    Raises:
        UserError: a task or an arm does not exist.
    """
    config.validate()
    found = []
    for number in range(config.first, config.first + config.episodes):
        for arm in config.arms:
            for task in config.tasks or FLOW_TASKS:
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
