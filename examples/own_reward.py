"""Train a tiny vision-language model with your own reward function."""

import json
import tempfile
from pathlib import Path

from mmrl.recipes import find_recipe
from mmrl.rewards import RewardConfig
from mmrl.runs.tracking import TrackingConfig
from mmrl.training.run import train
from mmrl.training.settings import TrainerConfig
from mmrl.vlm import DataConfig, ModelConfig, SamplerConfig, VlmConfig


def share_of_digits(prompts, completions, **columns):
    """One number for each answer, or None where it cannot be scored; `columns` has the other columns of the data."""
    return [sum(letter.isdigit() for letter in text) / len(text) if text else 0.0 for text in completions]


# Your rewards run in worker processes that import this file, so training must be guarded by this line.
if __name__ == "__main__":
    folder = Path(tempfile.mkdtemp(prefix="own-reward-"))
    config = VlmConfig(
        recipe="vlm",
        output_dir=str(folder / "run"),
        # In your run: a hub id or a folder. Here a random Qwen2.5-VL is built, and digit questions are generated.
        model=ModelConfig(path=str(folder / "model"), build="mmrl.vlm.toy.digits:build_model"),
        data=DataConfig(
            path=str(folder / "questions.jsonl"),
            build="mmrl.vlm.toy.digits:build_questions",
            build_options={"count": 16},
        ),
        rewards=[RewardConfig(name=f"{__file__}:share_of_digits", chat=False)],
        sampler=SamplerConfig(max_new_tokens=6),
        trainer=TrainerConfig(steps=20, tasks_per_step=4, samples_per_task=8, learning_rate=3e-3),
        tracking=TrackingConfig(tensorboard=False),
    )
    config.validate()
    run = train(find_recipe("vlm"), config)

    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    print(f"digits in the first step: {steps[0]['reward/mean']:.2f}, in the last: {steps[-1]['reward/mean']:.2f}")
    print(f"curves and sampled answers: {run / 'report.html'}")
