"""A device that follows a script, a line with an expert, and HG-DAgger on it."""

from collections.abc import Sequence

import numpy as np
import torch

from mmrl.training.settings import BaseTrainerConfig, CheckpointConfig, TrackingConfig
from robotics.episodes.demonstrations import DemonstrationConfig
from robotics.episodes.payload import EpisodeSetConfig
from robotics.interventions.devices import DeviceInput
from robotics.interventions.hg_dagger import HgDaggerConfig, InterventionConfig
from robotics.interventions.overseers import OverseerConfig
from robotics.policies.base.action_policy import ActionChoice
from robotics.policies.policy_loading import ActionPolicyConfig
from robotics.sim.opening import SimConfig
from tests.robotics.line_demos import BLIND, SPEED
from tests.robotics.line_sim import LineSim

K = 3
LINE = "tests.robotics.interventions.scripted:open_expert_line"


class ExpertLine(LineSim):
    """The line, whose expert goes to the goal at the demonstrator's speed; it names its action and its rate."""

    action_names = ("dx",)
    state_names = ("place", "goal")
    control_hz = 10.0

    def expert_actions(self):
        return SPEED * np.sign(self.goal - self.place)[self.live, None]


def open_expert_line(config):
    """Factory for `sim.kind`."""
    options = dict(config.options)
    sim = ExpertLine(**{name: value for name, value in options.items() if name != "hz"}, views=config.views)
    sim.control_hz = options.get("hz", sim.control_hz)
    return sim


class FakeDevice:
    """Gives one input after the other, and then nothing more."""

    def __init__(self, inputs: Sequence[DeviceInput] = ()):
        self.inputs = list(inputs)
        self.closed, self.shown, self.pictures = False, [], []

    def poll(self):
        return self.inputs.pop(0) if self.inputs else DeviceInput()

    def show(self, image, text):
        self.shown.append(text)
        self.pictures.append(None if image is None else image.copy())

    def close(self):
        self.closed = True


def pressed(*presses, **axes):
    """An input with these presses and axes."""
    return DeviceInput(axes, presses)


def dagger(folder, demos, **changes):
    """HG-DAgger on the line: two rounds of three episodes."""
    trainer = {"steps": 4, "tasks_per_step": 8, "learning_rate": 3e-3, "threads": 1, "warmup_steps": 0}
    overseer = OverseerConfig(kind="random", rate=0.5, flip=0.0, duration=2)
    about = {"episodes": 3, "every": 2, "overseer": overseer, **changes.pop("interventions", {})}
    settings = {
        "recipe": "robot_hg_dagger",
        "output_dir": str(folder),
        "sim": SimConfig(kind=LINE),
        "model": ActionPolicyConfig(chunk=K, options={"bins": 16, "encoder": BLIND}),
        "demonstrations": DemonstrationConfig(path=str(demos), camera=""),
        "data": EpisodeSetConfig(layouts=5),
        "eval_data": {"held_out": EpisodeSetConfig(split="held_out", layouts=4)},
        "trainer": BaseTrainerConfig(**{**trainer, **changes.pop("trainer", {})}),
        "tracking": TrackingConfig(quiet=True, tensorboard=False),
        "checkpoint": CheckpointConfig(every=1, keep=9),
        "interventions": InterventionConfig(**about),
    }
    config = HgDaggerConfig(**(settings | changes))
    config.evaluation.videos = 0
    config.validate()
    return config


class AlwaysPolicy:
    """Always chooses the same action; `seen` has the control steps of the first row at which it observed."""

    statistics, action_range, past = None, None, 0
    device = torch.device("cpu")

    def __init__(self, *action: float, chunk: int = 1):
        self.action, self.action_size, self.chunk = action, len(action), chunk
        self.sim, self.seen = None, []

    def act(self, batch, generator, temperature=1.0, greedy=False):
        assert greedy
        if self.sim is not None:
            self.seen.append(int(self.sim.elapsed[0]))
        actions = torch.tensor(self.action).expand(len(batch), self.chunk, self.action_size)
        return ActionChoice(actions, actions, torch.zeros(len(batch), self.chunk))
