"""Episodes in the scenes, the options of a closed loop, and sources of flow."""

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
    """Number of the first layout."""
    layouts: str = choice("held_out", SPLITS)
    """Positions of objects: those of training data, or those held out."""
    objects: str = choice("train", SPLITS)
    """Shapes and colours of the moved object: those of training data, or those held out."""
    background: str = choice("train", SPLITS)
    """Table tops and floors."""
    image_size: int = rare(bounded(128, at_least=16))
    """Side of the images in pixels."""
    depth: str = rare("clean")
    """See `SceneConfig.depth`."""
    depth_noise: float = rare(bounded(0.0, at_least=0, below=1))
    """See `SceneConfig.depth_noise`."""
    lose_after_m: float = bounded(0.0, at_least=0)
    """See `SceneConfig.lose_after_m`."""

    def validate(self) -> None:
        """Raise UserError for unknown tasks and arms."""
        for task in self.tasks:
            find_flow_task(task)
        if not self.arms or (unknown := [arm for arm in self.arms if arm not in FLOW_ARMS]):
            raise UserError(f"arms are {', '.join(unknown) if self.arms else 'none'}; there are {', '.join(FLOW_ARMS)}")


def list_episodes(config: FlowEpisodesConfig) -> list[FlowEpisode]:
    """Episodes x arms x tasks of a set, interleaved so that the first ones cover all tasks and arms."""
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
