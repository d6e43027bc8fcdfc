"""Train a tiny Stable Diffusion 3 with AWM and your own image reward."""

import tempfile
from pathlib import Path

from diffusion.toy.shapes.building import build_pipeline
from mmrl import train


def brightness(prompts, completions, **columns):
    """One number per image, a uint8 array (height, width, 3)."""
    return [float(image.mean()) / 255 for image in completions]


folder = Path(tempfile.mkdtemp(prefix="own-image-reward-"))
# In your run: a hub id, a folder or a loaded pipeline. Here a random one of 32 x 32 pixels.
build_pipeline(str(folder / "pipeline"))

run = train(
    "awm",
    model={"path": str(folder / "pipeline"), "max_sequence_length": 1},
    data=["a red circle", "a blue square", "a green triangle"],
    reward=brightness,
    steps=12,
    tasks_per_step=3,
    samples_per_task=8,
    learning_rate=3e-3,
    output_dir=folder / "run",
    options={
        "sampler.steps": 4,
        "heldout_rewards": [{"name": "jpeg_incompressibility"}],  # measured, never optimised
    },
)
first, last = run.metrics[0], run.metrics[-1]
print(f"brightness in the first step: {first['reward/mean']:.3f}, in the last: {last['reward/mean']:.3f}")
print(f"images: {run.report()}")
