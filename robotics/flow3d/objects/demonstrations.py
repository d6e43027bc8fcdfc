"""Demonstrations by a hand, an arm, or nobody in view, and their true flow.

The flow is exact and the same for every actor, so that only what is seen differs.

    for clip in demonstrations(range(2400), encoding=FlowEncoding()):
        writer.add(clip)
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from mmrl.errors import RunError, UserError
from mmrl.fields import bounded, check_config
from robotics.flow3d.objects.demonstrator import Demonstrator, Stage
from robotics.flow3d.objects.flow_tasks import FLOW_TASKS, find_flow_task
from robotics.flow3d.objects.scene import HAND, NOBODY, SceneConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from robotics.flow3d.clip import FlowClip, FlowEncoding
    from robotics.flow3d.video import RgbdVideo

Made = TypeVar("Made")

TRAINING_ACTORS = (HAND, NOBODY)
"""Default actors in the training data: no robot at all, as in the paper's fine-tuning on human hands."""


@dataclass(frozen=True)
class FlowDemonstrationConfig:
    """Distribution of demonstrations."""

    tasks: tuple[str, ...] = tuple(FLOW_TASKS)
    """Tasks, taken in turn."""
    actors: tuple[str, ...] = TRAINING_ACTORS
    """Actors to draw from: arms, hand or nobody."""
    shapes: tuple[str, ...] = ()
    """Shapes of the objects, drawn from those of a task; empty = those of the training data."""
    approach_frames: int = bounded(10, at_least=1)
    """Frames before the object moves."""
    motion_frames: int = bounded(31, at_least=2)
    """Frames in which it moves."""
    scene: SceneConfig = dataclasses.field(default_factory=SceneConfig)
    """All other settings of a scene; its task, actor and shape are not used."""

    def validate(self) -> None:
        """Reject unknown tasks, shapes and actors; raises UserError."""
        known = {shape for name in self.tasks for shape in find_flow_task(name).shapes}
        if unknown := set(self.shapes) - known:
            raise UserError(f"unknown shapes {', '.join(sorted(unknown))}; the tasks have {', '.join(sorted(known))}")
        if not self.tasks or not self.actors:
            raise UserError("there must be at least one task and one actor")
        for name in self.tasks:
            if not self.shapes_of(name):
                raise UserError(f"{name} has none of the shapes {', '.join(self.shapes)}")
        for actor in self.actors:
            check_config(dataclasses.replace(self.scene, actor=actor, shape=""), "scene")

    def shapes_of(self, task: str) -> tuple[str, ...]:
        """Shapes that a task is demonstrated with."""
        own = FLOW_TASKS[task]
        return tuple(name for name in own.shapes if name in self.shapes) if self.shapes else own.shape_names(False)


def demonstrations(
    seeds: Iterable[int],
    config: FlowDemonstrationConfig | None = None,
    encoding: FlowEncoding | None = None,
    *,
    on_skip: Callable[[int, str], None] | None = None,
) -> Iterator[FlowClip]:
    """True flow of many demonstrations; a clip only depends on its seed and the configuration.

    Args:
        seeds: seeds of the episodes; the tasks take turns.
        config: distribution; None for the defaults, which show no robot.
        encoding: frames and points of a clip.
        on_skip: called with seed and reason if the arm reaches nothing or the object is hidden; None raises instead.

    Raises:
        RunError: an episode gives no clip, without `on_skip`.
    """
    yield from _each(seeds, config, lambda one: one.clip(encoding), on_skip)


def videos(
    seeds: Iterable[int],
    config: FlowDemonstrationConfig | None = None,
    *,
    on_skip: Callable[[int, str], None] | None = None,
) -> Iterator[RgbdVideo]:
    """Demonstrations as a camera sees them, with the truth; arguments as in `demonstrations`."""
    yield from _each(seeds, config, Demonstrator.video, on_skip)


def instructed_clips(
    seeds: Iterable[int], config: FlowDemonstrationConfig | None = None, encoding: FlowEncoding | None = None
) -> Iterator[FlowClip]:
    """First images, each with all instructions that fit it; see `Demonstrator.clips_of_first_image`.

    A model that sees the same image with several instructions has to use them. Arguments as in `demonstrations`; the
    furniture takes turns with the seeds, and the tasks are the instructions.
    """
    chosen = config or FlowDemonstrationConfig()
    check_config(chosen, "demonstrations")
    groups: dict[str, list[str]] = {}
    for task in chosen.tasks:
        groups.setdefault(FLOW_TASKS[task].furniture.name, []).append(task)
    with Stage(chosen.approach_frames, chosen.motion_frames) as stage:
        for seed in seeds:
            tasks = list(groups.values())[seed % len(groups)]
            yield from stage.begin(_scene_of(chosen, seed, tasks[0]), seed).clips_of_first_image(tasks, encoding)


def _each(
    seeds: Iterable[int],
    config: FlowDemonstrationConfig | None,
    make: Callable[[Demonstrator], Made],
    on_skip: Callable[[int, str], None] | None,
) -> Iterator[Made]:
    chosen = config or FlowDemonstrationConfig()
    check_config(chosen, "demonstrations")
    with Stage(chosen.approach_frames, chosen.motion_frames) as stage:
        for seed in seeds:
            scene = _scene_of(chosen, seed, chosen.tasks[seed % len(chosen.tasks)])
            try:
                made = make(stage.begin(scene, seed))
            except RunError as error:
                if on_skip is None:
                    raise
                on_skip(seed, str(error))
                continue
            yield made


def _scene_of(config: FlowDemonstrationConfig, seed: int, task: str) -> SceneConfig:
    """The scene of a seed: draws the object's shape and the actor."""
    # a stream apart from those of layout and looks, which are then the same for every shape and actor
    rng = np.random.default_rng([seed, 2])
    shapes = config.shapes_of(task)
    shape, actor = shapes[int(rng.integers(len(shapes)))], config.actors[int(rng.integers(len(config.actors)))]
    return dataclasses.replace(config.scene, task=task, shape=shape, actor=actor)
