"""Train a tiny Stable Diffusion 3 with AWM and your own image reward."""

import json
import tempfile
from pathlib import Path

from diffusion import AwmConfig, PipelineConfig, PromptConfig
from mmrl.recipes import find_recipe
from mmrl.rewards import RewardConfig
from mmrl.runs.tracking import TrackingConfig
from mmrl.training.run import train


def brightness(prompts, completions, **columns):
    """One number for each image, a uint8 array (height, width, 3)."""
    return [float(image.mean()) / 255 for image in completions]


# Your rewards run in worker processes that import this file, so training must be guarded by this line.
if __name__ == "__main__":
    folder = Path(tempfile.mkdtemp(prefix="own-image-reward-"))
    prompts = folder / "prompts.txt"
    prompts.write_text("a red circle\na blue square\na green triangle\n")
    config = AwmConfig(
        recipe="awm",
        output_dir=str(folder / "run"),
        # In your run: a hub id or a folder, and no `build`. Here a random pipeline of 32 x 32 pixels is built.
        model=PipelineConfig(
            path=str(folder / "pipeline"), build="diffusion.toy.shapes.building:build_pipeline", max_sequence_length=1
        ),
        data=PromptConfig(path=str(prompts)),
        rewards=[RewardConfig(name=f"{__file__}:brightness")],
        heldout_rewards=[RewardConfig(name="jpeg_incompressibility")],  # measured, never optimised
        tracking=TrackingConfig(tensorboard=False),
    )
    config.sampler.steps = 4
    config.trainer.steps, config.trainer.tasks_per_step, config.trainer.samples_per_task = 12, 3, 8
    config.trainer.learning_rate = 3e-3
    config.validate()
    run = train(find_recipe("awm"), config)

    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    print(f"brightness in the first step: {steps[0]['reward/mean']:.3f}, in the last: {steps[-1]['reward/mean']:.3f}")
    print(f"images: {run / 'report.html'}")
