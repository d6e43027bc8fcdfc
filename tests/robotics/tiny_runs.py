"""Runs of the tabletop's configurations that take seconds: a policy of random weights, two steps, two groups."""

from pathlib import Path

from robotics.policies.base.encoder import EncoderConfig
from robotics.policies.small import SmallVlaConfig, SmallVlaPolicy

TWO_STEPS = (
    "sim.image_size=32",
    "sim.horizon=8",
    "eval_data.held_out.layouts=1",
    "trainer.steps=2",
    "trainer.tasks_per_step=2",
    "trainer.samples_per_task=2",
    "trainer.minibatches_per_step=2",
    "tracking.quiet=true",
    "tracking.tensorboard=false",
    "tracking.strict=true",
)


def save_tiny_policy(folder: Path, texts: list[str]) -> Path:
    """Write a policy of random weights that knows some instructions."""
    encoder = EncoderConfig(image_size=(32, 32), state_size=10, width=32, heads=2, layers=1, channels=8, keypoints=4)
    SmallVlaPolicy.build(SmallVlaConfig(5, 4, encoder=encoder), texts).save_pretrained(folder)
    return folder
